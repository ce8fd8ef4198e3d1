"""Reading bytes, wherever a checkpoint lies: a :class:`ByteSource` for each file, of the file system or of a :class:`~.store.Store`.

On a file system only regular files are read, without waiting: a named pipe in place of a file would let the reader wait for ever, and
``/dev/zero`` would fill the memory. Links to regular files are followed as far as :mod:`.links` lets them lead.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import stat
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

from ..errors import Incomplete, StorageError, Unreadable
from .links import require_inside
from .paths import NotRegular, ReadablePath, beneath, cannot_open, storage_error
from .patience import patiently

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_TEXT = 128 << 20
"""Bytes of a JSON file: an index of a million tensors has 100 MB."""

MAX_LINE = 1 << 16
"""Bytes of a file that holds a name or a number."""

_MAX_DEPTH = 200
_PIECE_NBYTES = 4 << 20
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
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


class ByteSource(ABC):
    """The bytes of one file. Its methods may be called from several threads.

    Args:
        path: The file, for messages.
        nbytes: Its length when it was opened.

    Attributes:
        far: Whether every read is a journey: what can be worked out is not read then.
    """

    far: ClassVar[bool] = False

    def __init__(self, path: ReadablePath, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes

    @abstractmethod
    def pread(self, nbytes: int, offset: int) -> bytes:
        """Up to so many bytes; none behind the end.

        Raises:
            OSError: They cannot be read.
        """

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the file.

        Raises:
            Incomplete: It ends before.
            StorageError: They cannot be read.
        """
        pieces, at, stop = list[bytes](), offset, offset + nbytes
        while at < stop:
            try:
                piece = self.pread(stop - at, at)
            except OSError as error:
                raise cannot_open(error, self.path) from error
            if not piece:
                raise Incomplete(
                    f"{self.path}: ends at byte {at}, but bytes up to {stop} were expected.\n"
                    "Copy the file again from where it came from, or use an older step."
                )
            pieces.append(piece)
            at += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def pieces(self, nbytes: int) -> Iterator[memoryview]:
        """The whole file, as it is now, piece by piece; each is good until the next one.

        Raises:
            StorageError: It cannot be read.
        """
        at = 0
        try:
            while piece := self.pread(nbytes, at):
                yield memoryview(piece)
                at += len(piece)
        except OSError as error:
            raise cannot_open(error, self.path) from error

    def view(self, byte_offset: int, nbytes: int) -> memoryview:
        """Bytes of the file, in memory until :meth:`release`.

        Raises:
            CheckpointError: They cannot be read, or lie past the end.
        """
        return memoryview(self.read(byte_offset, nbytes))

    def release(self, byte_offset: int, nbytes: int) -> None:  # noqa: B027
        """Say that these bytes are not needed any more."""

    def expect(self, byte_offset: int, nbytes: int) -> None:  # noqa: B027
        """Say that these bytes will be read soon."""

    def close(self) -> None:  # noqa: B027
        """Let the file go, once the last view of it is gone."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class LocalFile(ByteSource):
    """A file of a file system.

    Args:
        path: The file.

    Raises:
        OSError: See :func:`open_bytes`.
    """

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self._fd = patiently(lambda: open_regular(path))
        super().__init__(path, patiently(lambda: _facts(path, self._fd)).st_size)

    def pread(self, nbytes: int, offset: int) -> bytes:
        """See :meth:`ByteSource.pread`."""
        return patiently(lambda: os.pread(self._fd, nbytes, offset))

    def pieces(self, nbytes: int) -> Iterator[memoryview]:
        """See :meth:`ByteSource.pieces`; one buffer serves for all."""
        piece, at = memoryview(bytearray(nbytes)), 0
        try:
            if hasattr(os, "posix_fadvise"):
                with suppress(OSError):  # it is advice
                    os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while count := patiently(partial(os.preadv, self._fd, [piece], at)):
                yield piece[:count]
                at += count
        except OSError as error:
            raise cannot_open(error, self.path) from error

    def close(self) -> None:
        """Let the file go."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(OSError):  # it was only read
                os.close(fd)

    def __del__(self) -> None:
        self.close()


