from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rlhf.errors import UsageError
from mcore_rlhf.manager.rlhf.pieces import RunningStatistics, merged

NUMBERS = st.lists(st.floats(-1e4, 1e4, allow_subnormal=False), min_size=1, max_size=60)


def _splits(data: st.DataObject, numbers: list[float]) -> list[list[float]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(numbers)), max_size=6)))
    bounds = [0, *cuts, len(numbers)]
    return [numbers[start:end] for start, end in pairwise(bounds)]


@given(NUMBERS, st.data())
@settings(max_examples=60)
def test_any_split_in_any_order_and_shape_of_merging_is_the_whole(numbers: list[float], data: st.DataObject) -> None:
    parts = [RunningStatistics.of(part) for part in _splits(data, numbers)]
    while len(parts) > 1:
        first = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        parts[data.draw(st.integers(0, len(parts) - 1))].merge(first)
    (whole,), array = parts, np.array(numbers, dtype=np.float64)
    scale = float(np.abs(array).max())
    assert (whole.count, whole.min, whole.max) == (len(numbers), array.min(), array.max())
    assert whole.mean == pytest.approx(array.mean(), rel=1e-9, abs=1e-12 * scale)
    # Where all numbers are nearly equal, the last bits of numpy's own mean are all that its variance is made of.
    assert whole.variance() == pytest.approx(array.var(), rel=1e-9, abs=1e-14 * scale**2)


@given(NUMBERS, NUMBERS)
@settings(max_examples=40)
def test_merging_two_gives_the_same_bits_in_both_orders(first: list[float], second: list[float]) -> None:
    a, b = RunningStatistics.of(first), RunningStatistics.of(second)
    assert merged([a, b]) == merged([b, a])


def test_a_large_offset_does_not_swallow_the_spread() -> None:
    array = 1e9 + np.random.default_rng(7).normal(size=10_000)
    running = RunningStatistics()
    for batch in np.array_split(array, 37):
        running.update(torch.from_numpy(batch))
    assert running.mean == pytest.approx(array.mean(), rel=1e-15)
    assert running.std(ddof=1) == pytest.approx(array.std(ddof=1), rel=1e-9)


def test_known_numbers() -> None:
    running = RunningStatistics()
    running.update([2.0, 4.0, 4.0, 4.0])
    running.update(torch.tensor([[5, 5], [7, 9]]))
    assert (running.count, running.mean, running.m2, running.min, running.max) == (8, 5.0, 32.0, 2.0, 9.0)
    assert running.std() == 2.0
    assert running.std(ddof=1) == math.sqrt(32 / 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool])
def test_every_dtype_is_summed_in_float64(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 1, 0, 1] * 1001).to(dtype)
    assert RunningStatistics.of(values).mean == pytest.approx(0.6, rel=1e-15)


def test_the_mask_says_what_counts() -> None:
    values = torch.tensor([[1.0, 2.0], [math.nan, 4.0]], requires_grad=True)
    masked = RunningStatistics.of(values, mask=torch.tensor([[1, 1], [0, 1]]))
    assert (masked.count, masked.max) == (3, 4.0)
    assert masked.mean == pytest.approx(7 / 3)
    assert RunningStatistics.of(values, mask=torch.zeros(2, 2)) == RunningStatistics()
    with pytest.raises(UsageError, match=r"shape \(2,\), the values \(2, 2\)"):
        RunningStatistics.of(values, mask=torch.ones(2))


def test_nothing_seen_has_no_spread_and_changes_nothing() -> None:
    empty, one = RunningStatistics(), RunningStatistics.of(3.0)
    assert math.isnan(empty.std())
    assert math.isnan(one.std(ddof=1))
    one.update(torch.zeros(0))
    assert one == RunningStatistics.of(3.0) == merged([empty, one, empty])


@pytest.mark.parametrize("numbers", [[1.0, math.inf], [-math.inf, 2.0, 3.0], [math.nan, 1.0], [1.0, math.nan]])
@pytest.mark.parametrize("batches", [1, 2])
def test_nan_and_infinity_are_as_in_numpy(numbers: list[float], batches: int) -> None:
    array = np.array(numbers)
    running = merged(RunningStatistics.of(part) for part in np.array_split(array, batches))
    found = np.array([running.mean, running.min, running.max])
    np.testing.assert_array_equal(found, [array.mean(), array.min(), array.max()])
    assert math.isnan(running.std())


def test_ranks_are_merged_in_their_order(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    ranks = [RunningStatistics.of([rng.gauss(0, 1) for _ in range(5 + rank)]) for rank in range(4)]
    before = [RunningStatistics(**vars(rank)) for rank in ranks]

    def gather(target: list[Any], item: object, group: object) -> None:
        assert group == "dp"
        target[:] = ranks

    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 4)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    wholes = [rank.merged_across("dp") for rank in ranks]  # type: ignore[arg-type]
    assert all(whole == merged(ranks) for whole in wholes)
    assert (wholes[0].count, ranks) == (26, before)
