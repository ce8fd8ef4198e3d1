"""Records that many threads add and one thread puts on the disk, in groups: one write and one fsync for all that came meanwhile.

Each process has files of its own, which nobody else writes: a crash of one tears nothing of another's. A file whose fsync failed is not
written any more, as the kernel may have dropped its pages and says so only once (Rebello et al., "Can applications recover from fsync
failures?", USENIX ATC 2020): what it did not confirm is written again, into a new one. A reader therefore meets some records twice.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from ..errors import StorageError, UsageError, headline, log_of
from . import threads
from .beneath import Beneath, remove
from .framed import MAX_PAYLOAD, OVERHEAD, frame_head
from .paths import human, storage_error, write_all
from .publish import sync_folder
from .waiting import waiting_for

_log = log_of(__name__)

SUFFIX = ".seg"
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,99}")
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 5.0
_FOR_EVER = 1 << 62
_LARGE_NBYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Pace:
    """When records are written, and how much is held.

    Args:
        write_s: Seconds until a record is in the system's hands, which a kill of the process does not undo.
        sync_s: Seconds until a group is made safe from a power failure, by an fsync.
        group_nbytes: A group of so many bytes does not wait.
        segment_nbytes: A file of so many bytes is closed, and a new one begun: only closed ones, and those of the dead, are ever removed.
        segment_s: One that was begun so many seconds ago, too.
        most_waiting: Bytes that are held while the disk does not take them.
        patience_s: How long ``add`` waits where that is reached, before it goes on without the record.
    """

    write_s: float = 0.05
    sync_s: float = 1.0
    group_nbytes: int = 8 << 20
    segment_nbytes: int = 64 << 20
    segment_s: float = 600.0
    most_waiting: int = 256 << 20
    patience_s: float = 10.0

    def __post_init__(self) -> None:
        bad = [name for name in self.__dataclass_fields__ if not getattr(self, name) >= 0]
        if bad or not self.group_nbytes or not self.segment_nbytes or not self.most_waiting:
            raise UsageError(f"Pace: {', '.join(bad) or 'bytes'}: expected a number above 0")


@dataclass(slots=True)
class AppendCounts:
    """What has become of records.

    Args:
        added: Given.
        safe: On the disk.
        dropped: Not written, as the disk took none and too much was waiting.
    """

    added: int = 0
    safe: int = 0
    dropped: int = 0


@dataclass(eq=False)
class AppendLog:
    """Adds records to files of this process. For several threads; a forked child begins files of its own.

    Args:
        folder: Where the files are; it is there.
        owner: What their names begin with: letters, digits, ``_``, ``.``, ``@``, ``-``. Two of one name do not meet.
        header: The first record of each file.
        pace: See :class:`Pace`.
        on_error: ``continue``: a disk that does not take records is said, and tried again; ``raise``: ``add`` raises it as well.
        on_problem: Hears, in the thread that writes, what is wrong; None once it is well again.

    Raises:
        UsageError: The owner cannot be the name of a file.
    """

    folder: Path
    owner: str
    header: bytes
    pace: Pace = field(default_factory=Pace)
    on_error: Literal["continue", "raise"] = "continue"
    on_problem: Callable[[StorageError | None], None] = lambda problem: None
    counts: AppendCounts = field(default_factory=AppendCounts)
    problem: StorageError | None = None
    _closing: bool = False
    _turn: threading.Condition = field(init=False, repr=False)
    _thread: threading.Thread | None = None
    _fresh: list[bytes] = field(default_factory=list, repr=False)
    _group: list[bytes] = field(default_factory=list, repr=False)
    _waiting: int = 0
    _urgent: int = 0
    _segment: _Segment | None = None
    _since: float = 0.0
    _retry_s: float = 0.0

    def __post_init__(self) -> None:
        if not _OWNER.fullmatch(self.owner):
            raise UsageError(
                f"producer {self.owner!r:.120}: expected a name of letters, digits, _, ., @ and -, such as rollout-worker-3"
            )
        if self.on_error not in ("continue", "raise"):
            raise UsageError(f"on_error: expected 'continue' or 'raise', found {self.on_error!r}")
        self._turn = threading.Condition()
        os.register_at_fork(after_in_child=partial(_begin_anew, weakref.ref(self)))
        self._at_exit = partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def add(self, record: bytes) -> bool:
        """Add a record; it is on the disk within :class:`Pace`'s seconds. Waits only where too much is waiting already.

        Args:
            record: It; not empty.

        Returns:
            Whether it will be written; False where the disk takes nothing and too much is waiting.

        Raises:
            UsageError: It is empty or too large, or the log is closed.
            StorageError: With ``on_error="raise"``, the disk does not take records.
        """
        if not 0 < len(record) <= MAX_PAYLOAD:
            raise UsageError(f"a record of {len(record):,} bytes: expected 1 to {MAX_PAYLOAD:,}")
        with self._turn:
            if self._closing:
                raise UsageError(f"{self.folder}: this writer is closed")
            self._begin()
            has_room = self._waiting + len(record) <= self.pace.most_waiting or self._has_room(len(record))
            if self.problem is not None and self.on_error == "raise":
                raise self.problem
            self.counts.added += 1
            if not has_room:
                self.counts.dropped += 1
                return False
            was = bool(self._fresh)
            self._fresh.append(record)
            self._waiting += len(record)
            if not was or self._waiting >= self.pace.group_nbytes:
                self._turn.notify_all()
            return True

    def _begin(self) -> None:
        """Have a thread that writes; where the system gives none, what is added waits until it does."""
        if self._thread is not None:
            return
        try:
            self._thread = threads.begin("mcore_rlhf journal", self._run)
        except StorageError as error:
            first, self.problem = self.problem is None, error
            if first:
                self._say(error)
        else:
            self.problem = None

    def _has_room(self, nbytes: int) -> bool:
        """Wait until there is room for a record, for a while; not where the disk is known to take none."""

        def fits() -> bool:
            return self.problem is not None or not self._waiting or self._waiting + nbytes <= self.pace.most_waiting

        self._turn.wait_for(fits, self.pace.patience_s)
        if not self._waiting or self._waiting + nbytes <= self.pace.most_waiting:
            return True
        if self.problem is None:  # a disk that hangs; from now on nobody waits for it
            text = (
                f"{self.folder}: the disk has not taken {human(self._waiting)} of records for {self._waited_s():.0f} s"
            )
            self.problem = StorageError(f"{text}\nFree space, or look at the file system; it is tried again.")
            self._say(self.problem)
        return False

    def _waited_s(self) -> float:
        return time.monotonic() - self._since

    def flush(self, seconds: float | None = None) -> None:
        """Wait until all that was added is safe.

        Args:
            seconds: At most so long.

        Raises:
            StorageError: The disk refused, or did not answer in time.
        """
        with self._turn:
            wanted = self.counts.added
            if self._fresh:
                self._begin()
            before = self.problem if self._retry_s else None  # of an earlier try; another one is made now
            self._urgent = wanted
            self._turn.notify_all()
            tried = self._turn.wait_for(lambda: self._done >= wanted or self.problem not in (None, before), seconds)
            if self._done >= wanted:
                return
            if self.problem is not None:
                raise self.problem
            assert not tried
            raise StorageError(f"{self.folder}: the disk has not taken {human(self._waiting)} within {seconds:g} s")

    @property
    def _done(self) -> int:
        return self.counts.safe + self.counts.dropped

    def close(self, seconds: float | None = 60.0) -> None:
        """Make all safe, and close the file, so that it may be removed once nobody needs it.

        Args:
            seconds: How long a disk that does not answer is waited for.

        Raises:
            StorageError: What was added last is not safe; with ``on_error="continue"`` that is only said.
        """
        with self._turn:
            if self._closing:
                return
            self._closing = True
            self.problem, self._retry_s = None, 0.0  # once more
        atexit.unregister(self._at_exit)
        if self._thread is None and not self._fresh:
            return
        try:
            self.flush(seconds)
        except StorageError as error:
            seconds = 1.0
            if self.on_error == "raise":
                raise
            if error is not self.problem:  # which was said
                self._say(error)
        finally:
            with self._turn:
                self._urgent = _FOR_EVER
                self._turn.notify_all()
            if self._thread is not None:
                self._thread.join(seconds)

    def begin_anew(self) -> None:
        """In a forked child: the file, the thread and what waits are the parent's."""
        if self._segment is not None:
            with suppress(OSError):  # the parent was just closing it
                os.close(self._segment.fd)
        self._turn, self._thread, self._segment = threading.Condition(), None, None
        self._fresh, self._group, self._waiting, self.counts = [], [], 0, AppendCounts()
        self._urgent, self._retry_s, self.problem = 0, 0.0, None

    # What follows runs in the thread that writes.

    def _run(self) -> None:
        while True:
            try:
                if not self._wait_for_work():
                    return
                self._take_turn()
            except MemoryError:  # what was added is held, and there may be some memory soon
                time.sleep(_FIRST_RETRY_S)

    def _take_turn(self) -> None:
        with self._turn:
            if not self._group and self._fresh:
                self._since = time.monotonic()
            self._group += self._fresh
            self._fresh.clear()
            urgent = self._urgent > self._done
        due = urgent or self._waited_s() >= self.pace.sync_s or self._waiting >= self.pace.group_nbytes
        with waiting_for(f"the disk of {self.folder}, with rollouts of {self.owner}"):
            self._put_somewhere(due)

    def _wait_for_work(self) -> bool:
        """Wait until something is to be done; whether there will ever be."""
        with self._turn:
            self._turn.wait_for(lambda: bool(self._fresh) or self._closing or self._urgent > self._done, self._idle_s())
            self._turn.wait_for(self._cannot_wait, self._retry_s or self.pace.write_s)
            if self._closing and self._urgent == _FOR_EVER:
                self._leave()
                return False
            return True

    def _idle_s(self) -> float | None:
        if self._group:
            return max(0.0, self.pace.sync_s - self._waited_s())
        return self.pace.segment_s if self._segment is not None and self._segment.number > 1 else None

    def _cannot_wait(self) -> bool:
        return self._urgent > self._done or (self.problem is None and self._waiting >= self.pace.group_nbytes)

    def _put_somewhere(self, sync: bool) -> None:
        """Write; where the file fails, into a new one; where that fails as well, say so."""
        for again in (False, True):
            try:
                self._put(sync or again)
                return
            except (OSError, MemoryError) as found:
                error = found if isinstance(found, OSError) else OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
                segment, self._segment = self._segment, None
                path = self.folder if segment is None else segment.path
                if segment is not None:
                    segment.leave()
                if again:
                    self._failed(error, path)
                elif self.problem is None:
                    _log.warning("%s: %s; it is written again, into a new file", path, error.strerror)

    def _put(self, sync: bool) -> None:
        """Write what was not written yet, and confirm it where that is due."""
        if self._group:
            if self._segment is None:
                self._segment = _Segment.begin(self.folder, self.owner, self.header)
            self._segment.write(self._group)
        if self._segment is None or not (sync or self._is_old(self._segment)):
            return
        ending = self._is_old(self._segment)
        self._segment.sync(ending)
        if ending:
            self._segment.close()
            self._segment = None
        self._confirm(len(self._group))

    def _is_old(self, segment: _Segment) -> bool:
        age = time.monotonic() - segment.begun
        return segment.nbytes >= self.pace.segment_nbytes or (segment.number > 1 and age >= self.pace.segment_s)

    def _confirm(self, many: int) -> None:
        with self._turn:
            self._waiting -= sum(map(len, self._group[:many]))
            del self._group[:many]
            self.counts.safe += many
            self._retry_s, well, self.problem = 0.0, self.problem is not None, None
            self._turn.notify_all()
        if well:
            _log.warning("%s: the disk takes rollouts again", self.folder)
            self._tell(None)

    def _failed(self, error: OSError, path: Path) -> None:
        """Say what is wrong; it is tried again after a while."""
        waited = f"{human(self._waiting)} of rollouts wait for {self._waited_s():.1f} s"
        problem = storage_error(error, path, "write", waited)
        with self._turn:
            self._retry_s = min(2 * self._retry_s or _FIRST_RETRY_S, _LONGEST_RETRY_S)
            self._urgent = _FOR_EVER if self._urgent == _FOR_EVER else 0  # who waits hears of it
            first, self.problem = self.problem is None, problem
            self._turn.notify_all()
        if first:
            self._say(problem)

    def _say(self, problem: StorageError) -> None:
        _log.warning("%s: %s", self.owner, headline(str(problem)))
        self._tell(problem)

    def _tell(self, problem: StorageError | None) -> None:
        try:
            self.on_problem(problem)
        except Exception:  # nobody who only listens ends what writes
            _log.exception("%s: on_problem failed", self.owner)

    def _leave(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None and self._group:  # not confirmed
            segment.leave()
        elif segment is not None:
            try:
                segment.sync(ending=True)
                segment.close()
            except OSError as error:
                segment.leave()
                self._say(storage_error(error, segment.path, "close"))


def _begin_anew(log: Callable[[], AppendLog | None]) -> None:
    if (found := log()) is not None:
        found.begin_anew()


def _close_at_exit(log: Callable[[], AppendLog | None]) -> None:
    if (found := log()) is not None:
        found.close(10.0)


def _lock(fd: int) -> None:
    """Say that a new file is written; where there are no locks, only files that were closed are ever removed.

    Raises:
        BlockingIOError: Somebody is about to remove it, as there is nothing in it yet.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass


@dataclass(slots=True)
class _Segment:
    """A file that this process adds to. Locked while that goes on, so that nobody removes it."""

    path: Path
    fd: int
    begun: float = field(default_factory=time.monotonic)
    number: int = 0
    nbytes: int = 0
    synced: int = 0
    _written: int = 0

    @classmethod
    def begin(cls, folder: Path, owner: str, header: bytes) -> _Segment:
        """Make one, which is on the disk with its name."""
        name = f"{owner}-{os.urandom(8).hex()}{SUFFIX}"
        with Beneath(folder) as there:
            fd = there.create(name)
        made = cls(folder / name, fd)
        try:
            _lock(fd)
            made._add([header])
            sync_folder(folder)
        except BaseException:
            made.leave()
            raise
        return made

    def write(self, group: list[bytes]) -> None:
        """Write the records of a group that were not written yet."""
        self._add(group[self._written :])
        self._written = len(group)

    def _add(self, records: list[bytes]) -> None:
        """Write frames: small ones together, large ones without another copy."""
        pieces: list[bytes] = []
        for record in records:
            pieces.append(frame_head(self.number, record))
            self.number, self.nbytes = self.number + 1, self.nbytes + OVERHEAD + len(record)
            if len(record) >= _LARGE_NBYTES:
                write_all(self.fd, b"".join(pieces))
                write_all(self.fd, record)
                pieces = []
            else:
                pieces.append(record)
        write_all(self.fd, b"".join(pieces))

    def sync(self, ending: bool = False) -> None:
        """Confirm what was written.

        Args:
            ending: Whether nothing follows.
        """
        if ending:
            self._add([b""])
        os.fsync(self.fd)
        if not os.fstat(self.fd).st_nlink:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(self.path))  # somebody removed it
        self.synced, self._written = self.number, 0

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        os.close(fd)

    def leave(self) -> None:
        """Give it up. Nothing that was confirmed lies in a file without records."""
        with suppress(OSError):
            if self.synced <= 1:
                remove(self.path)
        with suppress(OSError):  # also where it could not be removed: nobody else may, as long as it is locked
            self.close()
