"""One save through :mod:`.v2`, as one rank sees it: files go into a hidden folder, or under a prefix, until the first rank publishes them.

No rank hears of another one's files before all have written them: so all find the place by a word that follows from the run and from what
is at the target now, and each leaves a note of every file that is whole. What has no note was not written to its end, and is not published.
"""

from __future__ import annotations

import io
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from mcore_rlhf.convert import is_checkpoint
from mcore_rlhf.errors import CheckpointError, Incomplete, Problems, StorageError, log_of
from mcore_rlhf.storage.beneath import make_folder, move, open_new, remove, remove_beneath
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.manifest import FileEntry, Manifest
from mcore_rlhf.storage.notes import FolderNotes, Notes
from mcore_rlhf.storage.paths import storage_error
from mcore_rlhf.storage.patience import names_in
from mcore_rlhf.storage.publish import MANIFEST_NAME, LocalPublication
from mcore_rlhf.storage.transactions import Lock, TransactionPaths
from mcore_rlhf.storage.upload import StorePublication, object_store
from mcore_rlhf.storage.uploaded import UploadedStream

from .targets import FolderTarget, SaveTarget, StoreTarget, manifest_of, require_whole

if TYPE_CHECKING:
    from typing_extensions import Buffer

LOG = log_of("mcore_rlhf.dcp")
_NOTES = ".notes"
PATIENCE_S = 600.0
"""How long a rank waits for the first one; torch_checkpointing's ranks wait so long for each other."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that save together.

    Args:
        word: What no other run is called; of the form of a transaction's id.
        rank: This one.
        world: How many they are.
    """

    word: str
    rank: int = 0
    world: int = 1


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A rank's note of a file that is whole."""

    rank: int
    name: str
    nbytes: int
    crc32: int


class Saving(ABC):
    """A save that goes on.

    Args:
        run: Who saves.
        word: By which all ranks find the place.
    """

    def __init__(self, run: Ranks, word: str) -> None:
        self._run, self.word = run, word
        self.wrote = False

    @property
    @abstractmethod
    def notes(self) -> Notes:
        """Those of all ranks."""

    @abstractmethod
    def _open(self, name: str, nbytes: int) -> NotedStream:
        """A new file, over one of an earlier try."""

    @abstractmethod
    def publish(self, *, overwrite: bool, fsync: bool) -> None:
        """Have what was saved appear, once every rank has written; on the first rank.

        Raises:
            CheckpointError: A rank's files are not there, or it could not be published; what was there before is still there.
        """

    def stream(self, name: str, nbytes: int = 0) -> NotedStream:
        """A file of this rank's.

        Args:
            name: Below the target.
            nbytes: How long it is at most, nearly; 0 where nobody knows.
        """
        self.wrote = True
        about = f"{self._run.rank}-{sha1(name.encode(), usedforsecurity=False).hexdigest()}"

        def whole(entry: FileEntry) -> None:
            self.notes.say(about, WrittenFile(self._run.rank, name, entry.nbytes, entry.crc32))

        stream = self._open(name, nbytes)
        stream.whole = whole
        return stream

    def entries(self, target: object) -> dict[str, FileEntry]:
        """The files of all ranks, by their notes.

        Raises:
            Incomplete: A rank has left none.
            StorageError: Two ranks have written the same file.
        """
        said = [one for name in self.notes.list() if (one := self.notes.said(WrittenFile, name)) is not None]
        problems, owners = Problems(), dict[str, int]()
        for rank in sorted({*range(self._run.world)} - {one.rank for one in said}):
            problems.add(
                Incomplete, f"{target}: not saved: nothing of rank {rank} is there, of {self._run.world}",
                "Do all ranks see one file system or store, and save by configurations that were made alike?",
            )  # fmt: skip
        for one in said:
            if owners.setdefault(one.name, one.rank) != one.rank:
                text = f"{target}: not saved: rank {owners[one.name]} and rank {one.rank} have both written {one.name}"
                problems.add(StorageError, text, "Give the item a layout with {rank} in it.")
        problems.raise_if_any()
        return {one.name: FileEntry(one.nbytes, one.crc32) for one in said}


def begin(target: SaveTarget, run: Ranks, *, overwrite: bool, before: Saving | None) -> Saving:
    """Begin a save, or go on with one that failed, on any rank.

    Args:
        target: Where it is to appear.
        run: Who saves.
        overwrite: Whether a checkpoint that is there may be replaced.
        before: This rank's last save there.

    Raises:
        StorageError: What is there may not be replaced, or nothing can be written there.
    """
    target.forget()
    until = time.monotonic() + PATIENCE_S / 10
    # A rank that hurries is back before the first one has published; after a failed save nothing more comes.
    while True:
        word = _word(target, run)
        if run.rank == 0 or before is None or not before.wrote or before.word != word or time.monotonic() > until:
            break
        time.sleep(0.05)
    if not overwrite and target.is_taken():
        raise StorageError(f"{target.path}: exists already.\nSave under another name, or with overwrite=True.")
    if isinstance(target, StoreTarget):
        return _InStore(target, run, word)
    assert isinstance(target, FolderTarget)
    return _InFolder(target, run, word)


