"""Where a save of torch's goes: a folder, which appears by one rename, or a prefix of a store, which its manifest publishes.

torch's writer makes its files through an object with seven methods. Source: torch 2.13.0, ``distributed/checkpoint/filesystem.py``
(``FileSystemBase``; ``_FileSystemWriter.write_data`` and ``finish`` say what is asked of it).
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemBase

from mcore_rlhf.convert import is_checkpoint
from mcore_rlhf.errors import Incomplete, StorageError, UsageError
from mcore_rlhf.storage.manifest import PREFIX, FileEntry, Manifest, entry_of, provenance
from mcore_rlhf.storage.objects import ObjectStore
from mcore_rlhf.storage.paths import ReadablePath, local_path, url_in
from mcore_rlhf.storage.patience import names_in
from mcore_rlhf.storage.publish import LocalPublication
from mcore_rlhf.storage.settings import SCHEMES
from mcore_rlhf.storage.store import StorePath
from mcore_rlhf.storage.transactions import occupants, recover_in
from mcore_rlhf.storage.upload import StorePublication, keys, object_store
from mcore_rlhf.storage.uploaded import UploadedStream
from mcore_rlhf.storage.urls import checkpoint_path
from mcore_rlhf.trainers.known import called_so

_TMP = ".tmp"
"""What torch calls a file by until it is whole, which a store has of every file."""


class Files(FileSystemBase):
    """The files of one save, as torch's writer makes them on one rank.

    Attributes:
        root: What torch is to put their names to.
    """

    root: str | os.PathLike[str]

    @abstractmethod
    def written(self, beginning: str) -> Mapping[str, FileEntry]:
        """What lies here under names that begin so, and was written on this rank."""

    def check(self, files: Mapping[str, FileEntry]) -> None:
        """See that every rank's files are here, as long as it said.

        Raises:
            Incomplete: One is not.
        """


class SaveTarget(ABC):
    """What a save is to make, as every rank sees it.

    Attributes:
        path: Where it lies.
        waits: Whether its files can wait for the disk.
    """

    path: ReadablePath
    waits: bool

    @property
    @abstractmethod
    def id(self) -> str | os.PathLike[str]:
        """What torch calls it."""

    @abstractmethod
    def forget(self) -> None:
        """A new save begins: what was known of it is asked again, and a store that did not answer."""

    @abstractmethod
    def clean_up(self) -> list[str]:
        """Remove what dead saves have left beside it; what was done, one line each."""

    @abstractmethod
    def is_taken(self) -> bool:
        """Whether something lies there."""

    @abstractmethod
    def begin(self, *, overwrite: bool, fsync: bool) -> tuple[LocalPublication | StorePublication, str]:
        """Begin a save, on the coordinating rank.

        Returns:
            What publishes it, and a word by which another rank finds it.

        Raises:
            StorageError: What is there may not be replaced, or nothing can be written there.
        """

    @abstractmethod
    def current(self, word: str) -> str:
        """The word of the save that goes on, where a planner that keeps its plans gives that of an earlier one.

        Raises:
            StorageError: No save goes on.
        """

    @abstractmethod
    def files(self, word: str, nbytes: int = 0) -> Files:
        """Where a rank's files go.

        Args:
            word: That of the save.
            nbytes: How long one is at most, nearly.
        """


def manifest_of(name: str, files: Mapping[str, FileEntry], ranks: int) -> Manifest:
    """What is published with a folder; where it is called as some trainer calls its steps, it is that step.

    Args:
        name: What the folder is called.
        files: Of all ranks.
        ranks: How many they are.
    """
    step = next((number for _, number in called_so(name)), None)
    return Manifest(files, step=step, provenance=provenance(ranks=ranks))


def target_of(given: str | os.PathLike[str]) -> SaveTarget:
    """What a user names.

    Raises:
        UsageError: It is a URL under which nothing can be written.
    """
    url = url_in(given)
    if url is None or url.lower().startswith("file:"):
        return FolderTarget(Path(os.path.abspath(local_path(given))))
    if url.partition(":")[0] not in SCHEMES:
        raise UsageError(
            f"{url}: is a URL under which nothing can be written\nSave to a folder, or to {', '.join(SCHEMES)}."
        )
    path = checkpoint_path(url)
    assert isinstance(path, StorePath)
    if not path.name:
        raise UsageError(f"{path}: is a whole bucket\nName a folder in it.")
    return StoreTarget(path)


@dataclass(frozen=True, slots=True)
class FolderTarget(SaveTarget):
    """A folder, on a file system that all ranks share."""

    path: Path
    waits = True

    @property
    def id(self) -> Path:
        """See :attr:`SaveTarget.id`."""
        return self.path

    def forget(self) -> None:
        """See :meth:`SaveTarget.forget`: nothing is kept."""

    def clean_up(self) -> list[str]:
        """See :meth:`SaveTarget.clean_up`."""
        return recover_in(self.path.parent)

    def is_taken(self) -> bool:
        """See :meth:`SaveTarget.is_taken`."""
        return self.path.is_dir() and bool(occupants(self.path))

    def begin(self, *, overwrite: bool, fsync: bool) -> tuple[LocalPublication, str]:
        """See :meth:`SaveTarget.begin`."""
        publication = LocalPublication(self.path, overwrite, fsync, is_checkpoint)
        publication.__enter__()
        return publication, str(publication.staging)

    def current(self, word: str) -> str:
        """See :meth:`SaveTarget.current`: then it is the newest folder there is."""
        if Path(word).is_dir():
            return word
        begun = sorted(name for name in names_in(self.path.parent) if name.startswith(f".{self.path.name}.partial-"))
        if not begun:
            raise StorageError(
                f"{word}: is not there, where the coordinating rank has made it\nDo all ranks see one file system?"
            )
        return str(self.path.parent / begun[-1])

    def files(self, word: str, nbytes: int = 0) -> Files:
        """See :meth:`SaveTarget.files`."""
        return _FolderFiles(Path(word))


class _FolderFiles(FileSystem, Files):
    """torch's own file system, in a hidden folder."""

    def __init__(self, root: Path) -> None:
        self.root: Path = root

    def written(self, beginning: str) -> dict[str, FileEntry]:
        """See :meth:`Files.written`; they are read back for their checksums."""
        files = sorted(path for path in self.root.iterdir() if path.name.startswith(beginning))
        return {path.name: entry_of(path) for path in files}

    def check(self, files: Mapping[str, FileEntry]) -> None:
        """See :meth:`Files.check`."""
        for name, entry in files.items():
            require_whole(self.root / name, entry)


