"""Where files lie: the small path type that formats ask, names that stay inside their checkpoint, I/O errors as messages."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import unquote

from ..errors import NotACheckpoint, StorageError, Unreadable, Untrusted, UsageError, shown

if TYPE_CHECKING:
    from typing_extensions import Self

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
    errno.ETIMEDOUT: "The network file system does not answer; try again when it does.",
    errno.ELOOP: "A symbolic link stands there; none is followed where something is written or removed.",
}

_CONTRADICTING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.ENAMETOOLONG})
"""What is there is something else than what should be there, or nothing: that is known."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")
"""A URL, also one that ``Path`` made ``s3:/bucket`` of; a scheme has two letters at least, so ``C:/`` is none."""


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(I?)(B?)", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}


class HasSize(Protocol):
    """What is known of a file: its length."""

    @property
    def st_size(self) -> int:
        """In bytes."""
        ...


class ReadablePath(Protocol):
    """A file or folder of a checkpoint: what ``pathlib.Path`` and a store's :class:`StorePath` have in common.

    As ``pathlib.types.ReadablePath`` of Python 3.14, with names of its methods that are older than that.
    """

    @property
    def name(self) -> str:
        """Its last part."""
        ...

    @property
    def suffix(self) -> str:
        """The ending of its name, with the dot."""
        ...

    @property
    def parent(self) -> Self:
        """The folder that it lies in."""
        ...

    @property
    def parents(self) -> Sequence[Self]:
        """All folders above it, the nearest first."""
        ...

    def __truediv__(self, name: str | PurePath, /) -> Self: ...

    def __lt__(self, other: Self, /) -> bool: ...

    def __hash__(self) -> int: ...

    def with_name(self, name: str) -> Self:
        """What lies beside it under another name."""
        ...

    def relative_to(self, other: Self, /) -> PurePath:
        """Its path below a folder.

        Raises:
            ValueError: It does not lie below it.
        """
        ...

    def is_relative_to(self, other: Self, /) -> bool:
        """Whether it lies below a folder, or is it."""
        ...

    def is_file(self) -> bool:
        """Whether there is such a file."""
        ...

    def is_dir(self) -> bool:
        """Whether there is such a folder."""
        ...

    def exists(self) -> bool:
        """Whether there is either."""
        ...

    def is_symlink(self) -> bool:
        """Whether it leads somewhere else."""
        ...

    def stat(self) -> HasSize:
        """What is known of it.

        Raises:
            OSError: There is no such file.
        """
        ...

    def iterdir(self) -> Iterator[Self]:
        """What lies in the folder, in any order."""
        ...

    def glob(self, pattern: str, /) -> Iterator[Self]:
        """What lies below it under names like ``*/*.pt``."""
        ...

    def rglob(self, pattern: str, /) -> Iterator[Self]:
        """What lies below it at any depth."""
        ...


class NotRegular(OSError):
    """Something else than a file stands where a file is expected, or far too much of one.

    Args:
        path: Where.
        what: What it is: completes "x is …".
    """

    def __init__(self, path: ReadablePath, what: str) -> None:
        super().__init__(errno.EINVAL, f"is {what}", str(path))


_Path = TypeVar("_Path", bound=ReadablePath)


def absolute(path: _Path) -> _Path:
    """A path that names what it does from everywhere, without ``..``."""
    return type(path)(os.path.abspath(path)) if isinstance(path, Path) else path


def local_path(given: str | os.PathLike[str]) -> Path:
    """A path of the file system that a user named, ``file://`` included; another URL would mean a folder called ``s3:`` here.

    Everything that takes a path from a user and writes there asks here; what only reads asks :func:`.urls.checkpoint_path`.

    Args:
        given: A source, a target, a root, or a file beside one.

    Raises:
        UsageError: It is a URL, or no file system can have it.
    """
    url = url_in(given)
    if url is None:
        return _possible(os.fspath(given))
    scheme, _, rest = url.partition("://")
    if scheme.lower() == "file":
        return _possible(unquote(f"/{rest.removeprefix('localhost').lstrip('/')}"))
    raise UsageError(
        f"{url}: is a URL, and a folder of a mounted file system is needed here\n"
        f"Copy it to a local folder first or afterwards, or mount it. A folder that is really called {scheme}: is named by "
        "its absolute path."
    )


