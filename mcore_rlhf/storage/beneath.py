"""What is made, changed or removed on a file system: beneath a folder, part by part, by no link. Nothing outside this room writes.

A folder that is written into may hold links that somebody planted there, or have them put there while one works. So a path is never
handed to the system as a whole: a folder is opened, then what is in it, each without following a link, and what is made is made in the
folder that was opened. Linux does that in one call where it has ``openat2`` (5.6; ``man 2 openat2``, ``RESOLVE_BENEATH`` and
``RESOLVE_NO_SYMLINKS``); what stands above the folder is its user's, and is believed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from typing import BinaryIO

from .paths import canonical, pwrite_all, storage_error, write_all

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SYS_OPENAT2 = 437
_RESOLVE = 0x08 | 0x04  # RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS
_libc = ctypes.CDLL(None, use_errno=True)
_has_openat2 = sys.platform == "linux"


class _OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


@dataclass(slots=True)
class Beneath:
    """A folder, there already, and what is done in it. For several threads.

    Args:
        root: The folder. It may not be a link itself where ``own`` is given.
        own: Whether it is to be a folder that this user has made: a hidden one that is written into, in a place where others may write.

    Raises:
        OSError: It is not there, is no folder, or is another user's.
    """

    root: Path
    own: bool = False
    _fd: int = field(default=-1, repr=False)

    def __post_init__(self) -> None:
        flags = _FOLDER if self.own else _FOLDER & ~os.O_NOFOLLOW
        self._fd = os.open(self.root, flags)
        if self.own and not is_own(self.root.parent, os.fstat(self._fd).st_uid):
            self.close()
            raise OSError(errno.EPERM, "is another user's", str(self.root))

    def close(self) -> None:
        """Let the folder go."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()

    def __enter__(self) -> Beneath:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def create(self, name: str) -> int:
        """Make a file, and the folders above it; a descriptor to read and write it.

        Args:
            name: Its path, with ``/``.

        Raises:
            Untrusted: It is not a canonical path.
            FileExistsError: Something has that name, be it a link that leads nowhere.
            OSError: It cannot be made; on its way stands a link, or something else that is no folder.
        """
        with self._above(name, make=True) as (folder, last):
            return os.open(last, _NEW, 0o666, dir_fd=folder)

    def fill(self, name: str) -> int:
        """Open a file that is there already, made by this user's other process, to be written into.

        Raises:
            Untrusted: The name is not a canonical path.
            OSError: It cannot be opened, or a link stands there or above it.
        """
        return self._there(name, os.O_WRONLY)

    def look(self, name: str) -> int:
        """Open a file to be read; see :meth:`fill`."""
        return self._there(name, os.O_RDONLY | os.O_NONBLOCK)

    def _there(self, name: str, flags: int) -> int:
        with self._above(name) as (folder, last):
            return os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)

    def make(self, name: str) -> None:
        """Make a folder, and those above it; one that is there is good.

        Raises:
            Untrusted: It is not a canonical path.
            OSError: It cannot be made.
        """
        os.close(_folder(self._fd, canonical(name, self.root).split("/"), make=True))

    def link(self, source: Path, name: str, seen: int | None = None) -> None:
        """Give a file, which may be no link, a second name here.

        Args:
            source: It.
            name: The name.
            seen: A descriptor of the file that it has to be.

        Raises:
            Untrusted: The name is not a canonical path.
            OSError: The file systems are not the same, or have no such links; or another file has its name by now.
        """
        with self._above(name, make=True) as (folder, last):
            if not stat.S_ISREG(os.lstat(source).st_mode):
                raise OSError(errno.EINVAL, "is no regular file", str(source))
            os.link(source, last, dst_dir_fd=folder, follow_symlinks=False)
            try:
                made = os.stat(last, dir_fd=folder, follow_symlinks=False)
                if seen is not None and not os.path.samestat(os.fstat(seen), made):
                    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(source))
            except OSError:  # the name is free again for who writes the file instead
                os.unlink(last, dir_fd=folder)
                raise

    def move(self, name: str, to: str, into: Beneath | None = None) -> None:
        """Give a file or folder another name, here or in another folder; a file of that name is replaced.

        Raises:
            Untrusted: A name is not a canonical path.
            OSError: It cannot be done.
        """
        with self._above(name) as (old, last), (into or self)._above(to) as (new, other):
            os.rename(last, other, src_dir_fd=old, dst_dir_fd=new)

    def remove(self, name: str) -> bool:
        """Remove a file, a link, or a folder with all that is in it, however deep; no link is followed.

        Returns:
            Whether it was there.

        Raises:
            Untrusted: It is not a canonical path.
            OSError: It cannot be removed, or a link stands above it.
        """
        with suppress(FileNotFoundError), self._above(name) as (folder, last):
            return _removed(folder, last)
        return False

    @contextmanager
    def _above(self, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """The folder that something lies in, open, and what it is called there."""
        *above, last = canonical(name, self.root).split("/")
        if not above:
            yield self._fd, last
            return
        with _closing(_folder(self._fd, above, make=make)) as folder:
            yield folder, last


@contextmanager
def _closing(fd: int) -> Iterator[int]:
    """A descriptor that is let go in the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def remove_beneath(root: Path, name: str | PurePath) -> bool:
    """Remove what has a name beneath a folder: a file, a link, or a whole folder. Everything that is deleted goes through here.

    Args:
        root: The folder that it must lie in, with no link on the way.
        name: Its path from there.

    Returns:
        Whether it was there.

    Raises:
        Untrusted: The name is not a canonical path.
        OSError: It cannot be removed, or a link stands above it.
    """
    with suppress(FileNotFoundError), Beneath(root) as folder:
        return folder.remove(PurePosixPath(name).as_posix())
    return False


def remove(path: Path) -> bool:
    """Remove a file or a folder whose own folder is given by the user; see :func:`remove_beneath`."""
    return remove_beneath(path.parent, path.name)


def remove_empty(path: Path) -> None:
    """Remove a folder; an ``OSError`` where something is in it."""
    os.rmdir(path)


def make_folder(path: Path) -> None:
    """Make a folder that a user named, and those above it.

    Raises:
        OSError: It cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)


