"""Planning and carrying out: random layouts on both sides, against numpy."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rlhf.core import plan as planning
from mcore_rlhf.core.catalog import BFLOAT16, FLOAT32, Box, Chunk, Record, TensorEntry, row_major
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.plan import Copies, check_tiles, coalesced, plan_file
from mcore_rlhf.errors import CoverageError, Incomplete
from tests.unit.core.layouts import INT32, NAME, Stored, catalog, naive, random_tensor, stored, view

RANDOM = st.randoms(use_true_random=False)


def _both(rng: random.Random, tensor: np.ndarray) -> tuple[Stored, Stored]:
    pieces = rng.randrange(1, 6), rng.randrange(1, 6)
    return stored(rng, tensor, "a", pieces[0], transposed=True), stored(rng, tensor, "b", pieces[1])


@settings(max_examples=50)
@given(RANDOM)
def test_a_plan_moves_every_element_to_its_place(rng: random.Random) -> None:
    tensor = random_tensor(rng)
    source, target = _both(rng, tensor)
    with patch.object(planning, "_MOST_PAIRS", rng.choice([1, 2, 3, 1 << 20])):
        plan = plan_file("b", Chunks.of([target.entry]), catalog(source.entry))
    assert not plan.problems
    assert plan.lossless
    got = {key: np.full_like(value, -1) for key, value in target.contents.items()}
    for copy in plan.copies:
        naive(copy, source.contents[copy.source.key], got[copy.target.key])
    for key, value in target.contents.items():
        np.testing.assert_array_equal(got[key], value)
    assert sum(copy.numel for copy in plan.copies) == tensor.size


@settings(max_examples=50)
@given(RANDOM)
def test_coalescing_changes_no_element_and_leaves_no_needless_dimension(rng: random.Random) -> None:
    tensor = random_tensor(rng)
    box = Box.whole(tensor.shape)
    a, b = stored(rng, tensor, "a", 1, transposed=True), stored(rng, tensor, "b", 1)
    copy = coalesced(box.shape, a.entry.chunks[0], b.entry.chunks[0])
    got = np.full_like(b.contents[copy.target.key], -1)
    naive(copy, a.contents[copy.source.key], got)
    np.testing.assert_array_equal(got, b.contents[copy.target.key])
    for i in range(len(copy.shape) - 1):
        inner = copy.shape[i + 1]
        mergeable = (
            copy.source_strides[i] == copy.source_strides[i + 1] * inner
            and copy.target_strides[i] == copy.target_strides[i + 1] * inner
        )
        assert not mergeable


def test_a_contiguous_pair_is_one_run() -> None:
    box = Box((2, 0, 1), (3, 4, 5))
    a = Chunk(box, Record("a", "data/0", INT32, 100, 0), 7, row_major(box.shape))
    b = Chunk(box, Record("b", "data/0", INT32, 100, 0), 9, row_major(box.shape))
    copy = coalesced(box.shape, a, b)
    assert (copy.shape, copy.source_start, copy.target_start, copy.contiguous) == ((60,), 7, 9, True)


def _entry(*chunks: tuple[tuple[int, ...], tuple[int, ...]], shape: tuple[int, ...], file: str = "a") -> TensorEntry:
    record = Record(file, "data/0", INT32, 1000, 0)
    placed = [Chunk(Box(offset, size), record, 100 * i, row_major(size)) for i, (offset, size) in enumerate(chunks)]
    return TensorEntry(NAME, shape, INT32, tuple(placed))


def _problems(source: TensorEntry | None, *target: TensorEntry) -> list[tuple[type, str]]:
    plan = plan_file("b", Chunks.of(target), catalog(*([source] if source else [])))
    return [(problem.kind, problem.message) for problem in plan.problems.found]


def test_a_hole_in_the_source_is_named() -> None:
    source = _entry(((0, 0), (2, 4)), ((3, 0), (1, 4)), shape=(4, 4))
    ((kind, text),) = _problems(source, _entry(((0, 0), (4, 4)), shape=(4, 4), file="b"))
    assert kind is CoverageError
    assert "4 of the 16 elements" in text
    assert str(NAME) in text
    assert "[0:4, 0:4]" in text


def test_overlapping_sources_are_named() -> None:
    source = _entry(((0,), (5,)), ((4,), (4,)), shape=(8,))
    (kind, text), *_ = _problems(source, _entry(((0,), (8,)), shape=(8,), file="b"))
    assert kind is CoverageError
    assert "overlapping" in text
    assert "[0:5] in a, [4:8] in a" in text


def test_a_missing_tensor_is_named() -> None:
    ((kind, text),) = _problems(None, _entry(((0,), (8,)), shape=(8,), file="b"))
    assert kind is Incomplete
    assert str(NAME) in text


def test_equal_replicas_do_not_overlap() -> None:
    source = _entry(((0,), (8,)), ((0,), (8,)), shape=(8,))
    assert _problems(source, _entry(((0,), (8,)), shape=(8,), file="b")) == []
    assert len(source.primary()) == 1
    assert [(kept.start, other.start) for kept, other in source.replicas()] == [(0, 100)]


def test_writing_an_element_twice_is_a_problem() -> None:
    source = _entry(((0,), (8,)), shape=(8,))
    target = _entry(((0,), (8,)), shape=(8,), file="b")
    twice = replace(target, chunks=(replace(target.chunks[0], start=4),))
    ((kind, text),) = _problems(source, target, twice)
    assert kind is CoverageError
    assert "written twice" in text


def test_several_problems_come_together() -> None:
    source = _entry(((0,), (4,)), shape=(8,))
    wanted = _entry(((0,), (8,)), shape=(8,), file="b")
    assert len(_problems(source, wanted, replace(wanted, name=NAME._replace(param="other")))) == 2


@settings(max_examples=50)
@given(RANDOM)
def test_tiles_are_tiles(rng: random.Random) -> None:
    tensor = random_tensor(rng)
    entry = stored(rng, tensor, "a", rng.randrange(1, 6)).entry
    assert check_tiles(entry) is None
    if len(entry.chunks) > 1:
        assert "nowhere" in str(check_tiles(replace(entry, chunks=entry.chunks[1:])))
    grown = tuple(n + 1 for n in entry.global_shape)
    assert "nowhere" in str(check_tiles(replace(entry, global_shape=grown)))
    first = entry.chunks[0]
    beyond = replace(first, box=replace(first.box, offset=tuple(n for n in entry.global_shape)))
    assert "outside" in str(check_tiles(replace(entry, chunks=(*entry.chunks[1:], beyond))))


def test_overlapping_tiles_are_seen() -> None:
    assert "overlapping" in str(check_tiles(_entry(((0,), (8,)), ((2,), (3,)), shape=(8,))))


def test_a_cast_is_not_lossless() -> None:
    source = _entry(((0,), (8,)), shape=(8,))
    target = _entry(((0,), (8,)), shape=(8,), file="b")
    chunk = source.chunks[0]
    wide = replace(source, chunks=(replace(chunk, record=replace(chunk.record, dtype=FLOAT32)),))
    narrow = replace(
        target, chunks=(replace(target.chunks[0], record=replace(target.chunks[0].record, dtype=BFLOAT16)),)
    )
    plan = plan_file("b", Chunks.of([narrow]), catalog(wide))
    assert isinstance(plan.copies, Copies)
    plan.copies.sources = _Looked(plan.copies.sources)
    assert (plan.lossless, plan.casts_done) == (False, 1)
    assert plan.copies[0].cast == BFLOAT16


def test_a_part_of_another_type_is_told() -> None:
    target, source = _entry(((0,), (8,)), shape=(8,), file="b"), _entry(((0,), (4,)), ((4,), (4,)), shape=(8,))
    assert plan_file("b", Chunks.of([target]), catalog(source)).casts == {}
    first, second = source.chunks
    odd = replace(source, chunks=(first, replace(second, record=replace(second.record, dtype=FLOAT32))))
    plan = plan_file("b", Chunks.of([target]), catalog(odd))
    assert plan.casts == {target.name: (FLOAT32, target.dtype)}


class _Looked(list[Record]):
    """Records that may be looked at, and not all of them: every file asks, and there are as many of both."""

    def __iter__(self) -> Iterator[Record]:
        raise AssertionError("all of a source's records")


@settings(max_examples=50)
@given(RANDOM)
def test_narrowing_a_chunk_finds_the_same_elements(rng: random.Random) -> None:
    tensor = random_tensor(rng)
    made: Stored = stored(rng, tensor, "a", 1)
    (chunk,) = made.entry.chunks
    start = tuple(rng.randrange(n) for n in tensor.shape)
    inner = Box(start, tuple(rng.randrange(1, n - a + 1) for a, n in zip(start, tensor.shape, strict=True)))
    part = chunk.narrow(inner)
    region = tuple(slice(a, b) for a, b in zip(inner.offset, inner.stop, strict=True))
    found = view(made.contents[part.record.key], part.start, inner.shape, part.strides)
    np.testing.assert_array_equal(found, tensor[region])
