"""Coordinates of ranks: against megatron-core's own RankGenerator, and against each other."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.errors import LayoutMismatch
from mcore_rlhf.layouts.parallel import ParallelConfig, least_dp

CASES = json.loads((Path(__file__).parents[2] / "goldens/megatron_core/ranks.json").read_text())["cases"]
DEGREES = ("tp", "pp", "cp", "dp", "ep", "etp")


def label(case: dict[str, Any]) -> str:
    return "".join(f"{axis}{case[axis]}" for axis in DEGREES)


@pytest.mark.parametrize("case", CASES, ids=label)
def test_ranks_stand_where_megatron_puts_them(case: dict[str, Any]) -> None:
    parallel = ParallelConfig(**{axis: case[axis] for axis in DEGREES})
    found = [asdict(at) for _, at in parallel.ranks()]
    for axis in ("tp_rank", "pp_rank", "cp_rank", "dp_rank", "ep_rank", "etp_rank", "expert_dp_rank"):
        assert [at[axis] for at in found] == case[axis], axis
    assert parallel.world_size == len(found)
    assert parallel.expert_dp == 1 + max(case["expert_dp_rank"])


@pytest.mark.parametrize(
    ("tp", "cp", "ep", "etp", "dp"),
    [(1, 1, 4, 1, 4), (2, 1, 4, 2, 4), (2, 1, 4, 1, 2), (4, 1, 2, 1, 1), (2, 3, 4, 1, 2)],
)
def test_the_least_dp_holds_the_experts_and_no_smaller_one_does(tp: int, cp: int, ep: int, etp: int, dp: int) -> None:
    assert least_dp(tp, cp, ep, etp) == dp
    assert ParallelConfig(tp=tp, cp=cp, ep=ep, etp=etp, dp=dp).least_dp == dp
    for smaller in range(1, dp):
        with pytest.raises(LayoutMismatch, match=rf"multiple of {dp}"):
            ParallelConfig(tp=tp, cp=cp, ep=ep, etp=etp, dp=smaller)


def test_degrees_below_one_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match="tp, dp"):
        ParallelConfig(tp=0, dp=-1)


def test_a_layout_in_words() -> None:
    assert str(ParallelConfig(tp=2, etp=2)) == "TP2×PP1×DP1"
    assert str(ParallelConfig(tp=2, pp=4, vpp=2, cp=2, ep=4, etp=1, dp=8)) == "TP2×PP4×VPP2×CP2×EP4×ETP1×DP8"