def _word(target: SaveTarget, run: Ranks) -> str:
    """Of a run and of what is at the target now: who replaces that has ended the save."""
    if isinstance(target, StoreTarget):
        there = StorePublication(target.path).before()
    else:
        there = ""
        with suppress(CheckpointError, OSError):
            there = Manifest.read(target.path / MANIFEST_NAME).transaction
    return f"{run.word.partition('-')[0]}-{crc32(f'{run.word}/{target.path.name}/{there}'.encode()):08x}"


class _InFolder(Saving):
    """On a file system that all ranks share. The first rank's lock says that somebody is alive: the others wait for its folder."""

    def __init__(self, target: FolderTarget, run: Ranks, word: str) -> None:
        super().__init__(run, word)
        self._target, self._places = target.path, TransactionPaths(target.path, word)
        self._folder = self._places.staging
        self._lock: Lock | None = None
        if run.rank == 0:
            self._make(target)
        else:
            self._wait()

    def _make(self, target: FolderTarget) -> None:
        try:
            make_folder(self._target.parent)
        except OSError as error:
            raise storage_error(error, self._target.parent, "create") from error
        for line in target.clean_up():
            LOG.info("%s", line)
        if not self._places.lock.exists():  # else a save of this process failed, and its lock is held still
            self._lock = Lock(self._places.lock)
        make_folder(self._folder / _NOTES)

    def _wait(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while _NOTES not in (names_in(self._folder) if self._folder.is_dir() else ()):
            if time.monotonic() > until:
                raise StorageError(
                    f"{self._folder}: is not there, where rank 0 makes it\nDo all ranks see one file system?"
                )
            time.sleep(0.02)

    @property
    def notes(self) -> FolderNotes:
        """See :attr:`Saving.notes`."""
        return FolderNotes(self._folder / _NOTES)

    def _open(self, name: str, nbytes: int) -> NotedStream:
        path = self._folder / name
        try:
            make_folder(path.parent)
            remove_beneath(self._folder, name)
            return NotedStream(_LocalFile(open_new(path)))
        except OSError as error:
            raise storage_error(error, path, "create") from error

    def publish(self, *, overwrite: bool, fsync: bool) -> None:
        """See :meth:`Saving.publish`."""
        entries = self.entries(self._target)
        for parent, _, names in os.walk(self._folder):
            for name in (Path(parent, one).relative_to(self._folder).as_posix() for one in names):
                if name not in entries:
                    remove_beneath(self._folder, name)
        remove(self._folder / _NOTES)
        for name, entry in entries.items():
            require_whole(self._folder / name, entry)
        with LocalPublication(self._target, overwrite, fsync, is_checkpoint) as publication:
            move(self._folder, publication.staging)
            if self._lock is not None:
                self._lock.release()
            publication.commit(manifest_of(self._target.name, entries, self._run.world))


class _InStore(Saving):
    """In an object store: a prefix that no manifest names yet."""

    def __init__(self, target: StoreTarget, run: Ranks, word: str) -> None:
        super().__init__(run, word)
        self._target, self._store = target.path, object_store(target.path)

    def _publication(self, overwrite: bool) -> StorePublication:
        return StorePublication(self._target, overwrite, is_checkpoint, transaction=self.word, goes_on=True)

    @property
    def notes(self) -> Notes:
        """See :attr:`Saving.notes`."""
        return self._publication(False).notes

    def _open(self, name: str, nbytes: int) -> NotedStream:
        key = f"{self._target.path}/{self._publication(False).prefix}/{name}"
        return NotedStream(UploadedStream(self._store, key, nbytes))

    def publish(self, *, overwrite: bool, fsync: bool) -> None:
        """See :meth:`Saving.publish`; a store has everything when it says so."""
        entries = self.entries(self._target)
        with self._publication(overwrite) as publication:
            publication.commit(manifest_of(self._target.name, entries, self._run.world))
            with suppress(CheckpointError, OSError):  # it is published: `prune --dead` removes them
                publication.notes.remove("*")


class NotedStream(io.RawIOBase):
    """A file that somebody else writes from its front to its end; it is noted once it was closed without an error.

    Args:
        to: Where it goes.

    Attributes:
        whole: Told of it then.
    """

    whole: Callable[[FileEntry], None]

    def __init__(self, to: _LocalFile | UploadedStream) -> None:
        super().__init__()
        self._to, self._ended = to, False

    def write(self, data: Buffer) -> int:
        """Write what follows."""
        return self._to.write(data)

    def flush(self) -> None:
        """Nothing is seen before the end."""

    def writable(self) -> bool:
        """It is."""
        return True

    def close(self) -> None:
        """It is whole."""
        if not self._ended:
            self._ended = True
            self.whole(self._to.finish())
        super().close()

    def give_up(self) -> None:
        """Nobody will ever see it."""
        if not self._ended:
            self._ended = True
            self._to.abort()

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None:
            self.give_up()
        self.close()

    def __del__(self) -> None:
        self.give_up()  # what was left open is not whole


class _LocalFile:
    """A file of a folder, with the checksum of what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._nbytes, self._crc = file, 0, 0

    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._crc = crc32(view, self._crc)
        self._nbytes += len(view)
        return len(view)

    def finish(self) -> FileEntry:
        self._file.close()
        return FileEntry(self._nbytes, self._crc)

    def abort(self) -> None:
        with suppress(OSError):
            self._file.close()
