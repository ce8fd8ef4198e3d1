"""The folder of all steps: seen by every rank, written by one run at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from mcore_rlhf.errors import CheckpointError, StorageError
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.beneath import make_folder, open_to_lock, remove, write_new
from mcore_rlhf.storage.paths import storage_error
from mcore_rlhf.storage.transactions import new_transaction

from .world import World

LOCK = ".mcore_rlhf.lock"
_PROBE = ".probe-"
_OURS = (f"{_PROBE}*", ".*.tmp-*")
"""Small files that are there for a moment only: probes, and text that is about to be renamed."""
_PATIENCE_S = 10.0
"""A network file system may show a new file to other hosts only after a while."""


class RootLock:
    """Says that a run writes into a root; let go when the process dies, in whatever way.

    Args:
        root: The folder of all steps.

    Raises:
        StorageError: Another run has it.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._fd = -1
        self._take()
        os.register_at_fork(after_in_child=_letting_go(self))

    def hold(self) -> None:
        """Take it again where the file is gone, which others would make anew: somebody removed the root under this run.

        Raises:
            StorageError: Another run has it meanwhile, or the root cannot be made.
        """
        path = self._root / LOCK
        with suppress(FileNotFoundError):
            if self._fd >= 0 and os.path.samestat(os.fstat(self._fd), os.lstat(path)):
                return
        self.release()
        try:
            make_folder(self._root)
        except OSError as error:
            raise storage_error(error, self._root, "create") from error
        self._take()

    def _take(self) -> None:
        root, path = self._root, self._root / LOCK
        try:
            self._fd = open_to_lock(path)
        except OSError as error:
            detail = "a symbolic link, which is not followed: remove it" if error.errno == errno.ELOOP else ""
            raise storage_error(error, path, "open", detail) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(self._fd)
            self.release()
            raise StorageError(
                f"{root}: another run saves here: {owner}\n"
                "Give this run another output_dir or experiment_name, or end the other one."
            ) from None
        except OSError:
            pass  # no locks on this file system
        with suppress(OSError):  # on a full disk it does not say who it is, and still holds
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, _about_me(), 0)

    def release(self) -> None:
        """Let go. The file stays: removing it would let two others hold one each."""
        fd, self._fd = self._fd, -1  # before it is closed: that may fail, and then the number is another's
        if fd >= 0:
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
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": now}).encode()


def remove_unguarded(root: Path) -> list[str]:
    """Remove what dead runs left without a lock file; only for the holder of the :class:`RootLock`.

    That are probes, half-written text and lock files, and half-written steps whose rename the disk lost although it had said
    that it was done.

    Returns:
        What was done, one line each.
    """
    small = [path for pattern in _OURS for path in root.glob(pattern)]
    done = _removed([*small, *_stillborn_locks(root)])
    return done + _removed(_unguarded_steps(root))  # those of the locks as well


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
    try:
        about = json.loads(os.pread(fd, 4096, 0))
        return f"process {about['pid']} on {about['host']}, since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "a process that did not say who it is"


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
    name = world.broadcast(f"{_PROBE}{new_transaction()}")
    error: CheckpointError | None = None
    if world.is_rank0:
        error = _caught(lambda: _touch(root, name))
    world.raise_on_all(error, f"writing into {root}")
    seen = _appears(root / name)
    error = _caught(lambda: _touch(root, f"{name}-{world.rank}")) if seen else None
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
    end = time.monotonic() + _PATIENCE_S
    while not os.path.exists(path):  # False also where it cannot be looked at
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
