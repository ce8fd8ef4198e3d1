"""Carrying out the plan of one file: windows of the target, in order, through one small buffer.

The copies are cut into windows, so that a file is written in order and in bounded memory, whatever the source looks like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np

from .cast import Words, convert
from .catalog import Record
from .plan import Copy, FilePlan

WINDOW_BYTES = 1 << 20
SPAN_BYTES = 4 << 20
"""A strided read touches at most this much of a source at a time, whatever its pitch."""

AHEAD_BYTES = 64 << 20
"""So much is on its way from a far source while the windows before it are written."""

_GRID_BYTES = 4096
"""Windows end one page after round offsets of the file: no page is written twice, and the page cache is filled with pieces
of up to 512 KiB. At the round offsets themselves it takes 1 MiB at once, which on virtual machines that hand free memory
back to their host costs three to seven times as much (0.22 s per GB against 0.7 to 1.7)."""

WORDS: dict[int, type[np.generic]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class SourceBytes(Protocol):
    """Where a plan reads from. Implementations must allow calls from several threads."""

    def view(self, file: str, byte_offset: int, nbytes: int) -> memoryview:
        """Bytes of a source file, resident in memory until released."""
        ...

    def release(self, file: str, byte_offset: int, nbytes: int) -> None:
        """Say that these bytes are not needed any more."""
        ...


Range = tuple[str, int, int]
"""A file, where in it, and how many bytes."""


@runtime_checkable
class ReadsAhead(Protocol):
    """A source that fetches early what will be viewed: one to which every request is a journey."""

    def expect(self, ranges: Iterable[Range]) -> None:
        """Hear of what will be viewed soon."""
        ...


class RecordSink(Protocol):
    """Where the records of one target file go."""

    def write(self, key: str, byte_offset: int, data: memoryview) -> None:
        """Put bytes into a record, at an offset from the record's own start; they may change after the call."""
        ...


class Checksums(Protocol):
    """CRC-32 over windows, and over the source ranges that passed by."""

    def crc32(self, data: memoryview) -> int:
        """Checksum of a window."""
        ...

    def combine(self, first: int, second: int, second_nbytes: int) -> int:
        """Checksum of two adjacent pieces."""
        ...

    def saw(self, record: Record, byte_offset: int, nbytes: int, crc32: int) -> None:
        """Note that a range of a source record (offset from the record's start) had this checksum when read."""
        ...