def _possible(text: str) -> Path:
    try:
        if b"\0" not in os.fsencode(text):
            return Path(text)
    except UnicodeEncodeError:
        pass
    raise UsageError(f"{shown(text)}: is no path: it has a NUL or half a character in it, which no file system takes")


def url_in(given: str | os.PathLike[str]) -> str | None:
    """The URL that a user named, with both slashes; None where it is a path."""
    text = os.fspath(given)
    scheme = _URL.match(text)
    return None if scheme is None else f"{scheme[1]}://{text[scheme.end() :]}"


def real_path(path: _Path) -> _Path:
    """Where a path leads, with all links followed; a link to itself leads to itself, where ``Path.resolve`` raises RuntimeError."""
    return type(path)(os.path.realpath(path)) if isinstance(path, Path) else path


Unlisted = Callable[[ReadablePath, OSError], None]
"""What is done about a folder that cannot be listed: it is passed over, where that raises nothing."""


def passed_over(_folder: ReadablePath, _error: OSError) -> None:
    """Nothing depends on what may be in a folder that cannot be listed."""


def refused(folder: ReadablePath, error: OSError) -> None:
    """Nobody may say what is in a folder, or that there is nothing else, who could not look.

    Raises:
        Unreadable: An I/O error, or another user's folder.
    """
    if says_nothing(error):
        raise cannot_open(error, folder) from error


def walk(folder: _Path, unlisted: Unlisted = passed_over) -> Iterator[tuple[_Path, list[str]]]:
    """Every folder from one down, itself first, with the names of its files; links to folders are not entered.

    However deep: ``os.walk`` and ``rglob`` call themselves for every level, and end in RecursionError after some hundred.
    """
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        try:
            children = sorted(_listed(here))
        except OSError as error:
            unlisted(here, error)
            continue
        yield here, [name for name, is_folder, _ in children if not is_folder]
        waiting += [here / name for name, is_folder, is_link in reversed(children) if is_folder and not is_link]


def _listed(folder: ReadablePath) -> Iterator[tuple[str, bool, bool]]:
    """What lies in a folder: its name, whether it is a folder, and whether it is a link. What cannot be looked at is no folder."""
    if not isinstance(folder, Path):
        yield from ((child.name, child.is_dir(), child.is_symlink()) for child in folder.iterdir())
        return
    with os.scandir(folder) as entries:  # which mostly know it without a look at each
        for entry in entries:
            try:
                is_folder = entry.is_dir()
            except OSError:
                is_folder = False
            yield entry.name, is_folder, entry.is_symlink()


def files_below(folder: ReadablePath, unlisted: Unlisted = passed_over) -> list[str]:
    """The paths of all files below a folder, relative to it, with ``/``, in order."""
    found = (parent / name for parent, names in walk(folder, unlisted) for name in names)
    return sorted(path.relative_to(folder).as_posix() for path in found if path.is_file())


def no_files(folder: ReadablePath) -> list[str]:
    """What lies below a folder as if it were a file, and is a pipe, a socket or a device, which nobody reads."""
    if not isinstance(folder, Path):
        return []
    found = (parent / name for parent, names in walk(folder) for name in names)
    odd = (path for path in found if not (stat.S_ISREG(mode := path.lstat().st_mode) or stat.S_ISLNK(mode)))
    return sorted(path.relative_to(folder).as_posix() for path in odd)


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
SURROGATE = re.compile(r"[\ud800-\udfff]")
"""Half a character, of which no text consists."""
MAX_PART, MAX_PARTS = 255, 64
"""Bytes of one part of a path, which is what file systems take, and parts."""


def lies_in(folder: ReadablePath, mark: str) -> bool:
    """Whether a folder has what a pattern, or a name, says; under the name of a file (``optimizer.pt``) a folder is none."""
    found = folder.glob(mark) if "*" in mark else (folder / mark,)
    return any(path.is_file() if PurePath(path.name).suffix else path.exists() for path in found)


