"""Cutting copies into windows: they tile the record in order, stay small, and move what the copies would."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rlhf.core.catalog import Box, Chunk, Record, row_major
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.execute import windows
from mcore_rlhf.core.plan import Copy, coalesced, plan_file
from tests.unit.core.layouts import INT32, catalog, naive, random_tensor, stored

RANDOM = st.randoms(use_true_random=False)


def record(numel: int, file: str = "b") -> Record:
    return Record(file, "data/0", INT32, numel, 0)


def check(copies: list[Copy], numel: int, limit: int, phase: int = 0) -> None:
    """Windows against the copies carried out element by element.

    Only a window with a copy that is one element wide, and further apart than the limit, may exceed it.
    """
    longest = 1 + max(
        (c.source_start + sum((n - 1) * s for n, s in zip(c.shape, c.source_strides, strict=True)) for c in copies),
        default=0,
    )
    source = np.arange(1, longest + 1, dtype=np.int64)
    expected, got = np.zeros(numel, np.int64), np.zeros(numel, np.int64)
    for copy in copies:
        naive(copy, source, expected)
    position = 0
    for window in windows(copies, numel, limit, phase):
        assert window.start == position, "windows tile the record in order"
        assert window.numel > 0
        wide = any(len(copy.shape) == 1 and copy.target_strides[0] > limit for copy in window.copies)
        assert wide or window.numel <= limit
        position += window.numel
        part = np.zeros(numel, np.int64)
        for copy in window.copies:
            naive(copy, source, part)
        assert not part[: window.start].any(), "a copy of a window writes before it"
        assert not part[position:].any(), "a copy of a window writes behind it"
        got += part
    assert position == numel
    np.testing.assert_array_equal(got, expected)


@settings(max_examples=50)
@given(RANDOM, st.integers(1, 40))
def test_windows_of_random_layouts(rng: random.Random, limit: int) -> None:
    tensor = random_tensor(rng)
    source, target = stored(rng, tensor, "a", 3, transposed=True), stored(rng, tensor, "b", rng.randrange(1, 6), 1)
    plan = plan_file("b", Chunks.of([target.entry]), catalog(source.entry))
    copies = list(plan.copies)
    rng.shuffle(copies)
    check(copies, target.entry.chunks[0].record.numel, limit, rng.randrange(50))


@settings(max_examples=50)
@given(
    st.integers(1, 6), st.integers(1, 4), st.integers(1, 12), st.integers(1, 30), st.integers(0, 5), st.integers(0, 5)
)
def test_columns_of_several_ranks_interleave(
    rows: int, ranks: int, width: int, limit: int, before: int, after: int
) -> None:
    """A merge on the last dimension: every rank fills a stripe of each row; one window holds all of them."""
    pitch = ranks * width
    copies = [
        Copy((rows, width), record(rows * width, f"rank{r}"), 0, (width, 1), record(0), before + r * width, (pitch, 1))
        for r in range(ranks)
    ]
    check(copies, before + rows * pitch + after, limit)


@settings(max_examples=50)
@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 20), st.integers(1, 3))
def test_new_vocabulary_rows_repeat_one_row(words: int, width: int, limit: int, new: int) -> None:
    """Stride 0: the last row of a source again and again."""
    old = Copy((words * width,), record(words * width, "a"), 0, (1,), record(0), 0, (1,))
    repeated = Copy(
        (new, width), record(words * width, "a"), (words - 1) * width, (0, 1), record(0), words * width, (width, 1)
    )
    check([repeated, old], (words + new) * width, limit)


@settings(max_examples=50)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.integers(2, 3), st.integers(1, 60))
def test_grouped_experts_are_three_dimensional(experts: int, hidden: int, ffn: int, ranks: int, limit: int) -> None:
    """GroupedMLP's weight1 seen as (experts, hidden, gate and up): split on the innermost dimension, in two blocks."""
    whole, local = (experts, hidden, 2 * ffn * ranks), (experts, hidden, 2 * ffn)
    copies = [
        Copy(
            (experts, hidden, ffn), record(prod(local), f"rank{r}"), block * ffn, row_major(local),
            record(0), (block * ranks + r) * ffn, row_major(whole),
        )
        for r in range(ranks)
        for block in range(2)
    ]  # fmt: skip
    check(copies, prod(whole), limit)


def test_gaps_are_windows_of_zeros() -> None:
    copy = Copy((5,), record(5, "a"), 0, (1,), record(0), 10, (1,))
    found = [(w.start, w.numel, len(w.copies)) for w in windows([copy], 23, 4)]
    assert found[:3] == [(0, 4, 0), (4, 4, 0), (8, 2, 0)]
    assert found[-2:] == [(15, 4, 0), (19, 4, 0)]
    assert sum(numel for _, numel, copies in found if copies) == 5


def test_an_empty_record_has_no_windows_and_an_unfilled_one_only_gaps() -> None:
    assert list(windows([], 0, 8)) == []
    assert [(w.start, w.numel, w.copies) for w in windows([], 10, 8)] == [(0, 8, ()), (8, 2, ())]


@pytest.mark.parametrize("limit", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("phase", [0, 5, 64])
def test_a_long_run_is_cut_at_round_offsets_of_the_file(limit: int, phase: int) -> None:
    numel = 1000
    copy = Copy((numel,), record(numel, "a"), 0, (1,), record(0), 0, (1,))
    cuts = [w.start for w in windows([copy], numel, limit, phase)][1:]
    assert cuts == [at for at in range(1, numel) if (at + phase) % limit == 0]


@pytest.mark.parametrize("limit", [1, 2, 5, 64])
def test_a_transposed_target(limit: int) -> None:
    """The planner turns dimensions so that the target's strides fall."""
    box = Box.whole((3, 4))
    copy = coalesced(box.shape, Chunk(box, record(12, "a"), 0, (4, 1)), Chunk(box, record(12), 0, (1, 3)))
    assert copy.target_strides == (3, 1)
    check([copy], 12, limit)


def test_pieces_that_coalesce_differently() -> None:
    """A (10, 5) matrix: columns 0–3 in one piece, column 4 in two that do not merge."""
    copies = [
        Copy((5,), record(60, "a"), 0, (1,), record(0), 4, (10,)),
        Copy((5,), record(60, "a"), 5, (1,), record(0), 9, (10,)),
        Copy((10, 4), record(60, "a"), 10, (4, 1), record(0), 0, (5, 1)),
    ]
    for limit in (64, 12, 5, 3, 1):
        check(copies, 50, limit)