def new_folder(path: Path) -> None:
    """Make a folder that is not there yet.

    Raises:
        FileExistsError: Something is, be it a link.
        OSError: It cannot be made.
    """
    os.mkdir(path)


def move(path: Path, to: Path) -> None:
    """Rename a file or folder; a file that has the name, or an empty folder, is replaced.

    Raises:
        OSError: It cannot be done.
    """
    os.rename(path, to)


def write_new(path: Path, data: bytes, *, fsync: bool = False) -> None:
    """Write a small file that is not there yet; a link in its place could lead to any file of the user's.

    Raises:
        FileExistsError: Something is, be it a link that leads nowhere.
        OSError: It cannot be written.
    """
    with _closing(os.open(path, _NEW, 0o666)) as fd:
        pwrite_all(fd, memoryview(data), 0)
        if fsync:
            os.fsync(fd)


def write_over(path: Path, data: bytes, *, fsync: bool = False) -> None:
    """Write a small file anew, whatever was there: aside, then renamed over it, so that nobody ever sees half of it.

    Raises:
        OSError: It cannot be written; what was there before is still there.
    """
    aside = path.with_name(f".{path.name}.tmp-{os.urandom(8).hex()}")
    try:
        write_new(aside, data, fsync=fsync)
        os.replace(aside, path)
    except OSError:
        with suppress(OSError):
            os.unlink(aside)
        raise


def open_new(path: Path) -> BinaryIO:
    """A file that is not there yet, to be written; see :func:`write_new`."""
    return os.fdopen(os.open(path, _NEW, 0o666), "wb")


def open_to_lock(path: Path) -> int:
    """A file to be locked, or gone on with; made where there is none.

    Raises:
        OSError: It cannot be opened, or is a link or no regular file.
    """
    return _opened(path, os.O_RDWR)


def open_there_to_lock(path: Path) -> int:
    """A file that is there, to be locked; see :func:`open_to_lock`."""
    return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def open_to_append(path: Path) -> int:
    """A file to be added to, made where there is none; see :func:`open_to_lock`."""
    return _opened(path, os.O_WRONLY | os.O_APPEND)


def _opened(path: Path, flags: int) -> int:
    fd = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    except OSError:
        os.close(fd)
        raise


def append(path: Path, data: bytes) -> None:
    """Add to a file, made where there is none; what is no regular file is left alone. See :func:`open_to_append`."""
    with _closing(open_to_append(path)) as fd:
        write_all(fd, data)


