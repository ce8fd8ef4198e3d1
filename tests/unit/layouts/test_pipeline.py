"""Dealing layers to model chunks: against what megatron-core itself builds, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rlhf.errors import LayoutMismatch, UsageError
from mcore_rlhf.layouts.pipeline import PipelineSplit, model_chunks, parse_layout, split_from_option

GOLDEN = json.loads((Path(__file__).parents[2] / "goldens/megatron_core/pipeline.json").read_text())


def counts(*args: Any) -> list[int] | None:
    try:
        chunks = model_chunks(*args)
    except LayoutMismatch:
        return None
    pp, vpp = args[1:3]
    assert [(c.vpp_rank, c.pp_rank) for c in chunks] == [(v, p) for v in range(vpp) for p in range(pp)]
    layer = 0
    for chunk in chunks:
        assert chunk.first_layer == layer, "a token passes layers in order"
        layer += chunk.num_layers
    return [chunk.num_layers for chunk in chunks]


def test_layers_are_dealt_as_megatron_deals_them() -> None:
    """All rules of get_num_layers_to_build; what Megatron refuses, or would build wrongly, is refused."""
    assert len(GOLDEN["rules"]) > 500
    wrong = []
    for case in GOLDEN["rules"]:
        split = PipelineSplit(
            first=case.get("first"), last=case.get("last"),
            count_embedding=case.get("embedding", False), count_loss=case.get("loss", False),
        )  # fmt: skip
        found = counts(case["num_layers"], case["pp"], case["vpp"], split)
        if found != case["counts"]:
            wrong.append((case, found))
    assert not wrong, f"{len(wrong)} differ: {wrong[:5]}"


@pytest.mark.parametrize("case", GOLDEN["strings"], ids=lambda case: case["layout"])
def test_layout_strings_mean_what_they_mean_to_megatron(case: dict[str, Any]) -> None:
    layers, mtp = sum(case["decoder"]), sum(case["mtp"])
    chunks = model_chunks(layers, case["pp"], case["vpp"], PipelineSplit(layout=case["layout"]), mtp)
    assert [c.num_layers for c in chunks] == case["decoder"]
    assert [c.first_layer for c in chunks] == case["offsets"]
    assert [c.mtp for c in chunks] == [n > 0 for n in case["mtp"]]
    assert [c.embedding for c in chunks] == [n > 0 for n in case["embedding"]]
    assert [c.loss for c in chunks] == [n > 0 for n in case["loss"]]
    last = max(i for i, n in enumerate(case["decoder"]) if n)
    assert [i for i, c in enumerate(chunks) if c.holds_last_layer] == [last]


def test_layouts_that_do_not_fit_are_refused_with_reasons() -> None:
    with pytest.raises(LayoutMismatch, match=r"3 × t instead of 4.*3 chunks instead of PP 2 × VPP 1"):
        model_chunks(4, 2, 1, PipelineSplit(layout="Et|t|tL"))
    with pytest.raises(LayoutMismatch, match=r"begin with E"):
        model_chunks(2, 2, 1, PipelineSplit(layout="tE|tL"))
    with pytest.raises(LayoutMismatch, match=r"0 × m instead of 1"):
        model_chunks(2, 2, 1, PipelineSplit(layout="Et|tL"), 1)
    with pytest.raises(UsageError, match=r"unknown x"):
        parse_layout("Etx|tL")


@settings(max_examples=50)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 2))
def test_numbers_say_how_many_layers_a_chunk_gets(numbers: list[int], mtp: int) -> None:
    split = split_from_option(",".join(map(str, numbers)), sum(numbers), len(numbers), 1, mtp)
    chunks = model_chunks(sum(numbers), len(numbers), 1, split, mtp)
    assert [c.num_layers for c in chunks] == numbers
    assert [c.mtp for c in chunks] == [False] * (len(numbers) - 1) + [mtp > 0]


@settings(max_examples=50)
@given(st.integers(2, 3), st.lists(st.integers(0, 4), min_size=6, max_size=6).filter(sum))
def test_numbers_with_virtual_stages(pp: int, numbers: list[int]) -> None:
    vpp = 6 // pp
    split = split_from_option(" , ".join(map(str, numbers)), sum(numbers), pp, vpp, 0)
    assert [c.num_layers for c in model_chunks(sum(numbers), pp, vpp, split)] == numbers


@pytest.mark.parametrize("text", ["3,1", "1,1,1", "2,2,1"])
def test_numbers_that_do_not_add_up_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected 3 numbers \(PP 3 × VPP 1\) that add up to 4 layers"):
        split_from_option(text, 4, 3, 1, 0)


def test_an_even_split_needs_nothing_said() -> None:
    assert PipelineSplit().even
    assert not PipelineSplit(count_loss=True).even
    assert [c.num_layers for c in model_chunks(8, 2, 2, PipelineSplit())] == [2, 2, 2, 2]
