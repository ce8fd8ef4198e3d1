"""One commit for a whole step: every rank writes its part into a hidden folder, one of them publishes it with one rename.

Not bound to a ``torch.distributed`` world: parts find each other by root, step and transaction id. A part is done when its
``part-*.json`` is there; the coordinator waits for all that it expects, writes the manifest and renames. Ranks talk through
small files in the step's hidden folder: no collectives and no sockets, so that it does not disturb training, and that actor,
critic and rollout workers may live in separate worlds. All that is needed is the file system that they share anyway.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_rlhf.errors import CheckpointError, Incomplete, Problems, StorageError, Unreadable
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.beneath import move, new_folder, remove, remove_beneath, write_new
from mcore_rlhf.storage.manifest import FileEntry, Manifest
from mcore_rlhf.storage.paths import storage_error
from mcore_rlhf.storage.publish import LocalPublication, replace_text
from mcore_rlhf.storage.transactions import Places, new_transaction
from mcore_rlhf.storage.waiting import waiting_for

from .steps import MANIFEST, step_folder

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1
_FAILED = "failed-"
_REMOVAL_S = 5.0
"""How long removing a step's files may take."""

PARTS = ".parts"

WORD = ".given-up-"
"""What a file in the root is called that tells worlds which have not joined of a save that was given up; the transaction follows."""

__all__ = ["Committed", "RankPart", "Transaction", "new_transaction"]


class Stopped(CheckpointError):
    """Another rank failed first; its own error says why."""


