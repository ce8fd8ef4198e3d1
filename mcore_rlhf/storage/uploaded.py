"""Files that are sent to an object store while they are made, in order; and those for which that cannot be.

Source: obstore 0.12.1 (``open_writer``); Amazon S3's user guide: 10,000 parts of 5 MiB to 5 GiB in a multipart upload.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .checksum import combine, crc32
from .manifest import FileEntry
from .objects import ObjectStore
from .publish import check_space
from .record_file import Layout, Piece, RecordFile
from .transactions import new_transaction

_PART_NBYTES = 8 << 20
_MOST_PARTS = 9_000
"""Of 10,000: a store may count otherwise than we."""
_ZEROS = bytes(1 << 20)
_GATHERED_NBYTES = 1 << 20
"""Of small writes, so many bytes are sent at a time."""

LIFECYCLE = (
    "What a killed process had begun to send is listed nowhere, and is paid for: let the bucket end it, by a lifecycle rule "
    "AbortIncompleteMultipartUpload after a few days."
)


def part_nbytes(nbytes: int) -> int:
    """Bytes of one part of a file of so many."""
    return max(_PART_NBYTES, -(-nbytes // _MOST_PARTS))


def at_a_time(store: ObjectStore, part: int, memory: int) -> int:
    """Parts of a file that may be on their way, while one more is made."""
    return max(1, min(store.settings.connections, memory // part - 1))


class _Sending:
    """An object on its way: in order, in parts, by a few connections; its bytes are there all at once, or never.

    Args:
        store: Where to.
        key: Under which name.
        nbytes: How long it is, or at most.
        memory: Bytes that may be on their way.
    """

    def __init__(self, store: ObjectStore, key: str, nbytes: int, memory: int) -> None:
        self._store, self._key, self.nbytes = store, key, 0
        part = part_nbytes(nbytes)
        self._writer: Any = store.open_writer(key, part, at_a_time(store, part, memory))

    def send(self, data: memoryview) -> None:
        """Go on."""
        with self._store.requests.asking(self._key, "write", LIFECYCLE):
            for at in range(0, len(data), _PART_NBYTES):  # it keeps what it is given, and buffers are used again
                self._writer.write(bytes(data[at : at + _PART_NBYTES]))
        self.nbytes += len(data)

    def end(self) -> None:
        """Complete it; the store has it when this returns."""
        writer, self._writer = self._writer, None
        try:
            with self._store.requests.asking(self._key, "write", LIFECYCLE):
                writer.close()
        except (CheckpointError, FileNotFoundError):
            if not self._is_there():
                raise

    def _is_there(self) -> bool:
        """Whether it was completed, though the answer was lost: in parts it is there as a whole or not, and nobody else has its name."""
        with suppress(CheckpointError, OSError):
            return self._store.written(self._key)[0] == self.nbytes
        return False

    def abort(self) -> None:
        """Let the store forget what was sent; nothing happens if it is complete."""
        writer, self._writer = self._writer, None
        if writer is not None and self._store.requests.gave_up is None:
            with suppress(Exception):  # the lifecycle rule of the bucket ends it then
                writer.__exit__(CancelledError, CancelledError(), None)  # left by an error, it ends the upload


class UploadedStream(io.RawIOBase):
    """A file that somebody else writes from its front to its end, who does not say before how long it will be.

    Args:
        store: Where to.
        key: Under which name.
        nbytes: How long it is at most, nearly.
        memory: Bytes that may be on their way.
    """

    def __init__(self, store: ObjectStore, key: str, nbytes: int, memory: int = 64 << 20) -> None:
        super().__init__()
        self._sending = _Sending(store, key, nbytes, memory)
        self._crc, self._waiting = 0, bytearray()

    def writable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """How much was written."""
        return self._sending.nbytes + len(self._waiting)

    def write(self, data: Any) -> int:
        """Write what follows.

        Raises:
            StorageError: The store refuses, or cannot be reached.
        """
        view = memoryview(data).cast("B")
        if len(self._waiting) + len(view) < _GATHERED_NBYTES:
            self._waiting += view
        else:  # as it is: it may be as long as a tensor
            self._send_waiting()
            self._send(view)
        return len(view)

    def _send_waiting(self) -> None:
        with memoryview(self._waiting) as data:
            self._send(data)
        self._waiting.clear()

    def _send(self, data: memoryview) -> None:
        self._crc = crc32(data, self._crc)
        self._sending.send(data)

    def finish(self) -> FileEntry:
        """Complete it; the store has it when this returns.

        Raises:
            StorageError: The store refuses, or cannot be reached.
        """
        self._send_waiting()
        self._sending.end()
        return FileEntry(self._sending.nbytes, self._crc)

    def abort(self) -> None:
        """Give it up, where it is not finished: that who writes has closed it says nothing."""
        self._sending.abort()


class UploadedFile(RecordFile):
    """A file that is sent as it is made: in order, in parts, by a few connections; a gap in a record is sent as zeros.

    Args:
        store: Where to.
        key: Under which name.
        layout: What lies where; in order.
        memory: Bytes that may be on their way.
    """

    def __init__(self, store: ObjectStore, key: str, layout: Layout, memory: int) -> None:
        self._store, self._key, self._memory = store, key, memory
        self._at = self._crc = 0
        self._sending: _Sending | None = None
        known = sorted(layout.known, reverse=True, key=_offset)
        self._pending = [piece for piece in known if memoryview(piece.data).nbytes]
        self._places = sorted(
            ((at, nbytes, key) for key, (at, nbytes) in layout.records.items() if nbytes), reverse=True
        )
        self._sums = {piece.key: 0 for piece in known} | dict.fromkeys(layout.records, 0)
        self._ending: Iterator[Piece] | None = None
        self._ended = 0
        super().__init__(Path(key), replace(layout, known=()))

    def finish(self, crcs: Mapping[str, int], *, fsync: bool = False) -> FileEntry:
        """See :meth:`RecordFile.finish`; the store has it when this returns."""
        self._advance(self.layout.nbytes)
        different = [name for name, crc in crcs.items() if self._sums.get(name) != crc]
        if different:
            raise ValueError(f"{self._where}: other bytes were sent than were made: {different}")
        ended = 0
        for piece in self.layout.ending(self._sums):
            ended = crc32(piece.data, ended)
        if ended != self._ended:
            raise ValueError(
                f"{self._where}: what follows from its CRCs was asked for before they were known: it is not in order"
            )
        if self._sending is not None:
            self._sending.end()
        return FileEntry(self._at, self._crc)

    def abort(self) -> None:
        """Let the store forget what was sent; nothing happens if it is complete."""
        if self._sending is not None:
            self._sending.abort()

    @property
    def _where(self) -> str:
        return f"{self._store}{self._key}"

    def _create(self) -> None:
        self._sending = _Sending(self._store, self._key, self.layout.nbytes, self._memory)

    def _reserve(self) -> None:
        """A store reserves nothing."""

    def _pwrite(self, data: memoryview, offset: int) -> None:
        if offset < self._at:
            raise ValueError(
                f"{self._where}: bytes at {offset} were made after those at {self._at}; a store takes them in order"
            )
        self._advance(offset)
        self._send(data)

    def _advance(self, offset: int) -> None:
        """Send all that lies before an offset: known pieces, zeros that nothing fills, what follows from records that are complete."""
        while self._at < offset:
            if self._pending and self._pending[-1].offset == self._at:
                self._send_piece(self._pending.pop())
            elif self._places and self._places[-1][0] <= self._at:
                start, nbytes, _ = self._places[-1]
                stop = min(offset, start + nbytes)
                while self._at < stop:
                    self._send(memoryview(_ZEROS)[: stop - self._at])
            else:
                self._ending = self._ending or iter(self.layout.ending(self._sums))
                piece = next(self._ending, Piece(-1, b""))
                self._ended = crc32(piece.data, self._ended)
                self._send_piece(piece)

    def _send_piece(self, piece: Piece) -> None:
        data = memoryview(piece.data).cast("B")
        if not len(data) and piece.offset >= 0:
            return
        if piece.offset != self._at:
            raise ValueError(
                f"{self._where}: its layout has a gap or an overlap at byte {self._at}: {piece.offset} follows"
            )
        if piece.key:
            self._sums[piece.key] = crc32(data)
        self._send(data)

    def _send(self, data: memoryview) -> None:
        assert self._sending is not None
        self._sending.send(data)
        if self._places and self._places[-1][0] <= self._at:
            start, nbytes, name = self._places[-1]
            self._sums[name] = crc32(data, self._sums[name])
            if self._at + len(data) == start + nbytes:
                self._crc = combine(self._crc, self._sums[name], nbytes)
                self._places.pop()
        else:
            self._crc = crc32(data, self._crc)
        self._at += len(data)


def _offset(piece: Piece) -> int:
    return piece.offset


class StagedFile(RecordFile):
    """A file whose front follows from its end: made in a local folder, and sent when it is complete.

    Args:
        store, key, layout, memory: See :class:`UploadedFile`.
        folder: The local folder.
    """

    def __init__(self, store: ObjectStore, key: str, layout: Layout, memory: int, folder: Path) -> None:
        self._store, self._key, self._memory = store, key, memory
        check_space(folder, layout.nbytes)
        super().__init__(folder / f"{new_transaction()}.staged", layout)

    def finish(self, crcs: Mapping[str, int], *, fsync: bool = False) -> FileEntry:
        """See :meth:`RecordFile.finish`; the store has it when this returns."""
        try:
            entry = super().finish(crcs)
            part = part_nbytes(entry.nbytes)
            self._store.send(self._key, self.path, part, at_a_time(self._store, part, self._memory))
            return entry
        finally:
            self.path.unlink(missing_ok=True)
