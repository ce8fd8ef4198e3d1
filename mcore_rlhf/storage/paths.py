"""Names inside a checkpoint become paths that stay inside it; I/O errors become messages."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path, PurePosixPath

from ..errors import NotACheckpoint, StorageError, Untrusted, UsageError
from .regular import NotRegular

_ADVICE = {
    errno.ENOSPC: "Free some space, or choose a target on another disk.",
    errno.EDQUOT: "The disk quota is used up: free some space, or choose a target on another disk.",
    errno.EACCES: "Check who owns the folder and its permissions.",
    errno.EPERM: "Check who owns the folder and its permissions.",
    errno.EROFS: "The file system is mounted read-only.",
    errno.EIO: "The disk or network file system failed; see the system log, then try again.",
    errno.EFBIG: "The file system or a limit (ulimit -f) does not allow files of this size.",
    errno.EMFILE: "Raise the limit of open files (ulimit -n).",
    errno.ESTALE: "The network file system lost the file; mount it again.",
}

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
"""A URL, also one that ``Path`` made ``s3:/bucket`` of; a scheme has two letters at least, so ``C:/`` is none."""


def local_path(given: str | os.PathLike[str]) -> Path:
    """A path that a user named, which is not a URL: as a path it would mean a folder called ``s3:`` in the current one.

    The one place that knows which paths there are: everything that takes one from a user asks here.

    Args:
        given: A source, a target, a root, or a file beside one.

    Raises:
        UsageError: It is a URL.
    """
    text = os.fspath(given)
    scheme = _URL.match(text)
    if scheme is None:
        return Path(text)
    url = f"{scheme[1]}://{text[scheme.end() :]}"
    if scheme[1].lower() == "file":
        raise UsageError(f"{url}: is a URL, but a path is expected\nLeave out the file:// in front of it.")
    raise UsageError(
        f"{url}: is a URL, and only folders of mounted file systems are read and written\n"
        f"Copy it to a local folder first or afterwards, or mount it. A folder that is really called {scheme[1]}: is named by "
        "its absolute path."
    )


def real_path(path: Path) -> Path:
    """Where a path leads, with all links followed; a link to itself leads to itself, where ``Path.resolve`` raises RuntimeError."""
    return Path(os.path.realpath(path))


def inside(root: Path, name: str, *, follow_links: bool = True) -> Path:
    """The path of a file that a checkpoint names, which may not lie outside the checkpoint.

    Symbolic links are followed by default: whoever can place one in the folder has the file system's rights,
    and rank folders on other disks are common. A name that comes out of a manifest gets no such trust.

    Args:
        root: The checkpoint's folder.
        name: Path relative to it, with ``/``.
        follow_links: Whether symbolic links below the root may lead out of it.

    Raises:
        Untrusted: The name is absolute, has ``..`` or a NUL in it, is empty, or leaves the root by a link.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\0" in name or "\\" in name:
        raise Untrusted(
            f"{root}: the checkpoint names the file {name!r}, which is not a plain path inside its folder.\n"
            "Such a name can reach foreign files; do not use this checkpoint unless you trust its source."
        )
    path = root.joinpath(*parts)
    if not follow_links and not real_path(path).is_relative_to(real_path(root)):
        raise Untrusted(
            f"{root}: {name!r} is a symbolic link that leads out of the checkpoint, to {real_path(path)}.\n"
            "Replace the link by the file itself if you trust it."
        )
    return path


def storage_error(error: OSError, path: Path, doing: str, detail: str = "") -> StorageError:
    """Say what the file system refused, to which file, and what helps.

    Args:
        error: What the system call raised.
        path: The file or folder.
        doing: What was tried: ``write``, ``read``, ``create``.
        detail: More facts, such as the bytes needed and free.
    """
    reason = os.strerror(error.errno) if error.errno else str(error)
    reason = str(error.strerror) if isinstance(error, NotRegular) else reason
    text = f"{path}: cannot {doing}: {reason}" + (f" ({detail})" if detail else "")
    advice = _ADVICE.get(error.errno or 0, "")
    return StorageError(f"{text}\n{advice}" if advice else text)


def cannot_open(error: OSError, path: Path) -> StorageError | NotACheckpoint:
    """The error for a file that should be read: missing is one thing, unreadable another."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return NotACheckpoint(f"{path}: there is no such file.")
    if isinstance(error, IsADirectoryError):
        return NotACheckpoint(f"{path}: is a folder, but a file was expected.")
    return storage_error(error, path, "read")


def human(nbytes: int) -> str:
    """A byte count for people: ``3.2 GB``."""
    value = float(nbytes)
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{nbytes} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


def pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all bytes at an offset; the system may take them in parts.

    Raises:
        OSError: It refuses.
    """
    while len(data):
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
