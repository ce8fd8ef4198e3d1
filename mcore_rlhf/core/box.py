"""Region geometry: half-open hyper-rectangles of a tensor, counted in elements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The half-open region ``[offset, offset + shape)`` of a tensor, or every so-many-th element from ``offset`` on.

    Args:
        offset: First element in every dimension.
        shape: Number of elements in every dimension; as long as ``offset``.
        step: From one element to the next in every dimension: 2 for gate and up that lie in turn. None where all of them
            are 1. Boxes with steps meet boxes without, or with the same steps.
    """

    offset: Shape
    shape: Shape
    step: Shape | None = None

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        """The box that covers a tensor of that shape."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return prod(self.shape)

    @property
    def stop(self) -> Shape:
        """One past the last element in every dimension."""
        if self.step is not None:
            each = zip(self.offset, self.shape, self.step, strict=True)
            return tuple(start + (count - 1) * step + 1 if count else start for start, count, step in each)
        return tuple(start + count for start, count in zip(self.offset, self.shape, strict=True))

    @property
    def steps(self) -> Shape:
        """From one element to the next in every dimension."""
        return (1,) * len(self.shape) if self.step is None else self.step

    def intersect(self, other: Box) -> Box | None:
        """The region that both boxes cover, or None where they do not meet. Empty boxes meet nothing."""
        if self.step is not None or other.step is not None:
            return self._meet(other)
        start = tuple(map(max, self.offset, other.offset))
        shape = tuple(
            min(a + n, b + m) - s
            for a, n, b, m, s in zip(self.offset, self.shape, other.offset, other.shape, start, strict=True)
        )
        return Box(start, shape) if all(count > 0 for count in shape) else None

    def _meet(self, other: Box) -> Box | None:
        """The same, where one of them has steps, or both have the same."""
        step = tuple(map(max, self.steps, other.steps))
        if any({a, b} != {1, most} and a != b for a, b, most in zip(self.steps, other.steps, step, strict=True)):
            raise ValueError(f"{self} and {other}: their steps are neither equal nor 1")
        start, shape = [], []
        for dim, by in enumerate(step):
            stepped = self if self.steps[dim] == by else other
            first = stepped.offset[dim]
            if by == self.steps[dim] == other.steps[dim] and (self.offset[dim] - other.offset[dim]) % by:
                return None
            begin = max(self.offset[dim], other.offset[dim])
            begin += (first - begin) % by
            start.append(begin)
            shape.append(-(-(min(self.stop[dim], other.stop[dim]) - begin) // by))
        return Box(tuple(start), tuple(shape), step) if all(count > 0 for count in shape) else None

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` lies in this box."""
        if self.step is not None or other.step is not None:
            met = self._meet(other)
            return not other.numel or (met is not None and met.numel == other.numel)
        return all(
            a <= b and b + m <= a + n
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )

    def shift(self, origin: Shape) -> Box:
        """The same region in coordinates whose zero is at ``origin``."""
        return Box(tuple(a - o for a, o in zip(self.offset, origin, strict=True)), self.shape, self.step)

    def __str__(self) -> str:
        each = zip(self.offset, self.stop, self.steps, strict=True)
        return "[" + ", ".join(f"{a}:{b}" if by == 1 else f"{a}:{b}:{by}" for a, b, by in each) + "]"


def row_major(shape: Shape) -> Shape:
    """Strides in elements of a contiguous tensor of that shape."""
    strides, step = [], 1
    for count in reversed(shape):
        strides.append(step)
        step *= count
    return tuple(reversed(strides))


def dot(index: Shape, strides: Shape) -> int:
    """Element offset of ``index`` in a view with those strides."""
    return sum(i * s for i, s in zip(index, strides, strict=True))


def flat_boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Cover elements ``[start, stop)`` of a row-major tensor, in order, with at most ``2 * ndim - 1`` boxes.

    A ZeRO partition or a distributed-optimizer shard is such a flat range of a parameter.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,) * len(shape), (stop - start,) * len(shape))
        return
    inner = prod(shape[1:])
    first_whole, end_whole = -(-start // inner), stop // inner
    if first_whole > end_whole:  # the range lies inside one row
        yield from _in_row(shape, start // inner, start % inner, stop - start // inner * inner)
        return
    if start < first_whole * inner:
        yield from _in_row(shape, first_whole - 1, start - (first_whole - 1) * inner, inner)
    if first_whole < end_whole:
        yield Box((first_whole, *(0,) * (len(shape) - 1)), (end_whole - first_whole, *shape[1:]))
    if end_whole * inner < stop:
        yield from _in_row(shape, end_whole, 0, stop - end_whole * inner)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[Box]:
    for box in flat_boxes(shape[1:], start, stop):
        yield Box((row, *box.offset), (1, *box.shape))
