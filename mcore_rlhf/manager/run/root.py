"""The folder of all steps: seen by every rank, written by one run at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, NoReturn

from mcore_rlhf.errors import CheckpointError, StorageError
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.beneath import make_folder, open_to_lock, remove, write_new
from mcore_rlhf.storage.manifest import utc_time
from mcore_rlhf.storage.paths import storage_error
from mcore_rlhf.storage.patience import names_in, patiently

from .commit import WORD
from .retention import clean_up

if TYPE_CHECKING:  # who watches a root takes it without ranks, and without torch
    from .world import World

LOCK = ".mcore_rlhf.lock"
_PROBE = ".probe-"
_OURS = re.compile(rf"{re.escape(_PROBE)}[0-9a-f]{{16}}(-\d+)?|\..+\.tmp-[0-9a-f]{{16,}}|{re.escape(WORD)}.+")
"""Small files that are there for a moment only: probes, text that is about to be renamed, and words of saves that were given up."""
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})
_PATIENCE_S = 10.0
"""A network file system may show a new file to other hosts only after a while."""


class RootLock:
    """Says that a run writes into a root; let go when the process dies, in whatever way.

    Where the file system has no locks, what the file says is all there is. A run that is known to live keeps others out. One of
    another host may have died: the next run takes the root, says so, and the first one stops at its next save, if it lives.

    Args:
        root: The folder of all steps.

    Attributes:
        doubt: What is not known; empty where the file system has locks.

    Raises:
        StorageError: Another run has it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._fd, self._about, self.doubt, self._ended = -1, b"", "", False
        self._take()
        os.register_at_fork(after_in_child=_letting_go(self))

    def hold(self) -> None:
        """Take it again where the file is gone, which others would make anew: somebody removed the root under this run.

        Raises:
            StorageError: Another run has it meanwhile, or the root cannot be made; or it was released: a save that hung comes late.
        """
        path = self._root / LOCK
        if self._fd >= 0 and self._is_at(path):
            return self._refuse_who_came_later()
        self._let_go()
        self._refuse_if_ended()
        try:
            make_folder(self._root)
        except OSError as error:
            raise storage_error(error, self._root, "create") from error
        self._take()
        return self._refuse_if_ended()

    def _refuse_if_ended(self) -> None:
        """Whoever releases it meanwhile sees what was taken, or is seen here."""
        if self._ended:
            self._let_go()
            raise StorageError(f"{self._root}: whoever saved here is closed, and saves nothing more")

    def _is_at(self, path: Path) -> bool:
        """Whether the file that is held lies there.

        Raises:
            StorageError: Nobody can say.
        """
        try:
            return patiently(lambda: os.path.samestat(os.fstat(self._fd), os.lstat(path)))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise storage_error(error, path, "see") from error

    def _take(self) -> None:
        path = self._root / LOCK
        try:
            self._fd = open_to_lock(path)
        except OSError as error:
            detail = "a symbolic link, which is not followed: remove it" if error.errno == errno.ELOOP else ""
            raise storage_error(error, path, "open", detail) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._refuse(_owner(self._fd))
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self._let_go()
                raise storage_error(error, path, "lock") from error
            self._look_around()
        self._about = _about_me()
        with suppress(OSError):  # on a full disk it does not say who it is, and still holds
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, self._about, 0)

    def _refuse(self, owner: str) -> NoReturn:
        fd, self._fd = self._fd, -1
        os.close(fd)
        raise StorageError(
            f"{self._root}: another run saves here: {owner}\n"
            "Give this run another output_dir or experiment_name, or end the other one."
        )

    def _look_around(self) -> None:
        """Without locks: refuse a run that is known to live, and say what cannot be known."""
        owner, alive = _owner(self._fd), _lives(self._fd)
        if alive:
            self._refuse(owner)
        self.doubt = (
            f"{self._root}: this file system has no locks (flock), so nothing keeps two runs apart that save here"
        )
        if alive is None:
            self.doubt += f"; {owner} did, and nobody knows whether it still lives: it stops at its next save now"

    def _refuse_who_came_later(self) -> None:
        if self.doubt and self._about and (found := _content(self._root / LOCK)) and found != self._about:
            self._refuse(_named(found))

    def release(self) -> None:
        """Let go for good. The file stays: removing it would let two others hold one each."""
        self._ended = True
        self._let_go()

    def _let_go(self) -> None:
        fd, self._fd = self._fd, -1  # before it is closed: that may fail, and then the number is another's
        if fd >= 0:
            with suppress(OSError):
                if self.doubt and _content(self._root / LOCK) == self._about:
                    os.ftruncate(fd, 0)
            with suppress(OSError):
                os.close(fd)


def _letting_go(lock: RootLock) -> Callable[[], None]:
    """A data loader's worker that outlives a killed trainer must not keep the next run out."""
    held = weakref.ref(lock)

    def let_go() -> None:
        if (lock := held()) is not None:
            lock.release()

    return let_go


def _about_me() -> bytes:
    pid = os.getpid()
    return json.dumps(
        {"host": socket.gethostname(), "pid": pid, "since": utc_time(), "started": _started(pid)}
    ).encode()


def _started(pid: int) -> int | None:
    """When a process of this host began, in ticks since the machine did; None where there is none, or nobody can say."""
    with suppress(
        OSError, ValueError, IndexError
    ):  # ``man 5 proc_pid_stat``: the 22nd field; the second may have spaces in it
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None


