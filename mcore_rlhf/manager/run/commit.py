"""One commit for a whole step: every rank writes its part into a hidden folder, one of them publishes it with one rename.

Not bound to a ``torch.distributed`` world: parts find each other by root, step and transaction id. A part is done when its
``part-*.json`` is there; the coordinator waits for all that it expects, writes the manifest and renames. Ranks talk through
notes in the step's hidden folder: no collectives and no sockets, so that it does not disturb training, and that actor,
critic and rollout workers may live in separate worlds. All that is needed is the file system that they share anyway.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from mcore_rlhf.errors import CheckpointError, Incomplete, Problems, StorageError, Unreadable
from mcore_rlhf.storage.beneath import new_folder, remove_beneath
from mcore_rlhf.storage.manifest import FileEntry, Manifest
from mcore_rlhf.storage.notes import FolderNotes, Notes
from mcore_rlhf.storage.publish import LocalPublication
from mcore_rlhf.storage.records import parsed
from mcore_rlhf.storage.transactions import TransactionPaths, new_transaction
from mcore_rlhf.storage.waiting import waiting_for

from .steps import MANIFEST, step_folder

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1
_FAILED = "failed-"
_GRACE_S = 5.0
"""How long somebody is waited for again who was waited for in vain, at a further attempt at the same save."""
_COORDINATOR = "the coordinating rank"
_REMOVAL_S = 5.0
"""How long removing a step's files may take."""

PARTS = ".parts"

WORD = ".given-up-"
"""What a file in the root is called that tells worlds which have not joined of a save that was given up; the transaction follows."""

__all__ = ["Committed", "RankPart", "Transaction", "new_transaction"]


class Stopped(CheckpointError):
    """Another rank failed first; its own error says why."""


