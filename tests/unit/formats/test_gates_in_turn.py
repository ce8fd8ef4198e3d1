"""Experts whose gate and up lie in turn are not cut anew: their halves are not what a rank holds."""

from __future__ import annotations

import pytest

from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.megatron.arguments import Arguments
from mcore_rlhf.families.megatron.new_layout import _check_blocks
from mcore_rlhf.layouts.parallel import ParallelConfig

ONE, TWO = ParallelConfig(dp=2), ParallelConfig(tp=2, etp=2, dp=2)
THIN = ParallelConfig(tp=2, etp=1, dp=2)


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("moe_mlp_glu_interleave_size", ONE, TWO, "etp 1 → 2"),
        ("moe_mlp_glu_interleave_size", ONE, THIN, ""),
        ("moe_shared_expert_glu_interleave_size", ONE, THIN, "tp 1 → 2"),
        ("moe_shared_expert_glu_interleave_size", TWO, THIN, ""),
    ],
)
def test_what_would_be_cut_in_the_wrong_places_is_refused(
    name: str, old: ParallelConfig, new: ParallelConfig, said: str
) -> None:
    _check_blocks(Arguments({name: None}), old, new)
    if not said:
        _check_blocks(Arguments({name: 32}), old, new)
        return
    with pytest.raises(Unsupported, match=rf"{name} is 32.* {said}"):
        _check_blocks(Arguments({name: 32}), old, new)