@dataclass(slots=True)
class FileRun:
    """Fills the records of one target file.

    Args:
        plan: The copies.
        records: The records of the file, each with its length.
        source: Where bytes come from.
        sink: Where they go.
        checksums: Computes the records' CRCs, and hears of what was read.
        window_bytes: Size of the buffer.
        progress: Called with the number of bytes just written.
        offset: Where a record starts in the file, in bytes, so that windows can end at round offsets of the file.
    """

    plan: FilePlan
    records: Sequence[Record]
    source: SourceBytes
    sink: RecordSink
    checksums: Checksums
    window_bytes: int = WINDOW_BYTES
    progress: Callable[[int], None] = lambda nbytes: None
    offset: Callable[[str], int] = lambda key: _GRID_BYTES
    _buffer: Words = field(default_factory=lambda: np.empty(0, np.uint8))

    def run(self) -> dict[str, int]:
        """Copy everything.

        Returns:
            The CRC-32 of every record, by its key.
        """
        by_key: dict[str, list[Copy]] = {record.key: [] for record in self.records}
        for copy in self.plan.copies:
            by_key[copy.target.key].append(copy)
        ahead = _Ahead(self.source, self._reads(by_key)) if isinstance(self.source, ReadsAhead) else None
        return {record.key: self._fill(record, by_key[record.key], ahead) for record in self.records}

    def _windows(self, record: Record, copies: list[Copy]) -> Iterator[Window]:
        limit = max(1, self.window_bytes // record.dtype.itemsize)
        phase = (self.offset(record.key) - _GRID_BYTES) // record.dtype.itemsize
        return windows(copies, record.numel, limit, phase)

    def _reads(self, by_key: Mapping[str, list[Copy]]) -> Iterator[tuple[int, list[Range]]]:
        """The bytes of every window, and what will be viewed for it."""
        for record in self.records:
            for window in self._windows(record, by_key[record.key]):
                parts = (copy for whole in window.copies for copy in _limited(whole, SPAN_BYTES))
                yield (
                    window.numel * record.dtype.itemsize,
                    [(copy.source.file, *_span(copy)) for copy in parts],
                )

    def _fill(self, record: Record, copies: list[Copy], ahead: _Ahead | None) -> int:
        crc = 0
        for window in self._windows(record, copies):
            nbytes = window.numel * record.dtype.itemsize
            if ahead is not None:
                ahead.advance(nbytes)
            crc = self.checksums.combine(crc, self._pass(record, window), nbytes)
            self.progress(nbytes)
        return crc

    def _pass(self, record: Record, window: Window) -> int:
        """Move one window; returns its checksum."""
        if len(window.copies) == 1 and window.copies[0].contiguous and window.copies[0].cast is None:
            return self._straight(record, window.copies[0])
        data = self._gather(record, window)
        if window.copies:  # what nothing fills stays a hole of the file, which reads as zeros
            self.sink.write(record.key, window.start * record.dtype.itemsize, data)
        return self.checksums.crc32(data)

    def _straight(self, record: Record, copy: Copy) -> int:
        """From the page cache of the source to that of the target, without a copy of ours in between."""
        itemsize = record.dtype.itemsize
        offset, nbytes = copy.source_start * itemsize, copy.shape[0] * itemsize
        at = copy.source.byte_offset + offset
        data = self.source.view(copy.source.file, at, nbytes)
        crc = self.checksums.crc32(data)
        self.sink.write(record.key, copy.target_start * itemsize, data)
        self.checksums.saw(copy.source, offset, nbytes, crc)
        del data
        self.source.release(copy.source.file, at, nbytes)
        return crc

    def _gather(self, record: Record, window: Window) -> memoryview:
        out = self._scratch(window.numel * record.dtype.itemsize).view(WORDS[record.dtype.itemsize])
        if sum(copy.numel for copy in window.copies) < window.numel:
            out.fill(0)
        for whole in window.copies:
            for copy in _limited(whole, SPAN_BYTES):
                self._place(copy, window.start, out)
        return out.data.cast("B")

    def _scratch(self, nbytes: int) -> Words:
        """The one buffer of this file, used again and again: fresh memory costs as much as filling it."""
        if len(self._buffer) < nbytes:
            self._buffer = np.empty(nbytes, np.uint8)
        return self._buffer[:nbytes]

    def _place(self, copy: Copy, window_start: int, out: Words) -> None:
        itemsize = copy.source.dtype.itemsize
        at, nbytes = _span(copy)
        data = self.source.view(copy.source.file, at, nbytes)
        if nbytes == copy.numel * itemsize:  # whole rows: in the cache now, so that nobody has to read them again
            self.checksums.saw(copy.source, at - copy.source.byte_offset, nbytes, self.checksums.crc32(data))
        values = strided(np.frombuffer(data, WORDS[itemsize]), 0, copy.shape, copy.source_strides)
        if copy.cast is not None:
            values = convert(values, copy.source.dtype, copy.cast)
        strided(out, copy.target_start - window_start, copy.shape, copy.target_strides)[...] = values
        del values, data
        self.source.release(copy.source.file, at, nbytes)


def strided(flat: Words, start: int, shape: Sequence[int], strides: Sequence[int]) -> Words:
    """A view of a flat array; ``start`` and ``strides`` in elements."""
    steps = [s * flat.itemsize for s in strides]
    return np.ndarray(shape, flat.dtype, flat, start * flat.itemsize, steps)


@dataclass(slots=True)
class _Ahead:
    """Tells a source of the next reads, so many bytes of the target before they come."""

    source: ReadsAhead
    reads: Iterator[tuple[int, list[Range]]]
    told: int = 0

    def advance(self, nbytes: int) -> None:
        """A window of so many bytes is about to be filled."""
        self.told -= nbytes
        if self.told > AHEAD_BYTES // 2:
            return
        batch: list[Range] = []
        for window_nbytes, ranges in self.reads:
            batch += ranges
            self.told += window_nbytes
            if self.told >= AHEAD_BYTES:
                break
        self.source.expect(batch)


def _span(copy: Copy) -> tuple[int, int]:
    """Where in its file a copy begins to read, and how many bytes it spans."""
    itemsize = copy.source.dtype.itemsize
    numel = 1 + sum((n - 1) * s for n, s in zip(copy.shape, copy.source_strides, strict=True))
    return copy.source.byte_offset + copy.source_start * itemsize, numel * itemsize


def _limited(copy: Copy, span_bytes: int) -> Iterator[Copy]:
    """Cut a copy along its outer dimension so that each part touches a bounded span of its source."""
    pitch = copy.source_strides[0] * copy.source.dtype.itemsize
    rows = max(1, span_bytes // pitch) if pitch else copy.shape[0]
    for row in range(0, copy.shape[0], rows):
        yield rows_of(copy, row, min(row + rows, copy.shape[0]))


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
