"""Whether boxes share elements, without comparing each with each: a model of 94 layers and 128 experts has 24,000 of one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mcore_rlhf.core.box import Box


def overlap(held: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share elements, or None where no two do.

    Boxes are parted at the gaps between them along one dimension after the other, until each stands alone: exact, and as fast as
    sorting for whatever cuts a tensor again and again from edge to edge, as all frameworks do. What cannot be parted along any
    dimension is compared box by box.

    Args:
        held: Boxes of one tensor, none of them empty.
    """
    if len(held) < 2:
        return None
    ndim = len(held[0].shape)
    pending: list[tuple[Sequence[Box], int, int]] = [(held, 0, 0)]
    while pending:
        boxes, dim, tried = pending.pop()
        if tried == ndim:
            found = _pair(boxes)
            if found is not None:
                return found
            continue
        parts = list(_parted(boxes, dim))
        tried = tried + 1 if len(parts) == 1 else 1  # a part cannot be parted again along the same dimension
        pending += [(part, (dim + 1) % ndim, tried) for part in parts if len(part) > 1]
    return None


def _parted(boxes: Sequence[Box], dim: int) -> Iterator[list[Box]]:
    """Groups of boxes between which there is a cut, from edge to edge, across a dimension."""
    ordered = sorted(boxes, key=lambda box: box.offset[dim])
    part, stop = [ordered[0]], ordered[0].offset[dim] + ordered[0].shape[dim]
    for box in ordered[1:]:
        if box.offset[dim] >= stop:
            yield part
            part = []
        part.append(box)
        stop = max(stop, box.offset[dim] + box.shape[dim])
    yield part


def _pair(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share elements, by comparison; those that end before the next row are done with."""
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offset):
        if box.shape:
            active = [other for other in active if other.stop[0] > box.offset[0]]
        for other in active:
            if other.intersect(box) is not None:
                return other, box
        active.append(box)
    return None
