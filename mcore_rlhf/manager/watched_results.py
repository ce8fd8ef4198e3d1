"""Where a watcher's results lie, and what is known of each: a folder, in which they are published by a rename, or a prefix of a store."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mcore_rlhf.errors import Corrupt, StorageError, UsageError, headline
from mcore_rlhf.storage.beneath import make_folder, move
from mcore_rlhf.storage.notes import FolderNotes, Notes
from mcore_rlhf.storage.paths import ReadablePath, storage_error
from mcore_rlhf.storage.publish import MANIFEST_NAME, sync_folder
from mcore_rlhf.storage.store import StorePath

from .run import steps
from .run.retention import clean_up, remove_folder
from .run.root import RootLock

ASIDE = ".watch"
"""Where notes lie, and in a folder what is being made: below the target."""
LEASE = "lease.json"
"""Who has a prefix of a store, among the notes."""


@dataclass(frozen=True, slots=True)
class Note:
    """What is known of a result.

    Args:
        step: The step.
        source: Which state of it was converted; empty while it is.
        ran: Whether the command has run on it.
        taken: Whether it is not there any more, as the command took it away.
    """

    step: int
    source: str
    ran: bool = False
    taken: bool = False

    @property
    def name(self) -> str:
        """What it is called."""
        return f"step-{self.step}.json"


class Results(ABC):
    """The results of one watcher, ``global_step_N`` each.

    Args:
        out: Where they lie.
        notes: What is known of each.
    """

    def __init__(self, out: ReadablePath, notes: Notes) -> None:
        self.out, self._notes = out, notes

    def place(self, number: int) -> ReadablePath:
        """Where a result appears."""
        return steps.step_folder(self.out, number)

    def note(self, number: int) -> Note | None:
        """What is known of a result; None where no watcher has made one. Of one whose note a power failure has spoilt, nothing is."""
        try:
            return self._notes.said(Note, Note(number, "").name)
        except Corrupt:
            return Note(number, "")  # it is made anew

    def all(self) -> Iterator[Note]:
        """What is known of all of them."""
        for name in self._notes.list("step-*.json"):
            number = name.removeprefix("step-").removesuffix(".json")
            if number.isdecimal() and name == Note(int(number), "").name:
                note = self.note(int(number))
                if note is not None and note.name == name:
                    yield note

    def say(self, note: Note) -> None:
        """Note something."""
        self._notes.say(note.name, note)

    def begin(self, number: int) -> ReadablePath:
        """Where a step is to be converted to.

        Raises:
            UsageError: What lies in its place is somebody else's.
        """
        if self._lies_there(number) and self.note(number) is None:
            raise UsageError(f"{self.place(number)}: lies there already, and no watcher made it: it stays as it is")
        return self._begun(number)

    @abstractmethod
    def is_there(self, number: int) -> bool:
        """Whether a result is published."""

    @abstractmethod
    def _lies_there(self, number: int) -> bool:
        """Whether anything has its place."""

    @abstractmethod
    def _begun(self, number: int) -> ReadablePath:
        """See :meth:`begin`."""

    @abstractmethod
    def publish(self, note: Note) -> None:
        """Give what was made its place.

        Raises:
            StorageError: That cannot be done; what was there before still is.
        """

    @abstractmethod
    def drop(self, number: int) -> None:
        """What was made is of no use.

        Raises:
            StorageError: It cannot be removed.
        """

    @abstractmethod
    def retire(self, number: int) -> None:
        """Delete a result, alone: exports beside it are of a run, and no watcher's.

        Raises:
            StorageError: It cannot be removed.
        """

    def hold(self) -> None:  # noqa: B027
        """Have the target, and see that nobody else has taken it.

        Raises:
            StorageError: Somebody has.
        """

    def check(self) -> None:  # noqa: B027
        """Raise what :meth:`hold` does where that is known without asking."""

    def close(self) -> None:  # noqa: B027
        """Let others have the target."""


@contextmanager
def _named(path: Path, action: str) -> Iterator[None]:
    """Say of what a disk does not do where that was."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path, action) from error


