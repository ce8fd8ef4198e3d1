"""Patterns of hybrid models, and the sizes of the blocks of their mixers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rlhf.errors import LayoutMismatch, Unsupported
from mcore_rlhf.layouts.tensor import Shard, local_layout
from mcore_rlhf.models.hybrid import DELTA_IN, MAMBA_CONV, MAMBA_IN, Pattern
from mcore_rlhf.models.megatron import Traits, partition_of

SEGMENTS = st.lists(st.text("MG*D+-E", max_size=4), min_size=1, max_size=5)


@given(SEGMENTS, st.sampled_from(["", "/*-", "/*-/*-"]))
def test_a_pattern_reads_both_ways(segments: list[str], behind: str) -> None:
    text = "|".join(segments) + behind
    pattern = Pattern.of(text)
    assert (str(pattern), pattern.layers, pattern.next_tokens) == (text, "".join(segments), behind)
    assert pattern.counts == (tuple(map(len, segments)) if len(segments) > 1 else None)
    assert pattern.dealt(pattern.counts) == pattern
    assert str(pattern.dealt(None)) == "".join(segments) + behind


def test_symbols_of_a_newer_megatron_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match=r"'M-K\*': unknown K; known are M Mamba"):
        Pattern.of("M-K*")


MAMBA = {"hidden_size": 64, "mamba_num_heads": None, "mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_state_dim": 32}


def test_sizes_come_from_the_arguments() -> None:
    """Without a number of heads the inner size is twice the hidden size: megatron-core 0.19.2, ssm/mamba_mixer.py."""
    into = MAMBA_IN.partition(MAMBA)
    assert into.parts == (("z", 128), ("x", 128), ("B", 64), ("C", 64), ("dt", 8))
    assert MAMBA_CONV.partition(MAMBA | {"mamba_num_heads": 4}).parts == (("x", 64), ("B", 64), ("C", 64))
    heads = {f"linear_{what}": n for what, n in zip(
        ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim"), (4, 8, 8, 12), strict=True
    )}  # fmt: skip
    assert DELTA_IN.partition(heads).parts == (
        ("query", 32), ("key", 32), ("value", 96), ("z", 96), ("beta", 8), ("alpha", 8)
    )  # fmt: skip
    assert str(into) == "split(0) in z 128, x 128, B 64, C 64, dt 8"


@pytest.mark.parametrize("missing", ["hidden_size", "mamba_head_dim", "mamba_num_groups", "mamba_state_dim"])
def test_arguments_that_are_missing_are_named(missing: str) -> None:
    name = "decoder.layers.0.mixer.in_proj.weight"
    with pytest.raises(LayoutMismatch, match=rf"{name}: args.{missing} is None"):
        partition_of(name, Traits(True, True, MAMBA | {missing: None}))
    assert partition_of(name, Traits(True, True, MAMBA)) == partition_of(
        "x.mixer.in_proj.weight", Traits(True, True, MAMBA)
    )


def test_the_fused_down_projection_of_latent_attention_is_cut_in_its_two_parts() -> None:
    """Each rank has its part of the queries' rows, then its part of the others': read as one block they would be mixed up."""
    name = "decoder.layers.0.self_attention.linear_qkv_down_proj.weight"
    ranks = {"q_lora_rank": 12, "kv_lora_rank": 16, "qk_pos_emb_head_dim": 4}
    partition = partition_of(name, Traits(True, True, ranks))
    assert partition is not None
    assert partition.parts == (("queries", 12), ("keys and values", 20))
    assert [piece.box.offset[0] for piece in local_layout(partition, (32, 8), Shard(1, 2)).pieces] == [6, 22]
    with pytest.raises(LayoutMismatch, match=rf"{name}: args.q_lora_rank is None"):
        partition_of(name, Traits(True, True, {**ranks, "q_lora_rank": None}))
