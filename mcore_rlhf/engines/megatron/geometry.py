"""Which boxes of a whole tensor lie in a flat range of a rank's local tensor: a parameter, or one rank's shard of its states."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_rlhf.core.box import Box, dot, flat_boxes, row_major
from mcore_rlhf.core.catalog import Chunk, Record
from mcore_rlhf.layouts.tensor import LocalLayout


def range_chunks(layout: LocalLayout, record: Record, start: int, stop: int) -> Iterator[Chunk]:
    """The chunks of a record that holds elements ``[start, stop)`` of a flattened local tensor, and nothing else.

    Args:
        layout: The part of the whole tensor that the rank holds.
        record: Its first element is the local tensor's element ``start``.
        start: First element of the range.
        stop: One past the last.
    """
    strides = row_major(layout.view)
    for part in flat_boxes(layout.view, start, stop):
        for piece in layout.pieces:
            inside = part.intersect(Box(piece.offset, piece.box.shape))
            if inside is not None:
                offset = tuple(a + i - p for a, i, p in zip(piece.box.offset, inside.offset, piece.offset, strict=True))
                yield Chunk(Box(offset, inside.shape), record, dot(inside.offset, strides) - start, strides)
