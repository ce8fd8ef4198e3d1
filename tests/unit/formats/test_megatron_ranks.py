"""Ranks share what they have in common: each is laid out as it would be alone, whoever was asked before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mcore_rlhf.core.catalog import BFLOAT16, EXP_AVG, EXP_AVG_SQ, FLOAT32
from mcore_rlhf.families.megatron.arguments import Arguments
from mcore_rlhf.families.megatron.folders import FileRank, file_ranks
from mcore_rlhf.families.megatron.layout import Blueprint
from mcore_rlhf.families.megatron.new_layout import NewLayout
from mcore_rlhf.families.megatron.ranks import RankLayout
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.pipeline import PipelineSplit, model_chunks
from mcore_rlhf.models.spec import COLUMN, GATED, REPLICATED, ROW, VOCABULARY, ModelSpec, ParamSpec

PARALLEL = ParallelConfig(tp=2, pp=2, ep=2, etp=2, dp=2)
LAYERS, EXPERTS, HIDDEN = 4, 4, 8


def spec(name: str) -> ParamSpec:
    if "fc1" in name:
        return ParamSpec(name, (16, HIDDEN), BFLOAT16, GATED)
    if "fc2" in name:
        return ParamSpec(name, (HIDDEN, 8), BFLOAT16, ROW)
    if "qkv" in name:
        return ParamSpec(name, (24, HIDDEN), BFLOAT16, COLUMN)
    words = VOCABULARY if "embedding" in name or "output" in name else REPLICATED
    return ParamSpec(name, (32, HIDDEN) if words is VOCABULARY else (HIDDEN,), BFLOAT16, words)


def names() -> list[str]:
    found = ["embedding.word_embeddings.weight"]
    for layer in range(LAYERS):
        inside = [
            "input_layernorm.weight",
            "self_attention.linear_qkv.weight",
            "self_attention.linear_qkv._extra_state",
        ]
        inside += [f"mlp.experts.local_experts.{n}.linear_fc{m}.weight" for n in range(EXPERTS) for m in (1, 2)]
        found += [f"decoder.layers.{layer}.{name}" for name in inside]
    return [*found, "decoder.final_layernorm.weight", "output_layer.weight"]


def blueprint(optimizer: str, change: Callable[[ParamSpec], ParamSpec]) -> Blueprint:
    specs = tuple(change(spec(name)) for name in names() if "_extra_state" not in name)
    model = ModelSpec(specs, LAYERS, False, 0, EXPERTS, 32, 32)
    args = Arguments({"num_experts": EXPERTS, "use_distributed_optimizer": optimizer == "distributed", "bf16": True})
    choices = NewLayout(PARALLEL, PipelineSplit(), 32, None, optimizer, "derive")
    chunks = model_chunks(LAYERS, PARALLEL.pp, PARALLEL.vpp, PipelineSplit(), 0)
    return Blueprint("actor", model, args, choices, chunks, names(), (EXP_AVG, EXP_AVG_SQ), {})


def told(whole: Blueprint, at: FileRank) -> tuple[object, ...]:
    rank = RankLayout(whole, at, "iter_0000001")
    files = [(part.records, [*part.holds().entries()]) for part in (rank.model, rank.distrib)]
    return files, rank.items, rank.params, rank.states, rank.buffer_states, rank.local_buffers, rank.trained()


def third(change: dict[str, object]) -> Callable[[ParamSpec], ParamSpec]:
    """One expert that is treated differently."""
    return lambda one: replace(one, **change) if "local_experts.3." in one.name else one  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", ["distributed", "plain"])
@pytest.mark.parametrize(
    "change",
    [{}, {"trainable": False}, {"dtype": FLOAT32}, {"global_shape": (16, 16)}],
    ids=lambda one: next(iter(one), "alike"),
)
def test_a_rank_is_laid_out_as_it_would_be_alone(optimizer: str, change: dict[str, object]) -> None:
    whole = blueprint(optimizer, third(change))
    shared = {at: told(whole, at) for at in file_ranks(PARALLEL)}
    assert shared == {at: told(blueprint(optimizer, third(change)), at) for at in shared}
    mine = {item.item.name for at in shared for item in RankLayout(whole, at, "").items}
    assert mine == set(names()), "some key is on no rank"
