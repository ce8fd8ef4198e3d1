"""Source files, mapped into memory a window at a time: read without a copy, dropped behind, no SIGBUS."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import StorageError
from .paths import cannot_open, inside, storage_error
from .regular import open_regular

_PAGE = mmap.PAGESIZE
_MADV_DONTNEED = 4
_MADV_POPULATE_READ = 22
"""Linux 5.14, ``man 2 madvise``: read the pages in now, and return an error where a later access would raise
SIGBUS.
"""

_EHWPOISON = 133  # missing in the errno module

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
"""Called through ctypes because ``mmap.madvise`` keeps the GIL while it waits for the disk (CPython 3.13,
mmapmodule.c).
"""


class MappedFile:
    """One file, mapped read-only. Its methods may be called from several threads.

    Args:
        path: The file.

    Raises:
        NotACheckpoint: There is no such file.
        StorageError: It cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            fd = open_regular(path)
        except OSError as error:
            raise cannot_open(error, path) from error
        try:
            self.nbytes = os.fstat(fd).st_size
            self._map = mmap.mmap(fd, self.nbytes, prot=mmap.PROT_READ) if self.nbytes else None
        except (OSError, ValueError) as error:
            raise storage_error(error if isinstance(error, OSError) else OSError(error), path, "map") from error
        finally:
            os.close(fd)  # the mapping has a descriptor of its own
        self._view = memoryview(self._map) if self._map is not None else memoryview(b"")
        self._address = _address(self._view)

    def view(self, byte_offset: int, nbytes: int) -> memoryview:
        """Bytes of the file, in memory until :meth:`release`.

        Raises:
            StorageError: They cannot be read, or lie past the end: the file has become shorter.
        """
        size = self._map.size() if self._map is not None else 0  # of the file, as it is now
        if byte_offset + nbytes > min(size, self.nbytes):
            raise StorageError(
                f"{self.path}: ends at byte {min(size, self.nbytes)}, but bytes {byte_offset} to "
                f"{byte_offset + nbytes} are needed; it had {self.nbytes} bytes when it was opened.\n"
                "Is another program still writing or deleting this checkpoint? Try again when it is done."
            )
        self._advise(byte_offset, nbytes, _MADV_POPULATE_READ)
        return self._view[byte_offset : byte_offset + nbytes]

    def release(self, byte_offset: int, nbytes: int) -> None:
        """Say that these bytes are not needed any more. A page at the edge that someone else reads is simply
        read again.
        """
        self._advise(byte_offset, nbytes, _MADV_DONTNEED)

    def close(self) -> None:
        """Unmap the file, once the last view of it is gone."""
        self._view = memoryview(b"")
        self._map = None

    def _advise(self, byte_offset: int, nbytes: int, advice: int) -> None:
        if not nbytes or sys.platform != "linux":
            return
        start = byte_offset - byte_offset % _PAGE
        if _libc.madvise(self._address + start, byte_offset + nbytes - start, advice) == 0:
            return
        number = ctypes.get_errno()
        if number != errno.EINVAL and advice == _MADV_POPULATE_READ:  # EINVAL: an older kernel
            number = errno.EIO if number in (errno.EFAULT, _EHWPOISON) else number
            detail = f"bytes {byte_offset} to {byte_offset + nbytes}"
            raise storage_error(OSError(number, os.strerror(number)), self.path, "read", detail)


def _address(view: memoryview) -> int:
    """Where a mapping lies in memory."""
    if not len(view):
        return 0
    import numpy as np  # ctypes cannot take the address of a read-only buffer

    return int(np.frombuffer(view, np.uint8).ctypes.data)


@dataclass(slots=True)
class _Use:
    """A mapped file, and how many of its views have yet to be released."""

    mapped: MappedFile
    views: int = 0


@dataclass(slots=True)
class MappedFiles:
    """The files of a checkpoint, each mapped when it is needed. May be used from several threads.

    A checkpoint can have more files than a process may have open: those that nobody looks at are closed again, the one that was
    not needed for longest first.

    Args:
        root: The checkpoint's folder.
        limit: Files that stay open.
    """

    root: Path
    limit: int = 64
    _open: dict[str, _Use] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, file: str) -> MappedFile:
        """The mapped file, which stays open until :meth:`close`."""
        return self._take(file).mapped

    def view(self, file: str, byte_offset: int, nbytes: int) -> memoryview:
        """See :meth:`MappedFile.view`. The file stays open until the view is released.

        Args:
            file: Path relative to the root, with ``/``.
            byte_offset, nbytes: Which bytes.

        Raises:
            Untrusted: The path leads out of the root.
            NotACheckpoint: There is no such file.
            StorageError: It cannot be read.
        """
        use = self._take(file)
        try:
            return use.mapped.view(byte_offset, nbytes)
        except BaseException:
            self._give_back(file)
            raise

    def release(self, file: str, byte_offset: int, nbytes: int) -> None:
        """See :meth:`MappedFile.release`."""
        use = self._open.get(file)
        if use is not None:
            use.mapped.release(byte_offset, nbytes)
            self._give_back(file)

    def _take(self, file: str) -> _Use:
        with self._lock:
            use = self._open.pop(file, None) or _Use(MappedFile(inside(self.root, file)))
            self._open[file] = use  # at the end: used last
            use.views += 1
            self._close_idle()
            return use

    def _give_back(self, file: str) -> None:
        with self._lock:
            use = self._open.get(file)
            if use is not None and use.views:
                use.views -= 1

    def _close_idle(self) -> None:
        for file in [file for file, use in self._open.items() if not use.views][: max(0, len(self._open) - self.limit)]:
            self._open.pop(file).mapped.close()

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for use in self._open.values():
                use.mapped.close()
            self._open.clear()

    def __enter__(self) -> MappedFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
