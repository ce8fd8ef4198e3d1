"""The table of Megatron's names: what is cut how, which numbers names carry, and in which order modules register."""

from __future__ import annotations

import random
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rlhf.models.megatron import (
    Traits,
    expert_of,
    in_registration_order,
    is_buffer,
    is_routed_expert,
    layer_of,
    partition_of,
    renumbered,
)
from mcore_rlhf.models.spec import COLUMN, GATED, REPLICATED, ROW, VOCABULARY, Partition
from tests.helpers.conversions import NAMES, golden

GATED_LOCAL, PLAIN_TE = Traits(gated=True, transformer_engine=False), Traits(gated=False, transformer_engine=True)
L = "decoder.layers.3."

TABLE = [
    ("embedding.word_embeddings.weight", VOCABULARY, VOCABULARY),
    ("embedding.position_embeddings.weight", REPLICATED, REPLICATED),
    ("output_layer.weight", VOCABULARY, VOCABULARY),
    ("decoder.final_layernorm.weight", REPLICATED, REPLICATED),
    (L + "input_layernorm.weight", REPLICATED, REPLICATED),
    (L + "self_attention.linear_qkv.weight", COLUMN, COLUMN),
    (L + "self_attention.linear_qkv.bias", COLUMN, COLUMN),
    (L + "self_attention.linear_qkv.layer_norm_weight", REPLICATED, REPLICATED),
    (L + "self_attention.linear_qkv.layer_norm_bias", REPLICATED, REPLICATED),
    (L + "self_attention.linear_proj.weight", ROW, ROW),
    (L + "self_attention.linear_proj.bias", REPLICATED, REPLICATED),
    (L + "self_attention.q_layernorm.weight", REPLICATED, REPLICATED),
    (L + "self_attention.linear_q_proj.weight", COLUMN, COLUMN),
    (L + "self_attention.linear_q_down_proj.weight", COLUMN, REPLICATED),
    (L + "self_attention.linear_kv_down_proj.weight", COLUMN, REPLICATED),
    (L + "self_attention.linear_kv_up_proj.weight", COLUMN, COLUMN),
    (L + "self_attention.kv_layernorm.weight", REPLICATED, REPLICATED),
    (L + "pre_mlp_layernorm.bias", REPLICATED, REPLICATED),
    (L + "mlp.linear_fc1.weight", GATED, COLUMN),
    (L + "mlp.linear_fc1.bias", GATED, COLUMN),
    (L + "mlp.linear_fc1.layer_norm_weight", REPLICATED, REPLICATED),
    (L + "mlp.linear_fc2.weight", ROW, ROW),
    (L + "mlp.linear_fc2.bias", REPLICATED, REPLICATED),
    (L + "mlp.router.weight", REPLICATED, REPLICATED),
    (L + "mlp.router.expert_bias", REPLICATED, REPLICATED),
    (L + "mlp.router.qb_beta", REPLICATED, REPLICATED),
    (L + "mlp.shared_experts.linear_fc1.weight", GATED, COLUMN),
    (L + "mlp.shared_experts.linear_fc2.weight", ROW, ROW),
    (L + "mlp.shared_experts.gate_weight", REPLICATED, REPLICATED),
    (L + "mlp.experts.local_experts.1.linear_fc1.weight", GATED, COLUMN),
    (L + "mlp.experts.local_experts.11.linear_fc2.weight", ROW, ROW),
    (L + "mlp.experts.linear_fc1.weight10", GATED, COLUMN),
    (L + "mlp.experts.linear_fc1.bias10", GATED, COLUMN),
    (L + "mlp.experts.linear_fc2.weight3", ROW, ROW),
    (L + "mlp.experts.linear_fc2.bias3", REPLICATED, REPLICATED),
    (L + "mlp.experts.weight1", Partition(2, blocks=2, stacked=1), Partition(2, stacked=1)),
    (L + "mlp.experts.weight2", Partition(1, stacked=0), Partition(1, stacked=0)),
    ("mtp.layers.0.eh_proj.weight", COLUMN, COLUMN),
    ("mtp.layers.0.enorm.weight", REPLICATED, REPLICATED),
    ("mtp.layers.0.transformer_layer.mlp.linear_fc2.weight", ROW, ROW),
    ("mtp.layers.0.final_layernorm.weight", REPLICATED, REPLICATED),
    (L + "mixer.norm.weight", COLUMN, COLUMN),
    (L + "mixer.A_log", COLUMN, COLUMN),
    (L + "mixer.in_proj.layer_norm_weight", REPLICATED, REPLICATED),
    (L + "mixer.out_proj.weight", ROW, ROW),
    (L + "self_attention.dt_bias", COLUMN, COLUMN),
    (L + "self_attention.out_norm.weight", REPLICATED, REPLICATED),
    (L + "self_attention.out_proj.weight", ROW, ROW),
    ("decoder.final_norm.weight", REPLICATED, REPLICATED),
    ("value_head.weight", None, None),
    ("my_output_layer.weight", None, None),
    ("decoder.layers.0.lora.adapter.weight", None, None),
]


