"""A new file whose length is known before its bytes are: reserved first, filled in any order, closed or removed."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from ..errors import StorageError
from .paths import human, pwrite_all, storage_error

if TYPE_CHECKING:
    from typing_extensions import Buffer

_Self = TypeVar("_Self", bound="ReservedFile")


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that is complete.

    Args:
        path: Where it is.
        nbytes: Its length.
        crc32: CRC-32 of all its bytes, for the manifest.
    """

    path: Path
    nbytes: int
    crc32: int


@dataclass(slots=True)
class ReservedFile:
    """A file being written. Use it in a ``with`` block: left before it is complete, the file is removed.

    Args:
        path: Where to write; must not exist.
        nbytes: Its length.
    """

    path: Path
    nbytes: int
    _fd: int = field(default=-1, init=False, repr=False)

    def reserve(self) -> None:
        """Create the file, sparse: it takes space as bytes are put in.

        Raises:
            StorageError: It cannot be created.
        """
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise storage_error(error, self.path, "create") from error
        try:
            os.ftruncate(self._fd, self.nbytes)
        except OSError as error:
            self.abort()
            raise self._error(error) from error

    def pwrite(self, data: Buffer, offset: int) -> None:
        """Put bytes at an offset. For several threads.

        Raises:
            StorageError: They cannot be written; says how much is needed and free.
        """
        try:
            pwrite_all(self._fd, memoryview(data), offset)
        except OSError as error:
            raise self._error(error) from error

    def complete(self, crc: int, *, fsync: bool) -> WrittenFile:
        """Close the file.

        Args:
            crc: CRC-32 of all its bytes.
            fsync: Whether to wait until the file is on the disk.

        Raises:
            StorageError: It cannot be completed.
        """
        try:
            if fsync:
                os.fsync(self._fd)
            fd, self._fd = self._fd, -1
            os.close(fd)
        except OSError as error:
            raise self._error(error) from error
        return WrittenFile(self.path, self.nbytes, crc)

    def abort(self) -> None:
        """Close the file and remove it; nothing happens if it is complete."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.path.unlink(missing_ok=True)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _error(self, error: OSError) -> StorageError:
        where = self.path.parent
        free = f", {human(shutil.disk_usage(where).free)} are free" if where.is_dir() else ""
        return storage_error(error, self.path, "write", f"the file needs {human(self.nbytes)}{free}")