class MappedFile(ByteSource):
    """A file of a file system, mapped into memory a window at a time: read without a copy, dropped behind, no SIGBUS.

    Args:
        path: The file.

    Raises:
        OSError: See :func:`open_bytes`.
        StorageError: It cannot be mapped.
    """

    def __init__(self, path: Path) -> None:
        with LocalFile(path) as file:
            super().__init__(path, file.nbytes)
            try:  # the mapping has a descriptor of its own
                self._map = mmap.mmap(file._fd, self.nbytes, prot=mmap.PROT_READ) if self.nbytes else None
            except (OSError, ValueError) as error:
                failed = error if isinstance(error, OSError) else OSError(error)
                raise Unreadable(str(storage_error(failed, path, "map"))) from error
        self._view = memoryview(self._map) if self._map is not None else memoryview(b"")
        self._address = _address(self._view)

    def pread(self, nbytes: int, offset: int) -> bytes:
        """See :meth:`ByteSource.pread`."""
        return bytes(self.view(offset, max(0, min(nbytes, self.nbytes - offset))))

    def view(self, byte_offset: int, nbytes: int) -> memoryview:
        """See :meth:`ByteSource.view`.

        Raises:
            StorageError: They cannot be read, or lie past the end: the file has become shorter.
        """
        size = self._size_now()
        if byte_offset + nbytes > min(size, self.nbytes):
            raise StorageError(
                f"{self.path}: ends at byte {min(size, self.nbytes)}, but bytes {byte_offset} to "
                f"{byte_offset + nbytes} are needed; it had {self.nbytes} bytes when it was opened.\n"
                "Is another program still writing or deleting this checkpoint? Try again when it is done."
            )
        self._advise(byte_offset, nbytes, _MADV_POPULATE_READ)
        return self._view[byte_offset : byte_offset + nbytes]

    def _size_now(self) -> int:
        try:
            return 0 if self._map is None else patiently(self._map.size)
        except OSError as error:
            raise cannot_open(error, self.path) from error

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

        def advised() -> None:
            if _libc.madvise(self._address + start, byte_offset + nbytes - start, advice) == 0:
                return
            number = ctypes.get_errno()
            if number != errno.EINVAL and advice == _MADV_POPULATE_READ:  # EINVAL: an older kernel
                number = errno.EIO if number in (errno.EFAULT, _EHWPOISON) else number
                raise OSError(number, os.strerror(number))

        try:
            patiently(advised)
        except OSError as error:
            detail = f"bytes {byte_offset} to {byte_offset + nbytes}"
            raise Unreadable(str(storage_error(error, self.path, "read", detail))) from error


