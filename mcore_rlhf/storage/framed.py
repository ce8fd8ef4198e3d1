"""Files of frames: records one after the other, each with its length, its number and its checksum.

A frame is the CRC-32 of all that follows it, the payload's length (both 32 bits), the frame's number in its file, from 0 on (64 bits; all
little-endian), and the payload. An empty payload is the last frame of a file that was closed. Whoever reads stops at the first frame
that is not whole, as a kill, a full disk or a power failure leaves one: what stands behind it was never said to be safe. Where a later
frame is whole, bytes in the middle were turned over, be they of a payload or of a length: then those are lost, and not all that follow.
Zeros are no such bytes: some file systems show them where a write has not come yet.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .checksum import crc32
from .paths import cannot_open
from .reading import LocalFile

_CRC, _HEAD = struct.Struct("<I"), struct.Struct("<IQ")
OVERHEAD = _CRC.size + _HEAD.size
"""Bytes that a frame has besides its payload."""
MAX_PAYLOAD = 256 << 20
"""Bytes of a payload: what is said to be longer is not believed."""
_NUMBER_AT = _CRC.size + 4
_WINDOW_NBYTES = 4 << 20
_MOST_CHECKED, _LEAST_CHECKED = 64 << 20, 1 << 10
"""Bytes that are summed, at most, to find the next whole frame: numbers in a payload may look like heads."""


def frame_head(number: int, payload: bytes) -> bytes:
    """What stands before a payload.

    Args:
        number: The frame's number in the file.
        payload: It; empty for the end.
    """
    head = _HEAD.pack(len(payload), number)
    return _CRC.pack(crc32(payload, crc32(head))) + head


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole frame of a file.

    Args:
        number: Its number.
        offset: Where its payload begins.
        payload: It; valid until the next frame is asked for.
    """

    number: int
    offset: int
    payload: memoryview


@dataclass(slots=True)
class FrameReader:
    """Reads the frames of a file, and later those that were added meanwhile. A file is never changed by it.

    Args:
        path: The file.
        at: Where the next frame begins.
        number: Its number.
        closed: Whether the last frame has been met.
        damaged: How many frames were passed over.
        torn: Bytes behind the last whole frame.
    """

    path: Path
    at: int = 0
    number: int = 0
    closed: bool = False
    damaged: int = 0
    torn: int = 0

    def read(self) -> Iterator[Frame]:
        """The frames that were not read yet.

        Raises:
            StorageError: The file cannot be read.
        """
        try:
            with LocalFile(self.path) as file:
                window = _Window(file)
                while not self.closed and (payload := self._next(window)) is not None:
                    frame = Frame(self.number, self.at + OVERHEAD, payload)
                    self.at, self.number = frame.offset + len(payload), self.number + 1
                    self.closed = not len(payload)
                    if len(payload):
                        yield frame
                self.torn = file.nbytes - self.at
        except OSError as error:
            raise cannot_open(error, self.path) from error

    def _next(self, window: _Window) -> memoryview | None:
        payload = window.frame(self.at, self.number)
        if payload is None and (behind := window.whole_behind(self.at, self.number)) is not None:
            self.damaged += behind[1] - self.number
            self.at, self.number = behind
            payload = window.frame(*behind)
        return payload


@dataclass(slots=True)
class _Window:
    """A part of a file in memory."""

    file: LocalFile
    start: int = 0
    data: memoryview = field(default_factory=lambda: memoryview(b""))

    def frame(self, at: int, number: int) -> memoryview | None:
        """The payload of a frame; None where it is not whole."""
        end = self.end_of(at)
        if end is None:
            return None
        whole = self._bytes(at, end - at)
        (crc,) = _CRC.unpack_from(whole)
        _, found = _HEAD.unpack_from(whole, _CRC.size)
        return whole[OVERHEAD:] if found == number and crc == crc32(whole[_CRC.size :]) else None

    def whole_behind(self, at: int, number: int) -> tuple[int, int] | None:
        """Where the first whole frame behind a damaged one begins, and its number; None where there is none.

        Args:
            at: Where the damaged one begins.
            number: Its number.
        """
        end = self.end_of(at)
        if end is not None and self.frame(end, number + 1) is not None:  # its length is right
            return end, number + 1
        if at + OVERHEAD > self.file.nbytes or not any(self._bytes(at, OVERHEAD)):
            return None
        left = _MOST_CHECKED
        for start, found in self._heads_behind(at + 1, number):
            end = self.end_of(start)
            left -= _LEAST_CHECKED if end is None else max(_LEAST_CHECKED, end - start)
            if left < 0:
                break
            if self.frame(start, found) is not None:
                return start, found
        return None

    def _heads_behind(self, at: int, number: int) -> Iterator[tuple[int, int]]:
        """Where a later frame may begin, and its number, by what would be its head."""
        import numpy as np  # what only looks at a folder never comes here

        last = number + (self.file.nbytes - at) // OVERHEAD + 1
        most = (
            at + MAX_PAYLOAD + OVERHEAD
        )  # no frame is longer; a file said to have terabytes behind is not searched to its end
        for start in range(at, min(most, self.file.nbytes - OVERHEAD + 1), _WINDOW_NBYTES):
            data = bytes(self._bytes(start, min(_WINDOW_NBYTES + OVERHEAD - 1, self.file.nbytes - start)))
            found = list[tuple[int, int]]()
            for shift in range(8):
                there = len(data) - _NUMBER_AT - shift
                numbers = np.frombuffer(data, "<u8", max(0, there) // 8, _NUMBER_AT + shift) if there >= 8 else ()
                numbers = np.asarray(numbers, np.uint64)
                (hits,) = np.nonzero((numbers > number) & (numbers <= last))
                found += [(start + shift + 8 * int(hit), int(numbers[hit])) for hit in hits]
            yield from sorted(found)

    def end_of(self, at: int) -> int | None:
        """Where a frame ends, as its head says; None where that cannot be."""
        if at + OVERHEAD > self.file.nbytes:
            return None
        length, _ = _HEAD.unpack_from(self._bytes(at + _CRC.size, _HEAD.size))
        end: int = at + OVERHEAD + length
        return end if length <= MAX_PAYLOAD and end <= self.file.nbytes else None

    def _bytes(self, at: int, nbytes: int) -> memoryview:
        if not self.start <= at <= at + nbytes <= self.start + len(self.data):
            wanted = min(max(nbytes, _WINDOW_NBYTES), self.file.nbytes - at)
            self.start, self.data = at, memoryview(self.file.read(at, wanted))
        return self.data[at - self.start : at - self.start + nbytes]


def payload_at(path: Path, number: int, offset: int, nbytes: int) -> bytes | None:
    """The payload of one frame that was read before; None where it is not there any more, or is another.

    Args:
        path: The file.
        number, offset: See :class:`Frame`.
        nbytes: Its length.

    Raises:
        StorageError: The file cannot be read.
    """
    try:
        with LocalFile(path) as file:
            payload = _Window(file).frame(offset - OVERHEAD, number)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise cannot_open(error, path) from error
    return bytes(payload) if payload is not None and len(payload) == nbytes else None
