"""Boxes and flat ranges, held against sets of indices."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rlhf.core.catalog import Box, dot, flat_boxes, row_major

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def elements(box: Box) -> set[tuple[int, ...]]:
    each = zip(box.offset, box.shape, box.steps, strict=True)
    return set(product(*(range(a, a + n * by, by) for a, n, by in each)))


@st.composite
def boxes(draw: st.DrawFn, count: int = 2) -> list[Box]:
    ndim = draw(st.integers(1, 3))
    dims = st.lists(st.integers(0, 5), min_size=ndim, max_size=ndim).map(tuple)
    return [Box(draw(dims), draw(dims)) for _ in range(count)]


@settings(max_examples=50)
@given(boxes())
def test_an_intersection_is_what_both_hold(pair: list[Box]) -> None:
    a, b = pair
    common = elements(a) & elements(b)
    met = a.intersect(b)
    assert (met is None) == (not common)
    assert met is None or elements(met) == common
    assert b.intersect(a) == met
    assert a.numel == len(elements(a))


@st.composite
def stepped(draw: st.DrawFn) -> list[Box]:
    """Two boxes of the same steps, or one without any."""
    step = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple))
    dims = st.lists(st.integers(0, 5), min_size=len(step), max_size=len(step)).map(tuple)
    return [Box(draw(dims), draw(dims), step), Box(draw(dims), draw(dims), draw(st.sampled_from([None, step])))]


@given(stepped())
def test_boxes_with_steps_meet_where_both_have_elements(pair: list[Box]) -> None:
    a, b = pair
    common = elements(a) & elements(b)
    met = a.intersect(b)
    assert (met is None) == (not common)
    assert met is None or elements(met) == common
    assert b.intersect(a) == met
    if b.numel:
        assert a.contains(b) == (elements(b) <= elements(a))
        assert a.stop == tuple(max(each, default=0) + 1 for each in zip(*elements(a), strict=True)) or not a.numel


def test_a_box_with_steps_says_so() -> None:
    assert str(Box((0, 1), (3, 4), (1, 2))) == "[0:3, 1:8:2]"
    assert Box((0, 1), (3, 4), (1, 2)).shift((0, 1)) == Box((0, 0), (3, 4), (1, 2))
    with pytest.raises(ValueError, match="neither equal nor 1"):
        Box((0,), (4,), (2,)).intersect(Box((0,), (4,), (3,)))


@settings(max_examples=50)
@given(boxes())
def test_contains_agrees_with_sets(pair: list[Box]) -> None:
    a, b = pair
    if b.numel:
        assert a.contains(b) == (elements(b) <= elements(a))


@settings(max_examples=50)
@given(boxes(count=1), st.integers(0, 4))
def test_shift_moves_the_origin(one: list[Box], by: int) -> None:
    (box,) = one
    moved = box.shift((by,) * len(box.shape))
    assert elements(moved) == {tuple(i - by for i in index) for index in elements(box)}


def test_boxes_of_different_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        Box((0,), (1,)).intersect(Box((0, 0), (1, 1)))


def test_a_scalar_is_a_box_of_one_element() -> None:
    scalar = Box.whole(())
    assert scalar.numel == 1
    assert scalar.intersect(Box((), ())) == scalar


@settings(max_examples=50)
@given(SHAPES)
def test_row_major_counts_in_order(shape: tuple[int, ...]) -> None:
    strides = row_major(shape)
    assert [dot(index, strides) for index in product(*map(range, shape))] == list(range(prod(shape)))


@settings(max_examples=50)
@given(SHAPES, st.data())
def test_flat_boxes_cover_a_range_exactly_and_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, prod(shape)))
    stop = data.draw(st.integers(start, prod(shape)))
    found = list(flat_boxes(shape, start, stop))
    assert len(found) <= 2 * len(shape) - 1
    strides = row_major(shape)
    flat = [dot(index, strides) for box in found for index in sorted(elements(box))]
    assert flat == list(range(start, stop))


@settings(max_examples=50)
@given(st.integers(0, 10), st.integers(0, 10))
def test_flat_boxes_of_an_empty_range(start: int, back: int) -> None:
    assert list(flat_boxes((3, 4), start, max(0, start - back))) == []