@dataclass(frozen=True, slots=True)
class Messages:
    """What ranks say to each other: notes of which each is written once, and waited for.

    Args:
        notes: Where; all ranks see them.
        timeout: Seconds to wait for a message.
        gone: Says why waiting is in vain, where the whole transaction has ended.
        alive: Hears, while a message is waited for, that the file system has answered once more.
        late: Who was waited for in vain, and may be dead: not waited for as long once more.
    """

    notes: Notes
    timeout: float
    gone: Callable[[], str] = field(default=lambda: "")
    alive: Callable[[], None] = field(default=lambda: None)
    late: set[str] = field(default_factory=set)

    def fail(self, who: str, error: BaseException) -> None:
        """Tell everybody that there will be no commit; never raises."""
        name = f"{_FAILED}{who}"
        try:
            self.notes.put(name, f"{type(error).__name__}: {error}".encode())
        except CheckpointError:
            with suppress(CheckpointError):  # a full disk mostly has room for an empty file; else the others time out
                self.notes.put(name, b"", once=True)

    def get(self, name: str, sender: str) -> bytes:
        """Wait for a message.

        Args:
            name: Its name.
            sender: Who is to write it, for the error.

        Raises:
            Stopped: A rank failed.
            Incomplete: It did not come in time.
        """
        limit = _patience(self.late, sender, self.timeout)
        with waiting_for(f"{sender}, whose part has not come to {self.notes}; after {limit:g} s it is given up"):
            return self._awaited(name, sender, limit)

    def _awaited(self, name: str, sender: str, limit: float) -> bytes:
        end, pause = time.monotonic() + limit, _FIRST_PAUSE
        while (data := self.notes.get(name)) is None:
            self.alive()
            self.check()
            if time.monotonic() > end:
                self.late.add(sender)
                raise Incomplete(
                    f"{sender} did not deliver its part ({name}) within {limit:g} s\n"
                    "It may hang or have died: look at its log. The step was not committed; older ones are untouched."
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        self.late.discard(sender)
        return data

    def hear(self, kind: type[T], name: str, sender: str) -> T:
        """Wait for a typed message; see :meth:`get` and :meth:`~mcore_rlhf.storage.notes.Notes.said`."""
        return parsed(kind, self.get(name, sender), f"{self.notes}/{name}", sparse=True)

    def check(self) -> None:
        """Stop waiting when somebody has failed.

        Raises:
            Stopped: Somebody has, or the transaction has ended.
        """
        found: list[tuple[str, bytes]] = []
        with suppress(CheckpointError):  # they are being removed
            found = list(self.notes.read(f"{_FAILED}*"))
        for name, text in found:
            raise Stopped(
                f"{name.removeprefix(_FAILED)} could not save: {text.decode(errors='replace') or 'its log says why'}"
            )
        if why := self.gone():
            raise Stopped(why)


def _patience(late: Collection[str], who: str, limit: float) -> float:
    """How long to wait for somebody."""
    return min(limit, _GRACE_S) if who in late else limit


def why_it_vanished(messages: Messages, error: BaseException) -> Stopped | None:
    """What a rank met whose files vanished while it wrote them: mostly that rank 0 is removing a step that was given up.

    Args:
        messages: The step's.
        error: What the rank met.
    """
    cause = error if isinstance(error, OSError) else error.__cause__
    # EEXIST: a folder that was there when it was to be made, and gone when that was looked at.
    if not isinstance(cause, OSError) or cause.errno not in (errno.ENOENT, errno.ESTALE, errno.EEXIST):
        return None
    end = time.monotonic() + _REMOVAL_S
    while time.monotonic() < end:
        try:
            messages.check()
        except Stopped as stopped:
            return stopped
        time.sleep(_LONGEST_PAUSE)
    return None


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank has written.

    Args:
        files: By path relative to the step's folder.
        roles: ``{"role", "format", "parallel"}`` of the models that this rank speaks for.
        live: By role, how much live state the step holds; the same from every rank of a world.
        contributed: Bytes that this rank put into files of others, by path.
        taken: Bytes that this rank found in its own files from others, by path.
        host: Where it runs.
        linked: See :class:`~.write.RankWriter`.
    """

    files: Mapping[str, FileEntry]
    roles: tuple[Mapping[str, str], ...] = ()
    live: Mapping[str, object] = field(default_factory=dict)
    contributed: Mapping[str, int] = field(default_factory=dict)
    taken: Mapping[str, int] = field(default_factory=dict)
    host: str = ""
    linked: Mapping[str, str] = field(default_factory=dict)


def refuse_untaken(parts: Iterable[RankPart]) -> None:
    """See that what ranks put into each other's files is what the files' owners found: the rest would read as zeros.

    Raises:
        Incomplete: Bytes were put into a file, and its owner did not expect them.
    """
    given, taken, problems = Counter[str](), Counter[str](), Problems()
    for part in parts:
        given.update(part.contributed)
        taken.update(part.taken)
    for path in sorted(given | taken):
        if given[path] != taken[path]:
            text = f"{path}: other ranks put {given[path]} bytes into it, and its owner took {taken[path]}"
            problems.add(Incomplete, text, "The step is not committed. Do all ranks agree on the layout?")
    problems.raise_if_any()


@dataclass(frozen=True, slots=True)
class Committed:
    """A step that was published.

    Args:
        path: Its folder.
        manifest: What it holds.
    """

    path: Path
    manifest: Manifest


@dataclass(slots=True)
class Transaction:
    """One step being written, as one rank sees it.

    Args:
        root: The folder of all steps.
        step: The training step.
        id: The transaction's identity, the same for all ranks.
        part: This rank's name: ``00003``, or ``critic-00003`` where there are several worlds.
        timeout: Seconds to wait for others.
        fsync: Whether everything is on the disk before it appears.
        alive: Hears, while other ranks are waited for, that the file system has answered once more.
        late: See :class:`Messages`; of all attempts at one save.
    """

    root: Path
    step: int
    id: str
    part: str
    timeout: float
    fsync: bool = True
    alive: Callable[[], None] = lambda: None
    late: set[str] = field(default_factory=set)
    _publication: LocalPublication | None = None

    @property
    def target(self) -> Path:
        """Where the step appears."""
        return step_folder(self.root, self.step)

    @property
    def folder(self) -> Path:
        """The hidden folder to write into."""
        return self._places.staging

    @property
    def _places(self) -> TransactionPaths:
        return TransactionPaths(self.target, self.id)

    @property
    def messages(self) -> Messages:
        """What ranks say to each other until the commit."""
        return Messages(FolderNotes(self.folder / PARTS), self.timeout, self._gone, self.alive, self.late)

    @property
    def _words(self) -> FolderNotes:
        return FolderNotes(self.root)

    def _gone(self) -> str:
        """A world has given up; or the coordinator has cleaned up, or published: the folder was there before, see :meth:`join`."""
        with suppress(CheckpointError):
            if (word := self._words.get(f"{WORD}{self.id}")) is not None:
                return f"the save was given up by another world: {word.decode(errors='replace')}"
        if self._publication is not None or self.folder.is_dir():
            return ""
        return "the save was given up by the coordinating rank; its log says why"

    def again(self, attempt: int) -> Transaction:
        """The transaction of a further attempt at the same save; all ranks find the same id for it.

        Args:
            attempt: Its number, from 1 on.
        """
        identity = sha256(f"{self.id}/{attempt}".encode()).hexdigest()[: len(self.id)]
        return replace(self, id=identity, _publication=None)

    def open(self, replaceable: Callable[[Path], bool]) -> list[str]:
        """Make the hidden folder: done by the coordinator, before the others :meth:`join`.

        Args:
            replaceable: Whether a folder that has the step's name already may be replaced.

        Returns:
            What was cleaned up of dead runs, a line each.

        Raises:
            StorageError: It cannot be made.
        """
        publication = LocalPublication(self.target, True, self.fsync, replaceable, MANIFEST, self.id)
        publication.__enter__()
        self._publication = publication
        try:
            new_folder(self.folder / PARTS)
        except OSError as error:
            self.abort()
            raise StorageError(f"{self.folder}: cannot be made: {error}") from error
        return publication.recovered

    def join(self, patience: float = 1.0) -> None:
        """Wait until the coordinator has made the folder.

        Args:
            patience: How many times the time-out to wait.

        Raises:
            Incomplete: It has not, in time.
            Stopped: It has given up already.
        """
        limit = _patience(self.late, _COORDINATOR, patience * self.timeout)
        with waiting_for(f"{_COORDINATOR}, which has not begun {self.target}; after {limit:g} s the save is given up"):
            self._begun(limit)

    def _begun(self, limit: float) -> None:
        end = time.monotonic() + limit
        while not (self.folder / PARTS).is_dir():
            self.alive()
            if (word := self._words.get(f"{WORD}{self.id}")) is not None:
                raise Stopped(f"the save was given up by another world: {word.decode(errors='replace')}")
            if time.monotonic() > end:
                self.late.add(_COORDINATOR)
                raise Incomplete(f"{self.folder}: the coordinating rank did not start the save within {limit:g} s")
            time.sleep(0.005)
        self.late.discard(_COORDINATOR)

    def deliver(self, part: RankPart) -> None:
        """Say that this rank has written, and synced, everything."""
        self.messages.notes.say(f"part-{self.part}.json", part)

    def parts(self, expected: Iterable[str]) -> dict[str, RankPart]:
        """Wait for the parts of others.

        Raises:
            CheckpointError: One of them failed, or did not come.
        """
        return {name: self.messages.hear(RankPart, f"part-{name}.json", f"rank {name}") for name in expected}

    def commit(self, manifest: Manifest) -> Committed:
        """Publish.

        Args:
            manifest: What the folder holds.

        Raises:
            CheckpointError: It is not complete, or could not be published; what was there before is still there.
        """
        assert self._publication is not None, "only the rank that opened the transaction commits it"
        self._check(manifest)
        remove_beneath(self.folder, PARTS)
        path = self._publication.commit(manifest)
        self._publication = None
        with suppress(CheckpointError):  # every world has joined this one, and none waits for an earlier one any more
            self._words.remove(f"{WORD}*")
        return Committed(path, manifest)

    def _check(self, manifest: Manifest) -> None:
        """Every file has the length that its writer says: the last look before the rename."""
        for name, entry in manifest.files.items():
            path = self.folder / name
            nbytes = path.stat().st_size if path.is_file() else -1
            if nbytes != entry.nbytes:
                found = "is missing" if nbytes < 0 else f"has {nbytes} bytes"
                raise Incomplete(
                    f"{path}: {found}; its writer reported {entry.nbytes}\nDo all ranks see one file system?"
                )

    def abort(self, word: str = "") -> None:
        """Give up; on the coordinator, everything written is removed.

        Args:
            word: What to leave behind for a world that has not even joined, unless somebody has; the next :meth:`commit` removes it.
        """
        with suppress(CheckpointError):
            if word and self._words.get(f"{WORD}{self.id}") is None:
                self._words.put(f"{WORD}{self.id}", word.encode())
        publication, self._publication = self._publication, None
        if publication is not None:
            with suppress(CheckpointError):
                publication.__exit__(None, None, None)

    def await_commit(self) -> None:
        """Wait, on the others, until the step is published.

        Raises:
            CheckpointError: It was not.
        """
        patience = 2 * self.timeout  # the coordinator may itself still wait for a dead rank, and then names it
        end = time.monotonic() + patience
        while not self.is_published():
            self.alive()
            try:
                self.messages.check()
            except Stopped:
                if self.is_published():  # the folder was renamed between the two looks
                    return
                raise
            if time.monotonic() > end:
                self.late.add(_COORDINATOR)
                raise Incomplete(f"{self.target}: was not committed within {patience:g} s\nLook at the log of rank 0.")
            time.sleep(0.01)

    def is_published(self) -> bool:
        """Whether it was committed, as far as can be told: what cannot be read is looked at again."""
        with suppress(Unreadable):
            return self._places.is_published(MANIFEST)
        return False