def copy_tree(
    source: Path, target: Path, skip: frozenset[Path] = frozenset(), whole: frozenset[Path] = frozenset()
) -> None:
    """Copy a folder into a new one. Links stay links, but in folders of which a copy that can be changed is wanted.

    Args:
        source: The folder.
        target: Where; not there yet.
        skip: What is left out.
        whole: Folders of it in which links are copied as what they lead to, so that nothing of the source is reached through the copy.

    Raises:
        OSError: Something cannot be read or written.
    """

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(folder, name) in skip or Path(folder, name) in whole]

    shutil.copytree(source, target, symlinks=True, ignore=left_out)
    for folder in sorted(whole):
        shutil.copytree(folder, target / folder.relative_to(source), symlinks=False)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file to a name that is not taken.

    Raises:
        OSError: It cannot be read or written.
    """
    with source.open("rb") as there, open_new(target) as here:
        shutil.copyfileobj(there, here)


def scratch_folder(prefix: str) -> Path:
    """A new folder for this user alone, where the system keeps what is there for a while."""
    return Path(tempfile.mkdtemp(prefix=prefix))


class Scratch:
    """Bytes of our own for the time of a process: in memory while they are few, then in a file that has no name. For several threads."""

    def __init__(self, in_memory: int) -> None:
        self._file = tempfile.SpooledTemporaryFile(in_memory)  # noqa: SIM115  # lives as long as this does
        self._lock = threading.Lock()
        self._end = 0
        weakref.finalize(self, self._file.close)

    def add(self, data: bytes) -> int:
        """Put bytes behind the others; where they begin.

        Raises:
            StorageError: They do not fit where the system keeps such files.
        """
        with self._lock:
            at = self._end
            try:
                self._file.seek(at)
                self._file.write(data)
            except OSError as error:
                raise storage_error(error, Path(tempfile.gettempdir()), "keep a plan") from error
            self._end = at + len(data)
            return at

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes that were put there.

        Raises:
            StorageError: The system does not give them back.
        """
        with self._lock:
            try:
                self._file.seek(offset)
                return self._file.read(nbytes)
            except OSError as error:
                raise storage_error(error, Path(tempfile.gettempdir()), "read a plan") from error


def is_own(folder: Path, uid: int) -> bool:
    """Whether what has that owner, in a folder, is this user's: by number, or as a new file there would have it (root on NFS is nobody).

    Args:
        folder: The folder, which is only written to where the numbers differ.
        uid: Whose it is.
    """
    if uid == os.geteuid():
        return True
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            return os.fstat(probe.fileno()).st_uid == uid
    except OSError:
        return False


def _folder(root: int, parts: list[str], *, make: bool) -> int:
    """A folder beneath another one, open."""
    fd = _at_once(root, "/".join(parts))
    if fd >= 0:
        return fd
    fd = os.dup(root)
    for part in parts:
        with _closing(fd):
            fd = _entered(fd, part, make=make)
    return fd


def _entered(folder: int, name: str, *, make: bool) -> int:
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=folder)
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except NotADirectoryError:
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name) from None
        raise


def _at_once(root: int, path: str) -> int:
    """The same by ``openat2``; -1 where that says anything but yes: part by part tells why."""
    global _has_openat2
    if not _has_openat2:
        return -1
    how = _OpenHow(_FOLDER, 0, _RESOLVE)
    fd = int(_libc.syscall(_SYS_OPENAT2, root, path.encode(), ctypes.byref(how), ctypes.sizeof(how)))
    if fd < 0 and ctypes.get_errno() in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
        _has_openat2 = False  # an older kernel, or a container that does not let it through
    return fd


def _removed(folder: int, name: str) -> bool:
    """Remove one entry of an open folder."""
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=folder)
            return True
        top = os.open(name, _FOLDER, dir_fd=folder)
    except FileNotFoundError:
        return False
    with _closing(top):
        _empty(top)
    with suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=folder)
    return True


def _empty(top: int) -> None:
    """Remove all that is in a folder. Folders below those in it are brought up into it first: however deep the tree is, two are open."""
    prefix, lifted = f".{os.urandom(4).hex()}-", 0
    while entries := _listed(top):
        for name, is_folder in entries:
            if not is_folder:
                _unlinked(top, name)
                continue
            with suppress(FileNotFoundError):
                with _closing(os.open(name, _FOLDER, dir_fd=top)) as below:
                    for inner, inner_is_folder in _listed(below):
                        if not inner_is_folder:
                            _unlinked(below, inner)
                        elif not _was_empty(below, inner):
                            lifted += 1
                            os.rename(inner, f"{prefix}{lifted}", src_dir_fd=below, dst_dir_fd=top)
                os.rmdir(name, dir_fd=top)


def _listed(folder: int) -> list[tuple[str, bool]]:
    with os.scandir(folder) as entries:
        return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]


def _unlinked(folder: int, name: str) -> None:
    with suppress(FileNotFoundError):  # another process removes the same
        os.unlink(name, dir_fd=folder)


def _was_empty(folder: int, name: str) -> bool:
    try:
        os.rmdir(name, dir_fd=folder)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True
