"""Cutting copies into windows of the target, so that a file can be written in order, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .plan import Copy


@dataclass(frozen=True, slots=True)
class Window:
    """A run ``[start, start + numel)`` of elements of a target record, and the copies that fill it.

    Elements of the run that no copy fills are zero.
    """

    start: int
    numel: int
    copies: tuple[Copy, ...]


def windows(copies: Sequence[Copy], record_numel: int, limit: int, phase: int = 0) -> Iterator[Window]:
    """Cut the copies into one record into consecutive windows that tile the record.

    Args:
        copies: All copies into one target record, in any order.
        record_numel: Length of the record in elements.
        limit: Largest window in elements. Only a single row that is contiguous in no dimension can exceed it.
        phase: Elements between a round offset of the file (a multiple of ``limit``) and the record's start. Unbroken runs
            are cut at round offsets, so that no page is written in two parts.

    Yields:
        Windows in ascending order, without gaps.
    """
    position = 0
    for cluster in _clusters(copies):
        start = cluster[0].target_start
        yield from _gap(position, start, limit)
        for window in _cut(cluster, limit, phase):
            yield from _gap(max(position, start), window.start, limit)
            yield window
            position = start = window.start + window.numel
    yield from _gap(position, record_numel, limit)


def _gap(start: int, stop: int, limit: int) -> Iterator[Window]:
    for at in range(start, stop, limit):
        yield Window(at, min(limit, stop - at), ())


def _clusters(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    """Group copies whose spans in the target interleave: the shards of one tensor split along an inner dimension."""
    cluster: list[Copy] = []
    end = 0
    for copy in sorted(copies, key=lambda c: c.target_start):
        if cluster and copy.target_start >= end:
            yield cluster
            cluster = []
        cluster.append(copy)
        end = max(end, _last(copy) + 1)
    if cluster:
        yield cluster


def _last(copy: Copy) -> int:
    """The highest element that a copy writes."""
    return copy.target_start + sum([(n - 1) * s for n, s in zip(copy.shape, copy.target_strides, strict=True)])


def _cut(cluster: list[Copy], limit: int, phase: int = 0) -> Iterator[Window]:
    first = min(copy.target_start for copy in cluster)
    last = max(map(_last, cluster))
    pitch = max(copy.target_strides[0] for copy in cluster)
    if last - first < limit and (pitch > 1 or (first + phase) // limit == (last + phase) // limit):
        yield Window(first, last + 1 - first, tuple(cluster))
        return
    rows = max(1, limit // pitch)
    head = (first + phase) % limit if pitch == 1 else 0
    for at in range(first - head, last + 1, rows * pitch):
        at, stop = max(at, first), min(at + rows * pitch, last + 1)
        inside = [part for copy in cluster for part in _rows_between(copy, at, stop)]
        if rows == 1 and pitch > limit and any(len(copy.shape) > 1 for copy in inside):
            yield from windows_of(inside, at, stop, limit)
        else:
            yield Window(at, stop - at, tuple(inside))


def windows_of(copies: Sequence[Copy], start: int, stop: int, limit: int) -> Iterator[Window]:
    """The windows of ``[start, stop)`` only, for copies that lie inside it."""
    position = start
    for cluster in _clusters([_drop_unit_dims(copy) for copy in copies]):
        for window in _cut(cluster, limit):
            yield from _gap(position, window.start, limit)
            yield window
            position = window.start + window.numel
    yield from _gap(position, stop, limit)


def _rows_between(copy: Copy, start: int, stop: int) -> Iterator[Copy]:
    """The rows (outermost index) of a copy that begin in ``[start, stop)``."""
    pitch = copy.target_strides[0]
    low = max(0, -(-(start - copy.target_start) // pitch))
    high = min(copy.shape[0], -(-(stop - copy.target_start) // pitch))
    if low < high:
        yield rows_of(copy, low, high)


def rows_of(copy: Copy, low: int, high: int) -> Copy:
    """The rows ``[low, high)`` (outermost index) of a copy. Made for every window, so without ``dataclasses.replace``."""
    return Copy(
        (high - low, *copy.shape[1:]),
        copy.source,
        copy.source_start + low * copy.source_strides[0],
        copy.source_strides,
        copy.target,
        copy.target_start + low * copy.target_strides[0],
        copy.target_strides,
    )


def _drop_unit_dims(copy: Copy) -> Copy:
    """Without the dimensions of one element, whose strides are no pitch of anything."""
    kept = [i for i, n in enumerate(copy.shape) if n > 1]
    if not kept:
        return replace(copy, shape=(1,), source_strides=(1,), target_strides=(1,))

    def pick(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[i] for i in kept)

    return replace(
        copy,
        shape=pick(copy.shape),
        source_strides=pick(copy.source_strides),
        target_strides=pick(copy.target_strides),
    )
