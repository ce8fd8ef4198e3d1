"""Small notes of those who work on one thing, be they ranks, hosts or parts: for one another, or for whoever comes after a kill.

They lie in a folder, under a prefix of a store, or as frames of one file where there are thousands of them and one process adds them.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from . import reading
from .beneath import open_to_lock, remove, write_new, write_over
from .framed import Frame, FrameReader, frame_head
from .paths import cannot_open, storage_error, write_all
from .records import parsed, text_of

T = TypeVar("T")

_SYNC_S = 0.2
"""Thousands of small files do not wait for the disk once more each."""


class Notes(ABC):
    """Notes, each under a name with ``/``. For several threads.

    Attributes:
        durable: Whether a note, and what it speaks of, is on the disk before anything else is done. A store always is.
    """

    durable: bool = False

    @abstractmethod
    def put(self, name: str, data: bytes, *, once: bool = False) -> bool:
        """Leave a note.

        Args:
            name: Its name.
            data: What it says.
            once: Whether one that is there stays.

        Returns:
            Whether it is what was given.

        Raises:
            StorageError: It cannot be written.
        """

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """What a note says; None where there is none.

        Raises:
            StorageError: It cannot be read.
        """

    @abstractmethod
    def list(self, pattern: str = "*") -> Iterator[str]:
        """The names that match, as a shell matches them."""

    def read(self, pattern: str = "*") -> Iterator[tuple[str, bytes]]:
        """The notes of such names, and what they say."""
        return ((name, data) for name in self.list(pattern) if (data := self.get(name)) is not None)

    def say(self, name: str, record: Any) -> None:
        """Leave a typed note; see :mod:`.records` and :meth:`put`. A field that says nothing is left out."""
        self.put(name, text_of(record, sparse=True))

    def said(self, kind: type[T], name: str) -> T | None:
        """What a typed note says; None where there is none.

        Raises:
            CheckpointError: It is of another type.
            StorageError: It cannot be read.
        """
        data = self.get(name)
        return None if data is None else parsed(kind, data, f"{self}/{name}", sparse=True)

    def close(self) -> None:  # noqa: B027
        """Let go what is open."""


@dataclass(slots=True)
class FolderNotes(Notes):
    """A file each, in a folder.

    Args:
        root: The folder.
    """

    root: Path

    def __str__(self) -> str:
        return str(self.root)

    def put(self, name: str, data: bytes, *, once: bool = False) -> bool:
        """See :meth:`Notes.put`."""
        path = self.root / name
        try:
            (write_new if once else write_over)(path, data)
        except FileExistsError:
            return False
        except OSError as error:
            raise storage_error(error, path, "write") from error
        return True

    def get(self, name: str) -> bytes | None:
        """See :meth:`Notes.get`."""
        try:
            return reading.read_bytes(self.root / name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise cannot_open(error, self.root / name) from error

    def list(self, pattern: str = "*") -> Iterator[str]:
        """See :meth:`Notes.list`."""
        try:
            found = sorted(path for path in self.root.glob(pattern) if path.is_file())
        except FileNotFoundError:  # it is being removed
            found = []
        except OSError as error:
            raise storage_error(error, self.root, "list") from error
        return (path.relative_to(self.root).as_posix() for path in found)

    def remove(self, pattern: str) -> None:
        """Remove the notes of such names.

        Raises:
            StorageError: They cannot be removed.
        """
        for name in self.list(pattern):
            try:
                remove(self.root / name)
            except OSError as error:
                raise storage_error(error, self.root / name, "remove") from error


@dataclass(slots=True)
class FileNotes(Notes):
    """A frame each (:mod:`.framed`), in one file that one process adds to.

    One that was torn, and everything behind it, counts as not written. Of two notes of one name the later one counts.

    Args:
        path: The file; one that is there is gone on with.
        durable: See :class:`Notes`.
    """

    path: Path
    durable: bool = False
    _fd: int = -1
    _number: int = 0
    _synced: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __str__(self) -> str:
        return str(self.path)

    def put(self, name: str, data: bytes, *, once: bool = False) -> bool:
        """See :meth:`Notes.put`."""
        if once and self.get(name) is not None:
            return False
        note = b"%s %s" % (name.encode(), data)
        try:
            with self._lock:
                self.open()
                self._write(frame_head(self._number, note) + note)
                self._number += 1
        except OSError as error:
            raise storage_error(error, self.path, "write") from error
        return True

    def open(self) -> None:
        """Make the file, or forget what of it is torn; a second time nothing is done.

        Raises:
            OSError: It cannot be written.
            StorageError: It cannot be read.
        """
        if self._fd < 0:
            good = 0
            for frame in self._frames():
                good, self._number = frame.offset + len(frame.payload), frame.number + 1
            self._fd = open_to_lock(self.path)
            os.ftruncate(self._fd, good)
            os.lseek(self._fd, 0, os.SEEK_END)

    def _write(self, frame: bytes) -> None:
        write_all(self._fd, frame)
        # A kill loses nothing, a reboot what is younger than that.
        if self.durable and time.monotonic() >= self._synced + _SYNC_S:
            os.fsync(self._fd)
            self._synced = time.monotonic()

    def get(self, name: str) -> bytes | None:
        """See :meth:`Notes.get`."""
        return self._read().get(name)

    def list(self, pattern: str = "*") -> Iterator[str]:
        """See :meth:`Notes.list`."""
        return (name for name in self._read() if fnmatchcase(name, pattern))

    def read(self, pattern: str = "*") -> Iterator[tuple[str, bytes]]:
        """See :meth:`Notes.read`; reads the file once."""
        return ((name, data) for name, data in self._read().items() if fnmatchcase(name, pattern))

    def _read(self) -> dict[str, bytes]:
        parts = (bytes(frame.payload).partition(b" ") for frame in self._frames())
        return {name.decode(): data for name, _, data in parts}

    def _frames(self) -> Iterator[Frame]:
        """The frames up to the first that is not whole."""
        reader = FrameReader(self.path)
        for frame in reader.read() if self.path.exists() else ():
            if reader.damaged:
                return
            yield frame

    def close(self) -> None:
        """See :meth:`Notes.close`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
