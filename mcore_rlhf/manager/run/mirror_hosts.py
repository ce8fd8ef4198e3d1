"""Hosts that send a step together: each the files that its ranks wrote; rank 0 what nobody else has sent, and the manifest.

One process of every host helps, on a thread of its own. Behind training, ranks talk through notes in the root that they share:

* ``.mirror/asked.json``    by rank 0: which step, who helps, and, once nothing waits any more, up to which step all is there
* ``.mirror/00008.json``    by the helper that is rank 8: that it lives, that its share is there, or why it gave up

Who sends which file follows from the manifest and from who helps, so that no file is sent twice. A helper that gives up, or whose
process is gone, is passed over: the root is shared, and rank 0 sends what is missing.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mcore_rlhf.errors import CheckpointError, StorageError, log_of
from mcore_rlhf.storage.beneath import make_folder, remove
from mcore_rlhf.storage.manifest import FileEntry, Manifest
from mcore_rlhf.storage.notes import FolderNotes, Notes
from mcore_rlhf.storage.paths import beneath
from mcore_rlhf.storage.store import StorePath
from mcore_rlhf.storage.threads import begin, begin_some
from mcore_rlhf.storage.transactions import new_transaction

from . import steps
from .mirror_status import MirrorStatus
from .steps import MANIFEST

if TYPE_CHECKING:
    from mcore_rlhf.storage.upload import StorePublication

    from .options import Mirror

T = TypeVar("T")
_log = log_of("mcore_rlhf.manager")

TALK = ".mirror"
"""Folder in a root through which those who send together talk."""

FILES_AT_A_TIME = 4
_ASKED = "asked.json"
_LOOK_S = 1.0
_DEAD_S = 60.0
"""A helper that says nothing new for so long, and one that lives does every second, is no more."""
_ENDING_S = 5.0

Job = tuple[str, FileEntry]


class Ended(Exception):
    """The manager is closed, or nobody wants the step any more; the next start goes on."""


@dataclass(frozen=True, slots=True)
class MirrorRequest:
    """What rank 0 asks for.

    Args:
        attempt: Which attempt it is; empty while nothing is asked for.
        step, transaction: Which step.
        hosts: All that take part, rank 0's first.
        settled: Transaction of the newest step when nothing waited any more.
        closed: Whether nothing will be asked for any more.
    """

    attempt: str = ""
    step: int = 0
    transaction: str = ""
    hosts: Sequence[str] = ()
    settled: str = ""
    closed: bool = False


@dataclass(frozen=True, slots=True)
class HelperState:
    """What a helper says.

    Args:
        attempt: Of which it speaks.
        state: What became of its share.
        why: Why it gave up.
        beat: Another number every time, by which it is seen to live.
    """

    attempt: str = ""
    state: Literal["sending", "done", "gave up", "closed"] = "sending"
    why: str = ""
    beat: int = 0


def shares(manifest: Manifest, hosts: Sequence[str]) -> dict[str, list[Job]]:
    """Which host sends which files of a step: those that its ranks wrote. Files of hosts that take no part are dealt out by bytes.

    Args:
        manifest: The step's.
        hosts: Those that take part.
    """
    writers = {path: host for host, paths in manifest.report.get("hosts", {}).items() for path in paths}
    found: dict[str, list[Job]] = {host: [] for host in hosts}
    strangers: list[Job] = []
    for name, entry in sorted(manifest.files.items()):
        found.get(writers.get(name, ""), strangers).append((name, entry))
    loads = {host: sum(entry.nbytes for _, entry in jobs) for host, jobs in found.items()}
    for name, entry in sorted(strangers, key=_largest_first):
        least = min(hosts, key=loads.__getitem__)
        found[least].append((name, entry))
        loads[least] += entry.nbytes
    return found


def _largest_first(job: Job) -> tuple[int, str]:
    return -job[1].nbytes, job[0]


def publication_of(target: StorePath, memory: int, transaction: str) -> StorePublication:
    """How a step is published in the mirror: by its own transaction, so that whoever comes after a kill goes on with what is there."""
    from mcore_rlhf.storage.upload import StorePublication

    memory = max(1, memory // FILES_AT_A_TIME)
    return StorePublication(target, True, steps.is_replaceable, MANIFEST, memory, transaction, goes_on=True)


def missing(jobs: Iterable[Job], publication: StorePublication) -> list[Job]:
    """Those files that are not there as a whole."""
    sent = {name: nbytes for name, (nbytes, _) in publication.versions().items()}
    return [(name, entry) for name, entry in jobs if sent.get(name) != entry.nbytes]


def send(
    publication: StorePublication,
    folder: Path,
    jobs: Sequence[Job],
    look: Callable[[], None],
    moves: Callable[[], None] = lambda: None,
) -> None:
    """Send files, a few at a time, on threads that an ending process does not wait for.

    A file that is not what the manifest says while it is read is one that the store never has.

    Args:
        publication: Where to.
        folder: The step's.
        jobs: The files.
        look: Called every second; what it raises stops all.
        moves: Called where the store has taken something.

    Raises:
        CheckpointError: The first error; the others are given up.
    """
    todo: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        todo.put(job)
    errors: list[BaseException] = []

    def tick(_nbytes: int) -> None:
        if errors:
            raise Ended
        moves()

    def one(job: Job) -> None:
        publication.put(job[0], beneath(folder, job[0]), job[1], tick)

    for thread in begin_some(min(FILES_AT_A_TIME, len(jobs)), "mcore_rlhf mirror sends", _work, todo, one, errors):
        while thread.is_alive():
            thread.join(_LOOK_S)
            try:
                look()
            except Exception as error:
                errors.append(error)
    if errors:
        raise errors[0]


def _work(todo: queue.SimpleQueue[Job], action: Callable[[Job], None], errors: list[BaseException]) -> None:
    while not errors:
        try:
            action(todo.get_nowait())
        except queue.Empty:
            return
        except BaseException as error:
            errors.append(error)


class Helpers:
    """The other hosts, as rank 0 sees them.

    Args:
        root: The folder of all steps.
        host: Rank 0's.
        ranks: Of every other host the one that helps, and the host.
    """

    def __init__(self, root: Path, host: str, ranks: Mapping[int, str]) -> None:
        self._notes, self._ranks = FolderNotes(root / TALK), ranks
        self.hosts = [host, *ranks.values()]
        self._asked = MirrorRequest()
        with suppress(OSError):
            remove(self._notes.root)  # what an earlier run said

    def ask(self, step: int, transaction: str) -> None:
        """Ask them to send their share of a step."""
        attempt = new_transaction()
        self._say(replace(self._asked, attempt=attempt, step=step, transaction=transaction, hosts=self.hosts))

    def wait(self, look: Callable[[], None]) -> bool:
        """Wait until each has sent its share, or will not.

        Args:
            look: Called every second; what it raises ends it.

        Returns:
            Whether all have.
        """
        left = set(self._ranks) if self._asked.attempt else set()
        heard, complete = {rank: (HelperState(), time.monotonic()) for rank in left}, True
        while left:
            look()
            for rank in sorted(left):
                told = self._told(rank) or HelperState()
                if told != heard[rank][0]:
                    heard[rank] = told, time.monotonic()
                if told.state == "sending" and time.monotonic() - heard[rank][1] > _DEAD_S:
                    told = HelperState(state="gave up", why=f"nothing was heard of it for {_DEAD_S:g} s")
                if told.state == "sending":
                    continue
                left.remove(rank)
                if told.state != "done":
                    complete = False
                    _log.warning("rank 0 sends the files of %s to the mirror: %s", self._ranks[rank], told.why)
            if left:
                time.sleep(_LOOK_S)
        return complete

    def withdraw(self) -> None:
        """Ask for nothing any more, and let those stop who are still at it."""
        if not self._asked.attempt:
            return
        sending = {rank for rank in self._ranks if (told := self._told(rank)) is not None and told.state == "sending"}
        self._say(replace(self._asked, attempt=""))
        end = time.monotonic() + _ENDING_S
        while sending and time.monotonic() < end:
            time.sleep(_LOOK_S / 5)
            sending = {rank for rank in sending if (told := self._read(rank)) is None or told.state == "sending"}

    def settled(self, transaction: str) -> None:
        """Say that nothing waits, up to a step."""
        if transaction != self._asked.settled:
            self._say(replace(self._asked, settled=transaction))

    def close(self) -> None:
        """Say that nothing will be asked for any more."""
        self._say(replace(self._asked, attempt="", closed=True))

    def _told(self, rank: int) -> HelperState | None:
        """What a helper says of this attempt, or that it is closed."""
        told = self._read(rank)
        same = told is not None and (told.attempt == self._asked.attempt or told.state == "closed")
        return told if same else None

    def _read(self, rank: int) -> HelperState | None:
        return _read(HelperState, self._notes, f"{rank:05d}.json")

    def _say(self, asked: MirrorRequest) -> None:
        self._asked = asked
        if self._ranks:
            _write(self._notes, _ASKED, asked)


@dataclass(slots=True)
class Helper:
    """The process of another host that sends what its host's ranks wrote, when rank 0 asks for it.

    Args:
        root: The folder of all steps.
        mirror: Where to, and how.
        target: It, opened.
        rank: This one.
        host: This one's.
    """

    root: Path
    mirror: Mirror
    target: StorePath
    rank: int
    host: str
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _told: HelperState = field(default_factory=HelperState)

    def start(self) -> None:
        """Begin to listen; a second call does nothing, but where the system gave no thread for it: rank 0 sends all then."""
        if self._thread is None and not self._ended.is_set():
            try:
                self._thread = begin("mcore_rlhf mirror", self._run)
            except StorageError as error:
                _log.warning("rank %d: %s", self.rank, error)
            else:
                atexit.register(self.close)

    def wait(self, seconds: float | None) -> list[int]:
        """Wait until rank 0 says that all is there, or is no more; see :meth:`~.mirror.Mirroring.wait`."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            newest, asked = steps.newest(self.root), self._asked()
            if newest is None or asked.settled == newest.transaction:
                return []
            if asked.closed or (end is not None and time.monotonic() >= end):
                status = MirrorStatus.read(self.root) or MirrorStatus()
                return [step.step for step in steps.committed(self.root) if status.of(step) == "waiting"]
            time.sleep(_LOOK_S)

    def close(self) -> None:
        """Stop; rank 0 sends what is missing, now or at the next start."""
        self._ended.set()
        atexit.unregister(self.close)
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(_ENDING_S)
            self._say(state="closed", why="its process has ended")

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            asked = self._asked()
            if asked.attempt and asked.attempt != self._told.attempt and self.host in asked.hosts:
                self._help(asked)

    def _help(self, asked: MirrorRequest) -> None:
        self._told = HelperState(asked.attempt)
        self._say()

        def look() -> None:
            if self._ended.is_set() or self._asked().attempt != asked.attempt:
                raise Ended
            self._say()

        try:
            folder = steps.step_folder(self.root, asked.step)
            manifest = steps.read_manifest(folder)
            if manifest.transaction != asked.transaction:
                raise Ended
            there = publication_of(steps.step_folder(self.target, asked.step), self.mirror.memory, asked.transaction)
            send(there, folder, missing(shares(manifest, asked.hosts)[self.host], there), look)
        except Ended:
            self._say(state="gave up", why="it was stopped")
        except Exception as error:  # whatever it is, training goes on, and rank 0 meets it as well
            unforeseen = None if isinstance(error, CheckpointError | OSError) else error
            _log.warning("rank %d: the mirror %s: %s", self.rank, self.mirror.url, error, exc_info=unforeseen)
            self._say(state="gave up", why=str(error).partition("\n")[0] or type(error).__name__)
        else:
            self._say(state="done")

    def _asked(self) -> MirrorRequest:
        return _read(MirrorRequest, FolderNotes(self.root / TALK), _ASKED) or MirrorRequest()

    def _say(self, **changes: Any) -> None:
        self._told = replace(self._told, beat=self._told.beat + 1, **changes)
        _write(FolderNotes(self.root / TALK), f"{self.rank:05d}.json", self._told)


def _read(kind: type[T], notes: Notes, name: str) -> T | None:
    """A message; None where there is none that can be read."""
    with suppress(CheckpointError):
        return notes.said(kind, name)
    return None


def _write(notes: FolderNotes, name: str, message: MirrorRequest | HelperState) -> None:
    """Say something; where the root takes nothing now, it is as if this process were not there."""
    with suppress(OSError, CheckpointError):
        make_folder(notes.root)
        notes.say(name, message)