def _address(view: memoryview) -> int:
    """Where a mapping lies in memory."""
    if not len(view):
        return 0
    import numpy as np  # ctypes cannot take the address of a read-only buffer

    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _facts(path: Path, fd: int) -> os.stat_result:
    """What is known of an open file; an error names it, which that of a descriptor does not."""
    try:
        return os.fstat(fd)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def open_regular(path: Path) -> int:
    """A descriptor of a regular file, for reading; never waits.

    Raises:
        NotRegular: It is a pipe, a socket or a device.
        Untrusted: A link out of the folder that the user named led to it.
        OSError: It is a folder, is missing, or cannot be opened.
    """
    _require_regular(path, os.stat(path).st_mode)  # opening some devices does something
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(path, _facts(path, fd).st_mode)
        require_inside(path, fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_regular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise NotRegular(path, f"{_KINDS.get(stat.S_IFMT(mode), 'something else')}, but a regular file was expected")


class _OpensItself(Protocol):
    def open_bytes(self) -> ByteSource: ...


def open_bytes(path: ReadablePath, local: Callable[[Path], ByteSource] = LocalFile) -> ByteSource:
    """Open a file, for reading it as it is.

    Args:
        path: The file.
        local: Opens it where it is one of the file system: :class:`LocalFile` by default, or :class:`MappedFile`.

    Raises:
        NotRegular: It is a pipe, a socket or a device.
        OSError: It is a folder, is missing, or cannot be opened.
    """
    return local(path) if isinstance(path, Path) else cast(_OpensItself, path).open_bytes()


@dataclass(slots=True)
class _Use:
    """An open file, and how many of its views have yet to be released."""

    opened: ByteSource
    views: int = 0


@dataclass(slots=True)
class OpenFiles:
    """The files of a checkpoint, each opened when it is needed. May be used from several threads.

    A checkpoint can have more files than a process may have open: those that nobody looks at are closed again, the one that was
    not needed for longest first.

    Args:
        root: The checkpoint's folder.
        limit: Files that stay open.
    """

    root: ReadablePath
    limit: int = 64
    _open: dict[str, _Use] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, file: str) -> ByteSource:
        """A file, which stays open until :meth:`close`."""
        return self._take(file).opened

    def view(self, file: str, byte_offset: int, nbytes: int) -> memoryview:
        """See :meth:`ByteSource.view`. The file stays open until the view is released.

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
            return use.opened.view(byte_offset, nbytes)
        except BaseException:
            self._give_back(file)
            raise

    def release(self, file: str, byte_offset: int, nbytes: int) -> None:
        """See :meth:`ByteSource.release`."""
        use = self._open.get(file)
        if use is not None:
            use.opened.release(byte_offset, nbytes)
            self._give_back(file)

    def _take(self, file: str) -> _Use:
        with self._lock:
            use = self._open.pop(file, None) or _Use(opened(beneath(self.root, file), MappedFile))
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
            self._open.pop(file).opened.close()

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for use in self._open.values():
                use.opened.close()
            self._open.clear()

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def opened(path: ReadablePath, local: Callable[[Path], ByteSource] = LocalFile) -> ByteSource:
    """See :func:`open_bytes`; for a file that should be there.

    Raises:
        NotACheckpoint: There is no such file.
        StorageError: It cannot be read.
    """
    try:
        return open_bytes(path, local)
    except OSError as error:
        raise cannot_open(error, path) from error


def read_bytes(path: ReadablePath, most: int = MAX_TEXT) -> bytes:
    """The content of a small file.

    Args:
        path: It.
        most: Bytes that it may have.

    Raises:
        NotRegular: It is no regular file, or has more.
        OSError: It cannot be read.
    """
    with open_bytes(path) as file:
        pieces: list[bytes] = []
        at, left = 0, most + 1 if file.nbytes <= most else 0  # what is said to be larger is not read at all
        while left and (piece := file.pread(min(left, _PIECE_NBYTES), at)):
            pieces.append(piece)
            at, left = at + len(piece), left - len(piece)
        if not left:
            raise NotRegular(path, f"larger than {most:,} bytes, which is too much for what it should hold")
        return b"".join(pieces)


def read_text(path: ReadablePath, most: int = MAX_TEXT, errors: str = "strict") -> str:
    """The content of a small file as UTF-8 text; see :func:`read_bytes`.

    Raises:
        UnicodeDecodeError: It is none.
    """
    return read_bytes(path, most).decode("utf-8", errors)


def read_line(path: ReadablePath) -> str:
    """The one line of a tracker, whatever is in it; see :func:`read_bytes`."""
    return read_text(path, MAX_LINE, "replace").strip()


def read_json(path: ReadablePath, most: int = MAX_TEXT) -> Any:
    """What a small JSON file holds; see :func:`read_bytes`.

    Raises:
        ValueError: It is no JSON, or nested so deeply that no honest writer made it.
    """
    return parse_json(read_bytes(path, most))


def parse_json(data: bytes | str, **hooks: Any) -> Any:
    """What a JSON text holds.

    Args:
        data: It.
        hooks: As ``json.loads`` takes them.

    Raises:
        ValueError: See :func:`read_json`.
    """
    try:
        value = json.loads(data, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [part for whole in level if isinstance(whole, dict | list) for part in _parts(whole)]
        if not level:
            return value
    raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")


def _parts(whole: dict[str, Any] | list[Any]) -> Iterator[Any]:
    parts = whole.values() if isinstance(whole, dict) else whole
    return (part for part in parts if type(part) in (dict, list))
