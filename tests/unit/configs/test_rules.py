"""Every example of rules can be read, and says what its comments say."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_rlhf.models.spec import COLUMN, GATED, REPLICATED, ROW, Partition, Rules, read_rules

RULES = Path(__file__).resolve().parents[3] / "configs" / "rules"


def _rules(name: str) -> Rules:
    return read_rules(RULES / f"{name}.yaml")


@pytest.mark.parametrize("path", sorted(RULES.glob("*.yaml")), ids=lambda path: path.stem)
def test_it_can_be_read(path: Path) -> None:
    assert read_rules(path).rules


def test_a_value_head_is_replicated_and_trained() -> None:
    rules = _rules("value-head")
    assert rules.partition("value_head.weight") == rules.partition("decoder.v_head.summary.bias") == REPLICATED
    assert rules.partition("decoder.layers.0.self_attention.linear_qkv.weight") is None
    assert rules.trainable("value_head.weight") is None


def test_a_head_in_place_of_the_output_layer_is_replicated() -> None:
    rules = _rules("critic-output-layer")
    assert rules.partition("output_layer.weight") == REPLICATED
    assert rules.wd_mult("output_layer.bias") == 0.0
    assert rules.partition("mtp.layers.0.output_layer.weight") is None


@pytest.mark.parametrize(
    ("layer", "linear_in", "linear_out"),
    [
        ("self_attention.linear_qkv", COLUMN, COLUMN),
        ("self_attention.linear_proj", ROW, COLUMN),
        ("mlp.linear_fc1", COLUMN, GATED),
        ("mlp.linear_fc2", ROW, COLUMN),
    ],
)
def test_adapters_are_cut_like_their_layers_and_alone_are_trained(
    layer: str, linear_in: Partition, linear_out: Partition
) -> None:
    rules, prefix = _rules("lora-adapters"), f"decoder.layers.3.{layer}"
    assert rules.partition(f"{prefix}.adapter.linear_in.weight") == linear_in
    assert rules.partition(f"{prefix}.adapter.linear_out.weight") == linear_out
    assert rules.trainable(f"{prefix}.adapter.linear_in.weight") is True
    assert rules.trainable(f"{prefix}.weight") is False
    assert rules.partition(f"{prefix}.weight") is None, "the base layer stays with the tables"


def test_new_layers_show_every_way_to_cut() -> None:
    rules = _rules("new-layers")
    partitions = {rules.partition(f"decoder.layers.0.{name}") for name in ("my_router.weight", "my_in_proj.weight")}
    assert partitions == {REPLICATED, COLUMN}
    assert rules.partition("x.my_fused_qkvg.weight") == Partition(0, blocks=4)
    assert rules.trainable("reference_model.embedding.weight") is False
    assert rules.wd_mult("x.my_scale") == 0.0
