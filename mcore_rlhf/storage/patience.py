"""What an I/O error says of what could not be read: nothing. So it is asked again, and never taken for damage."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ..errors import NotACheckpoint
from .beneath import remove, write_new
from .paths import ReadablePath, cannot_open, says_nothing

T = TypeVar("T")

_PAUSES = (0.05, 0.2, 0.5)
_PASSING = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EREMOTEIO})
_GAPS = (0.005, 0.02, 0.05)
_LOOKS = 10
_UNKNOWN = (0, 0)


def age_s(path: Path) -> float:
    """For how long a file has been as it is, by the clock of its file system alone: that of this host may be another, or jump.

    Args:
        path: It; a file is made beside it for a moment.

    Raises:
        OSError: Nobody can say.
    """
    beside = path.with_name(f".probe-{os.urandom(8).hex()}")
    write_new(beside, b"")
    try:
        return beside.lstat().st_mtime - path.lstat().st_mtime
    finally:
        remove(beside)


def patiently(action: Callable[[], T]) -> T:
    """Do something that only reads, and do it again, after short pauses, where the disk or the network file system failed.

    Raises:
        OSError: It fails for good.
    """
    for pause in _PAUSES:
        try:
            return action()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
        time.sleep(pause)
    return action()


def read_patiently(path: ReadablePath, action: Callable[[], T]) -> T:
    """See :func:`patiently`; what fails for good is an error that names the file.

    Args:
        path: What is read, for an error that names no file.
        action: Only reads.

    Raises:
        CheckpointError: The file system does not let it be read.
    """
    try:
        return patiently(action)
    except OSError as error:
        named = isinstance(error.filename, str | bytes)
        raise cannot_open(error, Path(os.fsdecode(error.filename)) if named else path) from error


def is_there(path: ReadablePath) -> bool:
    """Whether something lies there, be it a link that leads nowhere.

    Raises:
        OSError: Nobody can say.
    """
    if not isinstance(path, Path):
        return path.is_file()
    try:
        patiently(lambda: os.lstat(path))
    except FileNotFoundError:
        return False
    return True


def may_be_folder(path: ReadablePath) -> bool:
    """Whether a folder lies there, or what nobody can look at, which does not hide what lies beside it."""
    try:
        return patiently(path.is_dir) if isinstance(path, Path) else path.is_dir()
    except OSError:
        return True


def names_in(folder: ReadablePath) -> list[str]:
    """What lies in a folder, in any order.

    Raises:
        OSError: It cannot be listed.
    """
    return (
        patiently(lambda: os.listdir(folder)) if isinstance(folder, Path) else [path.name for path in folder.iterdir()]
    )


def identity(path: ReadablePath) -> tuple[int, int] | None:
    """What tells a folder from another that has its name later; None where there is none.

    Of a store's folder, and of one that cannot be asked, no more is known than that nothing says it is another.
    """
    if not isinstance(path, Path):
        return _UNKNOWN
    try:
        found = patiently(lambda: os.stat(path))
    except OSError as error:
        return _UNKNOWN if says_nothing(error) else None
    return found.st_dev, found.st_ino


def is_still(path: ReadablePath, before: tuple[int, int] | None) -> bool:
    """Whether a folder is the one that it was, as far as can be told."""
    now = identity(path)
    return now == before or (now is not None and _UNKNOWN in (now, before))


def _identity_at_last(path: ReadablePath) -> tuple[int, int] | None:
    """See :func:`identity`; of a folder that is being replaced, which for milliseconds is not there, that of the new one."""
    for pause in _GAPS:
        if (found := identity(path)) is not None:
            return found
        time.sleep(pause)
    return identity(path)


def settled(path: ReadablePath, action: Callable[[], T], doubted: Callable[[T], bool]) -> T | None:
    """Look at a folder, and look again where it was removed, or put in place of another, meanwhile.

    Args:
        path: The folder.
        action: Looks.
        doubted: Whether what it found may come of that; what it raised, always.

    Returns:
        What was found; None where the folder is gone.
    """
    for left in reversed(range(_LOOKS)):
        before = _identity_at_last(path)
        if before is None:
            return None
        try:
            found = action()
            if not left or not doubted(found) or is_still(path, before):
                return found
        except Exception:
            if not left or is_still(path, before):
                raise
    return None


def looked(path: ReadablePath, action: Callable[[], T], doubted: Callable[[T], bool]) -> T:
    """See :func:`settled`; of what somebody named: where it never was, the action says so.

    Raises:
        NotACheckpoint: It was removed while it was read.
    """
    if _identity_at_last(path) is None:
        return action()
    found = settled(path, action, doubted)
    if found is None:
        raise NotACheckpoint(
            f"{path}: was deleted while it was read\n"
            "Nothing is known to have been wrong with it: a run deletes old steps by its rules on what to keep."
        )
    return found
