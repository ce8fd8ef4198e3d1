"""Memory of a host that all processes of a run share, of whatever world: no more of it is held than they may take together.

Each process has a file of its own, in a folder in memory that all of the host see, and keeps it locked while it lives: what a killed one
held is free as soon as the kernel lets its lock go, which is after its memory. What it copies and holds stands in the file's name, since
a rename needs no space and is never half done. Nobody is asked, and nothing runs besides: who takes memory looks at all the others,
alone. A share follows from what everybody copies, so that worlds which save at once have room at once; what others hold already counts,
so that the sum never passes the limit; and everybody's least is left to him, so that a save which waits for another one's rank ends.
What runs left that were killed, the next one of the same user takes away, whatever it saves into.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from ..errors import CheckpointError, StorageError, log_of
from .beneath import Beneath, new_folder, open_there_to_lock, open_to_lock, remove_empty
from .paths import human, storage_error
from .waiting import waiting_for

_log = log_of("mcore_rlhf.storage")

LEAST = 8 << 20
"""So many bytes are left to each process that is there, whatever the others take."""
_IN_MEMORY = Path("/dev/shm")
_ALONE = "alone"
_NAME = "mcore_rlhf-{uid}-{root}"
_UNKNOWN = -1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.25


@dataclass(frozen=True, slots=True)
class _Member:
    """What a process says of itself: number, a name that no other has, its limit, what it copies at a save, and what it holds."""

    pid: int
    token: str
    limit: int
    needed: int = _UNKNOWN
    held: int = 0

    @classmethod
    def of(cls, name: str) -> _Member | None:
        with suppress(ValueError):
            pid, token, limit, needed, held = name.split(".")
            return cls(int(pid), token, int(limit), int(needed), int(held))
        return None

    @property
    def name(self) -> str:
        return f"{self.pid}.{self.token}.{self.limit}.{self.needed}.{self.held}"

    @property
    def taken(self) -> int:
        return max(self.held, LEAST)

    def __str__(self) -> str:
        return f"process {self.pid} ({human(self.held)})"


class HostPool:
    """A process' place among those of a run on this host.

    Args:
        run: The folder that the run saves in, by which its processes find each other.
        limit: Bytes that they may take together; the smallest counts that one of them says.
        timeout: Seconds to wait for memory that others hold.

    Raises:
        StorageError: There is no folder where it can be said.
    """

    def __init__(self, run: Path, limit: int, timeout: float) -> None:
        above = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
        root = sha256(os.path.realpath(run).encode()).hexdigest()[:16]
        self._folder = above / _NAME.format(uid=os.geteuid(), root=root)
        self._timeout, self._said = timeout, False
        self._me = _Member(os.getpid(), os.urandom(8).hex(), limit)
        self._fd = -1
        with self._alone() as folder:
            self._say(folder, self._me)
        for left in above.glob(_NAME.format(uid=os.geteuid(), root="*")):
            with suppress(OSError):  # another user's, or somebody else takes it away
                _remove_abandoned(left)
        os.register_at_fork(after_in_child=_letting_go(self))

    @property
    def held(self) -> int:
        """What this process has taken."""
        return self._me.held

    def say(self, needed: int) -> None:
        """Tell the others how much this process copies at a save; what each may take follows from that.

        Raises:
            StorageError: It cannot be said.
        """
        if needed != self._me.needed:
            with self._alone() as folder:
                self._say(folder, replace(self._me, needed=needed))

    def take(self, wanted: int, let_go: Callable[[], None] = lambda: None) -> int:
        """Take memory, in place of what was taken before; waits where others hold what is left to this one.

        Args:
            wanted: Bytes.
            let_go: Called where that is less than what is held: before others may have it.

        Returns:
            How much may be used: at least the smaller of what is wanted and :data:`LEAST`.

        Raises:
            StorageError: Others have held all of it for too long; they are named.
        """
        end, pause = time.monotonic() + self._timeout, _FIRST_PAUSE_S
        with waiting_for(f"memory of this host that other processes of the run hold: {self._folder}"):
            while True:
                with self._alone() as folder:
                    others = _living(folder, besides=self._me)
                    if (granted := self._granted(wanted, others)) is not None:
                        room, hold = granted
                        if hold < self._me.held:
                            let_go()
                        self._say(folder, replace(self._me, held=hold))
                        return room
                if time.monotonic() > end:
                    self._refuse(others)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def give_back(self) -> None:
        """Others may have all that was taken: it has been freed."""
        if self._me.held:
            with self._alone() as folder:
                self._say(folder, replace(self._me, held=0))

    def close(self) -> None:
        """Leave; who is the last takes the folder away."""
        if self._fd < 0:
            return
        with (
            suppress(CheckpointError),
            self._alone() as folder,
        ):  # a file that stays is locked no longer: that is enough
            self._let_go()
            folder.remove(self._me.name)
            _remove_unused(folder)
        self._let_go()

    def _let_go(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _granted(self, wanted: int, others: Sequence[_Member]) -> tuple[int, int] | None:
        """How much may be used, and how much is held from then on; None where others have to give some back first."""
        everybody = [self._me, *others]
        limit = min(one.limit for one in everybody)
        known = [one.needed for one in everybody if one.needed != _UNKNOWN]
        together = sum(known) * len(everybody) // max(1, len(known))  # of whom nothing is known, the mean
        share = max(LEAST, limit * max(0, self._me.needed) // max(1, together))
        free = limit - sum(one.taken for one in others)
        if limit < LEAST * len(everybody):
            self._warn(limit, len(everybody))
            return min(wanted, LEAST), max(min(wanted, LEAST), min(self._me.held, LEAST))
        may_stay = self._me.held <= min(free, share + share // 8)  # it is made anew for what is worth it only
        kept = self._me.held if may_stay else 0
        room = min(wanted, max(share, kept), free)
        return (room, max(room, kept)) if room >= min(wanted, LEAST) else None

    def _warn(self, limit: int, members: int) -> None:
        if not self._said:
            self._said = True
            text = "max_host_memory: %s are less than %s for each of the %d processes that save on this host; each takes that"
            _log.warning(text, human(limit), human(LEAST), members)

    def _refuse(self, others: Sequence[_Member]) -> None:
        held = ", ".join(str(one) for one in others if one.held > LEAST) or "none"
        raise StorageError(
            f"max_host_memory: of {human(min(one.limit for one in (self._me, *others)))} on this host nothing has been free for "
            f"{self._timeout:g} s: expected {human(LEAST)}, held by {held}\n"
            "Their saves may hang: look at their logs. What a process held that is ended is free at once."
        )

    @contextmanager
    def _alone(self) -> Iterator[Beneath]:
        """While no other process of this host looks, or says anything."""
        end = time.monotonic() + self._timeout
        try:
            while (opened := self._entered()) is None:
                if time.monotonic() > end:
                    raise StorageError(
                        f"{self._folder}: another process of this host has locked {_ALONE} for {self._timeout:g} s\n"
                        "It may have been stopped: end it, or let it go on."
                    )
                time.sleep(_FIRST_PAUSE_S)
            with opened as folder:
                yield folder
        except OSError as error:
            raise storage_error(error, self._folder, "share memory of this host by") from error

    def _entered(self) -> _Alone | None:
        with suppress(FileExistsError):
            new_folder(self._folder)
        return _Alone.of(self._folder)

    def _say(self, folder: Beneath, now: _Member) -> None:
        try:
            folder.move(self._me.name, now.name)
        except FileNotFoundError:  # who cleans up what lies in memory took it, or it was never there
            fd = folder.create(now.name)
            fcntl.flock(fd, fcntl.LOCK_EX)
            self._let_go()
            self._fd = fd
        self._me = now


@dataclass(slots=True)
class _Alone:
    """A folder in which no other process of this host looks, or says anything.

    Args:
        folder: It.
        fd: The file in it that is locked.
    """

    folder: Beneath
    fd: int

    @classmethod
    def of(cls, path: Path) -> _Alone | None:
        """None where another process has it, or has just taken the folder away.

        Raises:
            OSError: It is no folder of this user's.
        """
        with suppress(FileNotFoundError), ExitStack() as undone:
            with Beneath(path, own=True):
                fd = open_to_lock(path / _ALONE)
            undone.callback(os.close, fd)
            if _locked(fd) and os.path.samestat(os.fstat(fd), os.lstat(path / _ALONE)):
                folder = Beneath(path, own=True)  # from now on nobody takes it away, and makes another one of that name
                undone.pop_all()
                return cls(folder, fd)
        return None

    def __enter__(self) -> Beneath:
        return self.folder

    def __exit__(self, *exception: object) -> None:
        self.folder.close()
        fcntl.flock(self.fd, fcntl.LOCK_UN)  # a process that was forked meanwhile has it open as well
        os.close(self.fd)


def _living(folder: Beneath, besides: _Member | None = None) -> list[_Member]:
    """Who is there, and lives; what dead ones left is removed."""
    found = []
    for name in os.listdir(folder.root):
        one = _Member.of(name)
        if one is None or (besides is not None and one.token == besides.token):
            continue
        fd = open_there_to_lock(folder.root / name)
        try:
            alive = not _locked(fd)
        finally:
            os.close(fd)
        if alive:
            found.append(one)
        else:
            folder.remove(name)
    return found


def _remove_unused(folder: Beneath) -> None:
    """Take a folder away in which nobody is any more; in :class:`_Alone`."""
    if not _living(folder):
        folder.remove(_ALONE)
        remove_empty(folder.root)


def _remove_abandoned(path: Path) -> None:
    if (opened := _Alone.of(path)) is not None:
        with opened as folder:
            _remove_unused(folder)


def _locked(fd: int) -> bool:
    """Whether a file was free, and is locked now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _letting_go(pool: HostPool) -> Callable[[], None]:
    """A data loader's worker that outlives a killed trainer holds none of its memory."""
    held = weakref.ref(pool)

    def let_go() -> None:
        if (pool := held()) is not None:
            pool._let_go()

    return let_go