def canonical(name: str, where: object, what: str = "file", *, parts: int = MAX_PARTS) -> str:
    """A text that comes out of a checkpoint, where it is a canonical relative path: no such text becomes a path otherwise.

    Canonical, so that two names are two files, and what is written under a name is found under it.

    Args:
        name: The text: a file of a manifest or an index, a tensor's name that becomes a folder's, a tag.
        where: The folder or file that has it, for the message.
        what: What it is the name of, for the message.
        parts: How many parts it may have.

    Raises:
        Untrusted: It is empty or absolute; has an empty part, ``.``, ``..``, a backslash, a control character, or half a character; or
            has a part of more than 255 bytes, or too many parts.
    """
    why = _not_canonical(name, parts)
    if why:
        raise Untrusted(
            f"{where}: the checkpoint names the {what} {shown(name)}, which is not a plain path inside its folder: {why}\n"
            "Such a name can reach foreign files, or become another one: nothing is read or written under it."
        )
    return name


def _not_canonical(name: str, most: int) -> str:
    """Why a text is not a canonical path; nothing where it is."""
    parts = name.split("/")
    if not name or "" in parts:
        return "it begins or ends with a slash" if name.strip("/") and "//" not in name else "a part of it is empty"
    if "." in parts or ".." in parts:
        return "it has a part that is . or .."
    if "\\" in name or _CONTROL.search(name):
        return "it has a backslash or a control character"
    if SURROGATE.search(name):
        return "it has half a character, which no file system takes"
    if len(parts) > most:
        return f"it has {len(parts)} parts, and at most {most} are taken"
    if max(len(part.encode()) for part in parts) > MAX_PART:
        return f"a part of it has more than {MAX_PART} bytes"
    return ""


def beneath(root: _Path, name: str, what: str = "file", *, parts: int = MAX_PARTS) -> _Path:
    """The path of what a checkpoint names, inside its folder; where links lead is asked when it is opened (:mod:`.links`).

    Args:
        root: The checkpoint's folder.
        name: Path relative to it.
        what, parts: See :func:`canonical`.

    Raises:
        Untrusted: See :func:`canonical`.
    """
    return root / canonical(name, root, what, parts=parts)


def storage_error(error: OSError, path: ReadablePath, doing: str, detail: str = "") -> StorageError:
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


def says_nothing(error: BaseException) -> bool:
    """Whether an error leaves it open what is there: a failing disk, another user's folder, a server that does not answer."""
    return isinstance(error, Unreadable) or (isinstance(error, OSError) and error.errno not in _CONTRADICTING)


def cannot_open(error: OSError, path: ReadablePath) -> StorageError | NotACheckpoint:
    """The error for a file that should be read: missing is one thing, unreadable another."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return NotACheckpoint(f"{path}: there is no such file.")
    if isinstance(error, IsADirectoryError):
        return NotACheckpoint(f"{path}: is a folder, but a file was expected.")
    refused = storage_error(error, path, "read")
    return Unreadable(str(refused)) if says_nothing(error) else refused


def human(nbytes: int) -> str:
    """A byte count for people: ``3.2 GB``."""
    value = float(nbytes)
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{nbytes} bytes" if unit == "bytes" else f"{value:.1f} {unit}"


def parse_size(text: str) -> int:
    """Bytes from ``2GB`` (decimal), ``2GiB`` or ``2G`` (binary), ``500000`` (bytes).

    Raises:
        ValueError: It is none of these.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"should be a size such as 2GB, 512MiB or 500000000, found {text!r}")
    number, power, binary, unit = match.groups()
    base = 1000 if unit and power and not binary else 1024
    return int(float(number) * base ** _POWERS[power.upper()])


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all bytes where a file stands; see :func:`pwrite_all`."""
    view = memoryview(data)
    while len(view):
        view = view[os.write(fd, view) :]


def pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all bytes at an offset; the system may take them in parts.

    Raises:
        OSError: It refuses.
    """
    while len(data):
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count
