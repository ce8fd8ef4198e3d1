"""ZeRO's geometry, against tensors that are padded, cut and joined as DeepSpeed does it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rlhf.layouts.zero import (
    BorderGroup,
    FlatGroup,
    Group,
    PartitionRun,
    SlicedGroup,
    alignment_gaps,
    dealt,
    round_robin,
    sub_groups,
    undealt,
)

NUMELS = st.lists(st.integers(1, 60), min_size=1, max_size=8)
DP = st.integers(1, 9)


def _numbered(numels: list[int]) -> list[torch.Tensor]:
    """Parameters whose elements are all different, and none is 0."""
    ends = torch.tensor([0, *numels]).cumsum(0).tolist()
    return [torch.arange(a + 1, b + 1) for a, b in pairwise(ends)]


def _gathered(group: Group, parts: list[torch.Tensor], index: int) -> torch.Tensor:
    return torch.cat([parts[run.rank][run.at : run.at + run.numel] for run in group.runs(index)])


@settings(max_examples=60)
@given(NUMELS, DP)
def test_flat_parameters_are_found_in_the_partitions(numels: list[int], dp: int) -> None:
    group, params = FlatGroup(tuple(numels), dp), _numbered(numels)
    flat = torch.cat([*params, torch.zeros(-sum(numels) % (2 * dp), dtype=torch.int64)])
    parts = list(flat.chunk(dp))
    assert {part.numel() for part in parts} == {group.length()}
    assert all(torch.equal(_gathered(group, parts, i), param) for i, param in enumerate(params))
    assert [group.padding(rank) for rank in range(dp)] == [int((part == 0).sum()) for part in parts]


@settings(max_examples=60)
@given(NUMELS, DP)
def test_sliced_parameters_are_found_in_the_slices(numels: list[int], dp: int) -> None:
    group, params = SlicedGroup(tuple(numels), dp), _numbered(numels)
    padded = [torch.cat([param, torch.zeros(-param.numel() % dp, dtype=torch.int64)]) for param in params]
    parts = [torch.cat([param.chunk(dp)[rank] for param in padded]) for rank in range(dp)]
    assert {part.numel() for part in parts} == {group.length()}
    assert all(torch.equal(_gathered(group, parts, i), param) for i, param in enumerate(params))


@settings(max_examples=60)
@given(NUMELS, DP, st.sampled_from([1, 4, 8]))
def test_parameters_may_be_aligned(numels: list[int], dp: int, multiple: int) -> None:
    gaps = alignment_gaps(numels, multiple)
    group = FlatGroup(tuple(numels), dp, gaps)
    assert gaps[-1] == 0
    assert all(group.offsets[i] % multiple == 0 for i in range(len(numels)))
    assert all(0 <= gap < multiple for gap in gaps)
    assert group.numel == sum(numels) + sum(gaps)
    assert all(sum(run.numel for run in group.runs(i)) == numel for i, numel in enumerate(numels))


@settings(max_examples=60)
@given(NUMELS, DP, st.booleans())
def test_a_rank_is_asked_only_for_what_it_holds(numels: list[int], dp: int, sliced: bool) -> None:
    group: Group = SlicedGroup(tuple(numels), dp) if sliced else FlatGroup(tuple(numels), dp)
    for index in range(len(numels)):
        runs = list(group.runs(index))
        assert runs == [run for rank in range(dp) if (run := group.run(index, rank)) is not None]
        assert [run.start for run in runs] == [sum(r.numel for r in runs[:i]) for i in range(len(runs))]
        assert all(index in group.indices(run.rank) for run in runs)
    if not sliced:
        held = {(i, rank) for rank in range(dp) for i in group.indices(rank)}
        assert held == {(i, run.rank) for i in range(len(numels)) for run in group.runs(i)}


@settings(max_examples=60)
@given(NUMELS, DP, st.integers(1, 8))
def test_momenta_lie_whole_on_every_rank_that_has_a_part(numels: list[int], dp: int, multiple: int) -> None:
    """Against DeepSpeed's own loop (``get_partition_info``), written down here again."""
    gaps = alignment_gaps(numels, multiple)
    flat = FlatGroup(tuple(numels), dp, gaps)
    group = BorderGroup(flat)
    for rank in range(dp):
        start, end, current, held = flat.length() * rank, flat.length() * (rank + 1), 0, []
        for index, (numel, gap) in enumerate(zip(numels, gaps, strict=True)):
            if start <= current < end or current < start < current + numel:
                held.append(index)
            current += numel + gap
        assert list(group.held(rank)) == held
        assert group.length_of(rank) == sum(numels[index] for index in held)
        runs = [group.run(index, rank) for index in range(len(numels))]
        at = 0
        for index in held:
            assert runs[index] == PartitionRun(rank, 0, at, numels[index])
            at += numels[index]
        assert [index for index, run in enumerate(runs) if run is not None] == held


def test_numbers_from_deepspeed() -> None:
    """Facts read off DeepSpeed 0.19.8: a group of 8980 over 2 ranks, and one of 180 over 4."""
    assert FlatGroup((8980,), 2).length() == 4490
    small = FlatGroup((180,), 4)
    assert small.length() == 46
    assert [small.padding(rank) for rank in range(4)] == [0, 0, 0, 4]


def test_a_rank_that_has_padding_only() -> None:
    group = FlatGroup((1, 2), 8)
    assert group.length() == 2
    assert [group.padding(rank) for rank in range(8)] == [0, 1, 2, 2, 2, 2, 2, 2]
    assert [list(group.indices(rank)) for rank in range(3)] == [[0, 1], [1], []]
    assert list(group.runs(1)) == [PartitionRun(0, 0, 1, 1), PartitionRun(1, 1, 0, 1)]
    assert list(SlicedGroup((1,), 4).runs(0)) == [PartitionRun(0, 0, 0, 1)]


def test_groups_without_elements() -> None:
    for group in (FlatGroup((), 2), SlicedGroup((), 2)):
        assert group.length() == 0
        assert list(group.indices(1)) == []
    for empty in (FlatGroup((3, 0), 2), SlicedGroup((3, 0), 2)):
        assert list(empty.runs(1)) == []


@settings(max_examples=60)
@given(NUMELS, DP, st.integers(1, 80))
def test_sub_groups_are_closed_when_they_are_full(numels: list[int], dp: int, limit: int) -> None:
    """Against DeepSpeed's own loop (``_create_fp16_sub_groups``), written down here again."""
    slices = [-(-numel // dp) for numel in numels]
    expected: list[list[int]] = []
    if limit >= sum(slices):
        expected = [list(range(len(numels)))]
    else:
        group: list[int] = []
        for index in range(len(numels)):
            group.append(index)
            if sum(slices[i] for i in group) >= limit or index == len(numels) - 1:
                expected.append(group)
                group = []
    assert [list(part) for part in sub_groups(numels, dp, limit)] == expected


@given(st.lists(st.integers(), max_size=12), DP)
def test_round_robin_deals_like_cards_and_takes_back(items: list[int], dp: int) -> None:
    hands: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        hands.setdefault(index % dp, []).append(item)
    assert dealt(items, dp) == [item for hand in hands.values() for item in hand]
    assert undealt(dealt(items, dp), dp) == items
    assert sorted(round_robin(len(items), dp)) == list(range(len(items)))


@pytest.mark.parametrize(("alignment", "length"), [(2, 4), (1, 3)])
def test_the_fused_optimizer_of_stage_0_does_not_pad(alignment: int, length: int) -> None:
    assert FlatGroup((3,), 1, alignment=alignment).length() == length