@pytest.mark.parametrize(("name", "gated_local", "plain_te"), TABLE, ids=[row[0] for row in TABLE])
def test_how_a_parameter_is_cut(name: str, gated_local: Partition | None, plain_te: Partition | None) -> None:
    assert partition_of(name, GATED_LOCAL) == gated_local
    assert partition_of(name, PLAIN_TE) == plain_te


@pytest.mark.parametrize("name", NAMES)
def test_the_table_knows_every_parameter_of_the_goldens(name: str) -> None:
    assert [n for n in golden(name).names if partition_of(n, GATED_LOCAL) is None] == []


@pytest.mark.parametrize(
    ("name", "layer", "expert", "routed"),
    [
        ("decoder.layers.12.mlp.experts.local_experts.3.linear_fc1.weight", 12, 3, True),
        ("decoder.layers.0.mlp.experts.linear_fc2.weight10", 0, 10, True),
        ("decoder.layers.0.mlp.experts.linear_fc2.bias10", 0, 10, True),
        ("decoder.layers.7.mlp.experts.weight1", 7, None, True),
        ("decoder.layers.7.mlp.shared_experts.linear_fc1.weight", 7, None, False),
        ("language_model.encoder.layers.4.self_attention.dense.weight", 4, None, False),
        ("mtp.layers.0.transformer_layer.mlp.linear_fc1.weight", None, None, False),
        ("output_layer.weight", None, None, False),
    ],
)
def test_numbers_in_names(name: str, layer: int | None, expert: int | None, routed: bool) -> None:
    assert (layer_of(name), expert_of(name), is_routed_expert(name)) == (layer, expert, routed)
    moved = renumbered(name, 10, 100)
    assert (layer_of(moved), expert_of(moved)) == (layer if layer is None else layer + 10, expert and expert + 100)
    assert renumbered(moved, -10, -100) == name


def test_buffers_are_no_parameters() -> None:
    assert is_buffer("decoder.layers.0.mlp.router.expert_bias")
    assert is_buffer("decoder.layers.0.mlp.router.qb_beta")
    assert is_buffer("decoder.layers.0.mlp.router.local_tokens_per_expert")
    assert not is_buffer("decoder.layers.0.mlp.router.weight")


@settings(max_examples=50)
@given(st.randoms(use_true_random=False), st.integers(1, 13))
def test_stages_join_into_one_order(rng: random.Random, layers: int) -> None:
    """Layers by number (10 after 9), whatever order stages were read in; what is before and behind them stays there."""
    inside = [
        "input_layernorm.weight",
        "self_attention.linear_proj.weight",
        "self_attention.linear_qkv.weight",
        "mlp.linear_fc1.weight",
    ]
    blocks = [[f"decoder.layers.{n}.{name}" for name in inside] for n in range(layers)]
    expected = [
        "embedding.word_embeddings.weight",
        *chain.from_iterable(blocks),
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]
    rng.shuffle(blocks)
    assert in_registration_order([expected[0], *chain.from_iterable(blocks), *expected[-2:]]) == expected


def test_grouped_experts_register_expert_by_expert() -> None:
    """TEGroupedLinear registers weight0, bias0, weight1, … for fc1, then for fc2; ranks bring numbers in any order."""
    base = "decoder.layers.0.mlp.experts."
    one_rank = [f"{base}linear_fc{f}.{kind}{i}" for f in (1, 2) for i in range(2) for kind in ("weight", "bias")]
    other = [renumbered(name, 0, 2) for name in one_rank]
    expected = [f"{base}linear_fc{f}.{kind}{i}" for f in (1, 2) for i in range(4) for kind in ("weight", "bias")]
    assert in_registration_order([*one_rank, *other]) == expected
    assert in_registration_order([*other, *one_rank]) == expected
    many = [f"{base}linear_fc1.weight{i}" for i in range(12)]
    assert in_registration_order(sorted(many)) == many


def test_sequential_experts_register_module_by_module() -> None:
    base = "decoder.layers.0.mlp.experts.local_experts."
    expected = [f"{base}{i}.linear_fc{f}.weight" for i in range(12) for f in (1, 2)]
    assert in_registration_order(sorted(expected)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_of_a_golden_is_in_order_already(name: str) -> None:
    for rank in golden(name).ranks:
        for chunk in rank.chunks():
            assert in_registration_order(list(chunk)) == list(chunk)
