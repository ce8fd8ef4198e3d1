"""Region geometry: half-open hyper-rectangles of a tensor, counted in elements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The half-open region ``[offset, offset + shape)`` of a tensor.

    Args:
        offset: First element in every dimension.
        shape: Number of elements in every dimension; as long as ``offset``.
    """

    offset: Shape
    shape: Shape

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
        return tuple(start + count for start, count in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The region that both boxes cover, or None where they do not meet. Empty boxes meet nothing."""
        start = tuple(map(max, self.offset, other.offset))
        shape = tuple(
            min(a + n, b + m) - s
            for a, n, b, m, s in zip(self.offset, self.shape, other.offset, other.shape, start, strict=True)
        )
        return Box(start, shape) if all(count > 0 for count in shape) else None

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` lies in this box."""
        return all(
            a <= b and b + m <= a + n
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )

    def shift(self, origin: Shape) -> Box:
        """The same region in coordinates whose zero is at ``origin``."""
        return Box(tuple(a - o for a, o in zip(self.offset, origin, strict=True)), self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.offset, self.stop, strict=True)) + "]"


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