def require_whole(path: Path, entry: FileEntry) -> None:
    """See that a file of another rank is there, as long as that said.

    Raises:
        Incomplete: It is not.
    """
    found = -1
    with suppress(OSError):
        found = path.stat().st_size
    if found != entry.nbytes:
        what = "is missing" if found < 0 else f"has {found} bytes"
        raise Incomplete(f"{path}: {what}; its writer reported {entry.nbytes}\nDo all ranks see one file system?")


@dataclass(frozen=True, slots=True)
class StoreTarget(SaveTarget):
    """A folder of an object store: see :mod:`mcore_rlhf.storage.upload`."""

    path: StorePath
    waits = False

    @property
    def id(self) -> str:
        """See :attr:`SaveTarget.id`."""
        return str(self.path)

    def forget(self) -> None:
        """See :meth:`SaveTarget.forget`."""
        self.path.store.forget()

    def clean_up(self) -> list[str]:
        """See :meth:`SaveTarget.clean_up`: nobody can say of a store who is dead, but after a day ``prune --dead``."""
        return []

    def is_taken(self) -> bool:
        """See :meth:`SaveTarget.is_taken`."""
        return any(True for _ in self.path.iterdir())

    def begin(self, *, overwrite: bool, fsync: bool) -> tuple[StorePublication, str]:
        """See :meth:`SaveTarget.begin`."""
        publication = StorePublication(self.path, overwrite, is_checkpoint)
        publication.__enter__()
        return publication, publication.transaction

    def current(self, word: str) -> str:
        """See :meth:`SaveTarget.current`: then it is the newest of those of which the store says that somebody sends."""
        store, sent = object_store(self.path), f"{self.path.path}/{PREFIX}"
        if store.read_whole(f"{sent}{word}.writer") is not None:
            return word
        marks = (key for key in keys(store, str(self.path.path)) if key.startswith(sent) and key.endswith(".writer"))
        names = (key.removeprefix(sent).removesuffix(".writer") for key in marks)
        begun = sorted(name for name in names if name[:1].isdigit())  # what a conversion began is called otherwise
        if not begun:
            raise StorageError(
                f"{self.path}/{PREFIX}{word}: nobody sends there, though the coordinating rank has begun\nDo all ranks see one store?"
            )
        return begun[-1]

    def files(self, word: str, nbytes: int = 0) -> Files:
        """See :meth:`SaveTarget.files`."""
        return _StoreFiles(object_store(self.path), f"{self.path.path}/{PREFIX}{word}", nbytes)


class _StoreFiles(Files):
    """Files that are sent while torch writes them; a small one of which torch says that it is not whole yet is sent when it is renamed."""

    root = ""

    def __init__(self, store: ObjectStore, folder: str, nbytes: int) -> None:
        self._store, self._folder, self._nbytes = store, folder, nbytes
        self._sent: dict[str, FileEntry] = {}
        self._unfinished: dict[str, bytes] = {}

    def written(self, beginning: str) -> dict[str, FileEntry]:
        """See :meth:`Files.written`."""
        return {name: entry for name, entry in self._sent.items() if name.startswith(beginning)}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """A new file."""
        name = os.fspath(path)
        if name.endswith(_TMP):
            with io.BytesIO() as aside:
                yield aside
                self._unfinished[name] = aside.getvalue()
            return
        with self._sending(name, self._nbytes) as stream:
            yield stream

    @contextmanager
    def _sending(self, name: str, nbytes: int) -> Iterator[UploadedStream]:
        """A file that is there once nothing has failed."""
        stream = UploadedStream(self._store, f"{self._folder}/{name}", nbytes)
        try:
            yield stream
            self._sent[name] = stream.finish()
        finally:
            stream.abort()

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """The file's name."""
        return suffix

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Send what is whole now."""
        data = self._unfinished.pop(os.fspath(path))
        with self._sending(os.fspath(new_path), len(data)) as stream:
            stream.write(data)

    def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """The path as it is."""
        return path

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """A store has no folders."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Asked of the writer, and not of its files."""
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Nothing is there before."""
        return False

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Nothing is there before."""