def _lives(fd: int) -> bool | None:
    """Whether the run that a lock file names lives; None where nobody can say, since it is another host's."""
    about = _parsed(_read_all(fd))
    if not about:
        return False
    if about["host"] != socket.gethostname():
        return None
    started = _started(about["pid"])
    return started is not None and started == about.get("started", started)


def remove_unguarded(root: Path) -> list[str]:
    """Remove what dead runs left without a lock file; only for the holder of the :class:`RootLock`.

    That are probes, half-written text and lock files, and half-written steps whose rename the disk lost although it had said
    that it was done.

    Returns:
        What was done, one line each.
    """
    done = remove_small(root) + _removed(_stillborn_locks(root))
    return done + _removed(_unguarded_steps(root))  # those of the locks as well


def remove_small(root: Path) -> list[str]:
    """Remove small files that were to be there for a moment; see :func:`remove_unguarded`."""
    return _removed(root / name for name in names_in(root) if _OURS.fullmatch(name))


def remove_rest(root: Path) -> list[str]:
    """Remove what this run could not remove when it was given up or deleted, since the disk failed; only for the holder of the lock.

    What hangs holds its lock, and is left alone.

    Returns:
        What was done, one line each.
    """
    with suppress(OSError, CheckpointError):  # the disk fails once more: what is to be deleted goes all the same
        return [*clean_up(root), *_removed(_unguarded_steps(root))]
    return []


def _removed(paths: Iterable[Path]) -> list[str]:
    done = []
    for path in sorted(paths):
        try:
            remove(path)
            done.append(f"removed {path}: it was left behind")
        except OSError as error:
            done.append(f"could not remove {path}: {error}")
    return done


def _unguarded_steps(root: Path) -> list[Path]:
    """Folders of transactions whose lock, made first and removed last, is not there."""
    found = root.glob(".global_step_*.partial-*")
    return [path for path in found if not path.with_name(path.name.replace(".partial-", ".lock-", 1)).exists()]


def _owner(fd: int) -> str:
    return _named(_read_all(fd))


def _named(content: bytes) -> str:
    about = _parsed(content)
    return (
        f"process {about['pid']} on {about['host']}, since {about.get('since')}"
        if about
        else "a process that did not say who it is"
    )


def _read_all(fd: int) -> bytes:
    try:
        return os.pread(fd, 4096, 0)
    except OSError:
        return b""


def _content(path: Path) -> bytes:
    """Opened anew: some network file systems show only then what another host has written."""
    with suppress(OSError):
        return reading.read_bytes(path, reading.MAX_LINE)
    return b""


def _parsed(content: bytes) -> dict[str, Any]:
    """What a lock file says of a process; nothing where it says none."""
    with suppress(ValueError, TypeError, KeyError):
        about = reading.parse_json(content)
        return {**about, "pid": int(about["pid"]), "host": str(about["host"])}
    return {}


def _stillborn_locks(root: Path) -> list[Path]:
    """Locks of processes that died while they wrote the host's name into them, or whose words a power failure took."""
    host = socket.gethostname().encode()
    found = []
    for path in root.glob(".global_step_*.lock-*"):
        with suppress(OSError):
            text = reading.read_bytes(path, reading.MAX_LINE).strip(b"\0")
            if text != host and host.startswith(text):
                found.append(path)
    return found


def open_root(root: Path, world: World) -> list[str]:
    """Make the root, and see that every rank sees it and may write there. Collective.

    Returns:
        The host of every rank.

    Raises:
        StorageError: Not so; the ranks and hosts are named. Raised on every rank.
    """
    name = world.broadcast(f"{_PROBE}{token_hex(8)}")
    error: CheckpointError | None = None
    if world.is_rank0:
        error = _caught(lambda: _touch(root, name))
    world.raise_on_all(error, f"writing into {root}")
    seen = False
    try:
        seen = _appears(root / name)
        error = _caught(lambda: _touch(root, f"{name}-{world.rank}")) if seen else None
    except StorageError as failed:
        error = failed
    answers = world.all_gather((seen, world.host))
    for path in [root / f"{name}-{world.rank}", *([root / name] if world.is_rank0 else [])]:
        with suppress(OSError):  # it may not be there, or on another disk
            remove(path)
    world.raise_on_all(error, f"writing into {root}")
    blind = [f"rank {rank} on {host}" for rank, (sees, host) in enumerate(answers) if not sees]
    if blind:
        raise StorageError(
            f"{root}: written by rank 0 on {answers[0][1]}, and not seen by {', '.join(blind)}\n"
            "All ranks must share one file system for checkpoints: choose an output_dir on it."
        )
    return [host for _, host in answers]


def _touch(root: Path, name: str) -> None:
    try:
        make_folder(root)
        write_new(root / name, b"")
    except OSError as error:
        raise storage_error(error, root / name, "write") from error


def _caught(action: Callable[[], None]) -> CheckpointError | None:
    try:
        action()
    except CheckpointError as error:
        return error
    return None


def _appears(path: Path) -> bool:
    """Whether a file is seen, at last.

    Raises:
        StorageError: Nobody can say.
    """
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            os.stat(path)
            return True
        except OSError as error:
            if time.monotonic() > end:
                if not isinstance(error, FileNotFoundError):
                    raise storage_error(error, path, "see") from error
                return False
        time.sleep(0.05)