class FolderResults(Results):
    """In a folder of the file system, which one watcher has at a time.

    Args:
        out: The folder.

    Raises:
        UsageError: Something in it leads elsewhere.
        StorageError: It cannot be written, or another watcher, or a run, does.
    """

    def __init__(self, out: Path) -> None:
        self._out, self._aside = out, out / ASIDE
        super().__init__(out, FolderNotes(self._aside))
        with _named(self._aside, "create"):
            if self._aside.is_symlink():
                raise UsageError(
                    f"{self._aside}: is a symbolic link, which is not followed\nRemove it, or give another folder with --into."
                )
            make_folder(self._aside)
        try:
            self._lock = RootLock(out)
        except StorageError as error:
            raise StorageError(f"{out}: another watcher, or a run, writes here\n{headline(str(error))}") from error
        try:
            self._clean_up()
        except BaseException:
            self._lock.release()
            raise

    def _clean_up(self) -> None:
        """Remove what one that was killed left."""
        with _named(self._aside, "clean up"):
            clean_up(self._aside, alone=True)
            for left in [*self._aside.glob("global_step_*"), *self._aside.glob("old-*")]:
                remove_folder(left)

    def is_there(self, number: int) -> bool:
        """See :meth:`Results.is_there`."""
        with _named(self._target(number), "see"):
            return self._target(number).is_dir()

    def _target(self, number: int) -> Path:
        return steps.step_folder(self._out, number)

    def _lies_there(self, number: int) -> bool:
        return os.path.lexists(self._target(number))

    def _begun(self, number: int) -> Path:
        return steps.step_folder(self._aside, number)

    def publish(self, note: Note) -> None:
        """A kill in between leaves no result, and it is made again: what lies there without a note is somebody else's."""
        number = note.step
        target, old = self._target(number), self._aside / f"old-{number}"
        before, there = self.note(number), os.path.lexists(target)
        remove_folder(old)
        try:
            if there:  # a result of what the step was before
                move(target, old)
            self.say(note)
            move(self._begun(number), target)
        except OSError as error:
            if there and not os.path.lexists(target) and before is not None:
                self.say(before)
                move(old, target)
            raise storage_error(error, target, "publish") from error
        with _named(self._out, "sync"):
            sync_folder(self._out)
        remove_folder(old)

    def drop(self, number: int) -> None:
        """See :meth:`Results.drop`."""
        remove_folder(self._begun(number))

    def retire(self, number: int) -> None:
        """See :meth:`Results.retire`."""
        remove_folder(self._target(number))
        FolderNotes(self._aside).remove(Note(number, "").name)

    def hold(self) -> None:
        """See :meth:`Results.hold`."""
        self._lock.hold()

    def close(self) -> None:
        """See :meth:`Results.close`."""
        self._lock.release()


class StoreResults(Results):
    """Under a prefix of an object store, where a conversion publishes by itself, with the last object that it sends.

    A note is there before: what a killed watcher was at is made anew. One watcher has the prefix at a time, by a record in it
    (:mod:`mcore_rlhf.storage.lease`), which is seen to before anything is noted or deleted.

    Args:
        out: The prefix.
        say: Hears that the lease of another watcher is watched.

    Raises:
        UsageError: It can be read only.
    """

    def __init__(self, out: StorePath, say: Callable[[str], None]) -> None:
        from mcore_rlhf.storage.lease import Lease  # a store is seldom meant
        from mcore_rlhf.storage.objects import StoreNotes
        from mcore_rlhf.storage.upload import object_store

        self._out = out
        self._kept = StoreNotes(object_store(out), str((out / ASIDE).path))
        self._lease = Lease(out, out / ASIDE / LEASE, say)
        super().__init__(out, self._kept)

    def hold(self) -> None:
        """See :meth:`Results.hold`; the first time, for as long as it takes to see whether a watcher that was here lives."""
        self._lease.hold()

    def check(self) -> None:
        """See :meth:`Results.check`."""
        self._lease.check()

    def close(self) -> None:
        """See :meth:`Results.close`."""
        self._lease.close()

    def say(self, note: Note) -> None:
        """See :meth:`Results.say`."""
        self.hold()
        super().say(note)

    def _target(self, number: int) -> StorePath:
        return steps.step_folder(self._out, number)

    def is_there(self, number: int) -> bool:
        """See :meth:`Results.is_there`."""
        return self._manifest(number) is not None

    def _manifest(self, number: int) -> str | None:
        """What the manifest of a result is called, as a conversion of one model or of a whole step has it."""
        return next((name for name in (MANIFEST_NAME, steps.MANIFEST) if (self._target(number) / name).is_file()), None)

    def _lies_there(self, number: int) -> bool:
        return self._target(number).is_dir()

    def _begun(self, number: int) -> StorePath:
        if self.note(number) is None:
            self.say(Note(number, ""))
        return self._target(number)

    def publish(self, note: Note) -> None:
        """It is there already."""
        self.say(note)
        self._out.store.forget()

    def drop(self, number: int) -> None:
        """See :meth:`Results.drop`; it was published, of another state of the step than there is."""
        from mcore_rlhf.storage.upload import remove

        self.hold()
        remove(self._target(number), self._manifest(number) or MANIFEST_NAME)
        self._kept.remove(Note(number, "").name)

    def retire(self, number: int) -> None:
        """See :meth:`Results.retire`."""
        self.drop(number)


def results_in(out: ReadablePath, say: Callable[[str], None]) -> Results:
    """The results of a watcher.

    Args:
        out: Where they lie.
        say: Hears what is waited for.

    Raises:
        UsageError, StorageError: It cannot be so.
    """
    if isinstance(out, StorePath):
        return StoreResults(out, say)
    assert isinstance(out, Path)
    return FolderResults(out)
