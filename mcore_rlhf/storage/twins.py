"""A file that would be written once more, byte for byte: it is compared with the one that is there, and given a second name instead."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import numpy as np

from .beneath import Beneath
from .record_file import Layout, RecordFile


class Differs(Exception):
    """A byte is not what is there."""


class Twin(RecordFile):
    """A file that is there already, and takes only what it holds: it is filled as a new one is, and what is put into it is compared.

    Args:
        root: The folder that it lies beneath, with no link on the way.
        name: Its path from there.
        layout: What would be written.

    Raises:
        Differs: Something else would be, or it cannot be read.
    """

    def __init__(self, root: Path, name: str, layout: Layout) -> None:
        self._name, self._there = name, np.empty(0, np.uint8)
        try:
            super().__init__(root / name, layout, Beneath(root))
        except OSError as error:
            raise Differs(f"{root / name}: {error.strerror}") from error

    def link(self, folder: Beneath, name: str) -> None:
        """Give it a second name, once :meth:`finish` has seen that nothing differs.

        Args:
            folder: Where.
            name: The name.

        Raises:
            Differs: It cannot have one: it lies in another file system, or one that has no such links, or has too many.
        """
        try:
            folder.link(self.path, name, self._fd)
        except OSError as error:
            raise Differs(f"{self.path}: {error.strerror}") from error

    def abort(self) -> None:
        """Let it go; it stays as it is."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _create(self) -> None:
        self._fd = self._beneath().look(self._name)

    def _reserve(self) -> None:
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != self.layout.nbytes:
            raise Differs(f"{self.path}: has another length")

    def _pwrite(self, data: memoryview, offset: int) -> None:
        if len(self._there) < len(data):
            self._there = np.empty(len(data), np.uint8)
        there, at = self._there[: len(data)], 0
        while at < len(data):
            try:
                count = os.preadv(self._fd, [there[at:].data], offset + at)
            except OSError as error:
                raise Differs(f"{self.path}: {error.strerror}") from error
            if not count:
                break
            at += count
        if at < len(data) or not np.array_equal(there, np.frombuffer(data, np.uint8)):
            raise Differs(f"{self.path}: differs")

    def _close(self, fsync: bool) -> None:
        """Its bytes may have been written by a save that did not wait for the disk. It stays open, to be linked."""
        try:
            if fsync:
                os.fsync(self._fd)
        except OSError as error:
            raise Differs(f"{self.path}: {os.strerror(error.errno or errno.EIO)}") from error
