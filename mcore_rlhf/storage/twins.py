"""A file that would be written once more, byte for byte, is compared with the one that is there, which gets a second name instead."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np

from .beneath import Beneath
from .in_memory import Bytes
from .record_file import Layout, RecordFile

_WINDOW_NBYTES = 1 << 20


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
        if at < len(data) or not _holds_the_same(there, np.frombuffer(data, np.uint8)):
            raise Differs(f"{self.path}: differs")

    def _close(self, fsync: bool) -> None:
        """Its bytes may have been written by a save that did not wait for the disk. It stays open, to be linked."""
        try:
            if fsync:
                os.fsync(self._fd)
        except OSError as error:
            raise Differs(f"{self.path}: {os.strerror(error.errno or errno.EIO)}") from error


def _holds_the_same(one: Bytes, other: Bytes) -> bool:
    """Eight bytes at a time, which takes half as long, and what is left of them."""
    whole = len(one) & -8
    words, others = (some[:whole].view(np.uint64) for some in (one, other))
    return np.array_equal(words, others) and np.array_equal(one[whole:], other[whole:])


def put_in_place(folder: Beneath, name: str, root: Path, other: str, *, fsync: bool, moved: Callable[[], None]) -> None:
    """Put a second name of a file in the place of one that holds the same, byte for byte.

    Args:
        folder: Where the one lies that goes.
        name: Its path from there.
        root: The folder that the other one lies beneath, with no link on the way.
        other: Its path from there.
        fsync: Whether its bytes are to be on the disk.
        moved: Hears of each part that was compared.

    Raises:
        Differs: They do not hold the same, or cannot be compared or linked; the file stays as it is.
    """
    aside = f"{name}.twin"
    try:
        with ExitStack() as opened:
            fds = folder.look(name), opened.enter_context(Beneath(root)).look(other)
            for fd in fds:
                opened.callback(os.close, fd)
            if not _are_same(*fds, moved):
                raise Differs(f"{root / other}: differs")
            if fsync:
                os.fsync(fds[1])
            folder.link(root / other, aside, fds[1])
            folder.move(aside, name)
    except OSError as error:
        with suppress(OSError):
            folder.remove(aside)
        raise Differs(f"{root / other}: {error.strerror}") from error


def _are_same(one: int, other: int, moved: Callable[[], None]) -> bool:
    found = [os.fstat(fd) for fd in (one, other)]
    if not all(stat.S_ISREG(facts.st_mode) and facts.st_size == found[0].st_size for facts in found):
        return False
    for at in range(0, found[0].st_size, _WINDOW_NBYTES):
        if os.pread(one, _WINDOW_NBYTES, at) != os.pread(other, _WINDOW_NBYTES, at):
            return False
        moved()
    return True
