"""Carrying out the plan of one file: windows of the target, in order, through one small buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .cast import Words, convert
from .catalog import Record
from .plan import Copy, FilePlan
from .windows import Window, rows_of, windows

WINDOW_BYTES = 1 << 20
SPAN_BYTES = 4 << 20
"""A strided read touches at most this much of a source at a time, whatever its pitch."""

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
        return {record.key: self._fill(record, by_key[record.key]) for record in self.records}

    def _fill(self, record: Record, copies: list[Copy]) -> int:
        limit = max(1, self.window_bytes // record.dtype.itemsize)
        crc, phase = 0, (self.offset(record.key) - _GRID_BYTES) // record.dtype.itemsize
        for window in windows(copies, record.numel, limit, phase):
            nbytes = window.numel * record.dtype.itemsize
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
        at = copy.source.byte_offset + copy.source_start * itemsize
        nbytes = (1 + sum((n - 1) * s for n, s in zip(copy.shape, copy.source_strides, strict=True))) * itemsize
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
    view: Words = Words(shape, flat.dtype, flat, start * flat.itemsize, steps)
    return view


def _limited(copy: Copy, span_bytes: int) -> Iterator[Copy]:
    """Cut a copy along its outer dimension so that each part touches a bounded span of its source."""
    pitch = copy.source_strides[0] * copy.source.dtype.itemsize
    rows = max(1, span_bytes // pitch) if pitch else copy.shape[0]
    for row in range(0, copy.shape[0], rows):
        yield rows_of(copy, row, min(row + rows, copy.shape[0]))