@dataclass(frozen=True, slots=True)
class FolderStore:
    """Named messages in a folder, as ``torch.distributed.FileStore`` has them; each is written once, as a whole.

    Args:
        folder: Where; all ranks see it.
        timeout: Seconds to wait for a message.
        gone: Whether the whole transaction has ended, so that waiting is in vain.
    """

    folder: Path
    timeout: float
    gone: Callable[[], bool] = field(default=lambda: False)

    def set(self, name: str, data: bytes) -> None:
        """Write a message.

        Raises:
            StorageError: The file system refused.
        """
        path, aside = self.folder / name, self.folder / f".{name}.{os.getpid()}-{new_transaction()}"
        try:
            write_new(aside, data)
            move(aside, path)
        except OSError as error:
            raise storage_error(error, path, "write") from error

    def set_json(self, name: str, content: object) -> None:
        """Write a message of plain values."""
        self.set(name, json.dumps(content).encode())

    def fail(self, who: str, error: BaseException) -> None:
        """Tell everybody that there will be no commit; never raises."""
        try:
            self.set(_FAILED + who, f"{type(error).__name__}: {error}".encode())
        except CheckpointError:
            with suppress(OSError):  # a full disk mostly has room for an empty file; else the others time out
                write_new(self.folder / f"{_FAILED}{who}", b"")

    def get(self, name: str, sender: str) -> bytes:
        """Wait for a message.

        Args:
            name: Its name.
            sender: Who is to write it, for the error.

        Raises:
            Stopped: A rank failed.
            Incomplete: It did not come in time.
        """
        with waiting_for(
            f"{sender}, whose part of {self.folder.parent.name} has not come; after {self.timeout:g} s it is given up"
        ):
            return self._awaited(name, sender)

    def _awaited(self, name: str, sender: str) -> bytes:
        end, pause = time.monotonic() + self.timeout, _FIRST_PAUSE
        while True:
            try:
                return reading.read_bytes(self.folder / name)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise StorageError(f"{self.folder / name}: cannot be read: {error}") from error
            self.check()
            if time.monotonic() > end:
                raise Incomplete(
                    f"{sender} did not deliver its part ({name}) within {self.timeout:g} s\n"
                    "It may hang or have died: look at its log. The step was not committed; older ones are untouched."
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def get_json(self, name: str, sender: str) -> dict[str, object]:
        """Wait for a message of plain values."""
        content: dict[str, object] = json.loads(self.get(name, sender))
        return content

    def check(self) -> None:
        """Stop waiting when somebody has failed.

        Raises:
            Stopped: Somebody has, or the transaction has ended.
        """
        failed = self._failed()
        if failed is not None:
            who, text = failed.name.removeprefix(_FAILED), _read(failed) or "its log says why"
            raise Stopped(f"{who} could not save: {text}")
        if self.gone():
            raise Stopped("the save was given up by the coordinating rank; its log says why")

    def _failed(self) -> Path | None:
        try:
            names = sorted(os.listdir(self.folder))
        except OSError:  # it is being removed
            return None
        return next((self.folder / name for name in names if name.startswith(_FAILED)), None)


def why_it_vanished(store: FolderStore, error: BaseException) -> Stopped | None:
    """What a rank met whose files vanished while it wrote them: mostly that rank 0 is removing a step that was given up.

    Args:
        store: The step's.
        error: What the rank met.
    """
    cause = error if isinstance(error, OSError) else error.__cause__
    # EEXIST: a folder that was there when it was to be made, and gone when that was looked at.
    if not isinstance(cause, OSError) or cause.errno not in (errno.ENOENT, errno.ESTALE, errno.EEXIST):
        return None
    end = time.monotonic() + _REMOVAL_S
    while time.monotonic() < end:
        try:
            store.check()
        except Stopped as stopped:
            return stopped
        time.sleep(_LONGEST_PAUSE)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        return f"({error})"


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
    """

    files: Mapping[str, FileEntry]
    roles: tuple[Mapping[str, str], ...] = ()
    live: Mapping[str, object] = field(default_factory=dict)
    contributed: Mapping[str, int] = field(default_factory=dict)
    taken: Mapping[str, int] = field(default_factory=dict)
    host: str = ""

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        files = {path: [entry.nbytes, entry.crc32] for path, entry in self.files.items()}
        named = {name: dict(getattr(self, name)) for name in ("live", "contributed", "taken")}
        return {"files": files, "roles": [dict(role) for role in self.roles], "host": self.host, **named}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RankPart:
        """:meth:`as_json` read the other way."""
        files = {path: FileEntry(*entry) for path, entry in content["files"].items()}
        named = {name: content[name] for name in ("live", "contributed", "taken", "host")}
        return cls(files, tuple(content["roles"]), **named)


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
    """

    root: Path
    step: int
    id: str
    part: str
    timeout: float
    fsync: bool = True
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
    def _places(self) -> Places:
        return Places(self.target, self.id)

    @property
    def store(self) -> FolderStore:
        """Where ranks leave messages until the commit."""
        return FolderStore(self.folder / PARTS, self.timeout, self._ended)

    @property
    def _word(self) -> Path:
        return self.root / f"{WORD}{self.id}"

    def _ended(self) -> bool:
        """The coordinator has cleaned up, or published; the folder was there before, see :meth:`join`."""
        return self._publication is None and not self.folder.is_dir()

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

    def join(self) -> None:
        """Wait until the coordinator has made the folder.

        Raises:
            Incomplete: It has not, in time.
            Stopped: It has given up already.
        """
        with waiting_for(
            f"the coordinating rank, which has not begun {self.target}; after {self.timeout:g} s the save is given up"
        ):
            self._begun()

    def _begun(self) -> None:
        end = time.monotonic() + self.timeout
        while not (self.folder / PARTS).is_dir():
            if self._word.exists():
                raise Stopped(f"the save was given up by the coordinating rank: {reading.read_text(self._word)}")
            if time.monotonic() > end:
                raise Incomplete(
                    f"{self.folder}: the coordinating rank did not start the save within {self.timeout:g} s"
                )
            time.sleep(0.005)

    def deliver(self, part: RankPart) -> None:
        """Say that this rank has written, and synced, everything."""
        self.store.set_json(f"part-{self.part}.json", part.as_json())

    def parts(self, expected: Iterable[str]) -> dict[str, RankPart]:
        """Wait for the parts of others.

        Raises:
            CheckpointError: One of them failed, or did not come.
        """
        return {name: RankPart.from_json(self.store.get_json(f"part-{name}.json", f"rank {name}")) for name in expected}

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
        with suppress(OSError):  # every world has joined this one, and none waits for an earlier one any more
            for old in self.root.glob(f"{WORD}*"):
                remove(old)
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
        with suppress(CheckpointError, OSError):
            if word and not self._word.exists():
                replace_text(self._word, word, fsync=False)
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
        while not self._is_published():
            try:
                self.store.check()
            except Stopped:
                if self._is_published():  # the folder was renamed between the two looks
                    return
                raise
            if time.monotonic() > end:
                raise Incomplete(f"{self.target}: was not committed within {patience:g} s\nLook at the log of rank 0.")
            time.sleep(0.01)

    def _is_published(self) -> bool:
        """As far as can be told: what cannot be read is looked at again."""
        with suppress(Unreadable):
            return self._places.is_published(MANIFEST)
        return False
