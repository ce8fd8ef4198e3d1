"""Publishing a folder: written aside, checked, renamed once. Either all of it is there, or nothing. See :mod:`.transactions`."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path
from types import TracebackType

from ..errors import StorageError, Unreadable
from .beneath import make_folder, new_folder, remove, remove_beneath, write_new, write_over
from .destination import WENT_ON, LocalFolder, Publication
from .manifest import Manifest
from .notes import FileNotes, Notes
from .paths import human, local_path, real_path, refused, storage_error, walk
from .patience import age_s
from .record_file import Layout, RecordFile
from .transactions import MANIFEST_NAME as MANIFEST_NAME
from .transactions import (
    Lock,
    TransactionPaths,
    dead,
    enter,
    new_transaction,
    occupants,
    place_of,
    recover,
    removed,
    settle,
)

_MOMENT_S = 60.0
"""How old a file that is there for a moment only must be to be a dead process's."""


def _never(_path: Path) -> bool:
    return False


@dataclass(slots=True)
class LocalPublication(Publication):
    """See :class:`Publication`; of the file system: written into a hidden folder beside the target, and renamed.

    Args:
        target: The folder to publish. An empty folder there counts as none.
        overwrite: Whether an existing folder may be replaced.
        fsync: Whether everything is on the disk before it appears.
        replaceable: Says whether an existing folder is one that may be deleted (a checkpoint, not a home
            folder).
        manifest_name: Name of the manifest in the folder.
        resumable: Whether what a killed process left is kept at first, for :meth:`resume` to go on with.
    """

    target: Path
    overwrite: bool = False
    fsync: bool = True
    replaceable: Callable[[Path], bool] = _never
    manifest_name: str = MANIFEST_NAME
    transaction: str = field(default_factory=new_transaction)
    recovered: list[str] = field(default_factory=list)
    resumable: bool = False
    _lock: Lock | None = None
    _made: tuple[Path, ...] = ()
    _into: LocalFolder | None = None

    def __post_init__(self) -> None:
        self.target = Path(os.path.abspath(local_path(self.target)))

    @property
    def staging(self) -> Path:
        """The hidden folder to write into."""
        return self._places.staging

    @property
    def _places(self) -> TransactionPaths:
        return TransactionPaths(self.target, self.transaction)

    def __enter__(self) -> LocalPublication:
        """See :meth:`Publication.__enter__`; makes the staging folder."""
        self._check_above()
        try:
            self._made = tuple(path for path in self.target.parents if not path.exists())
            make_folder(self.target.parent)
            self.recovered = recover(self.target, self.manifest_name, resumable=not self.resumable)
            self._check_recovered()
            self._lock = Lock(self._places.lock)
            new_folder(self.staging)
        except BaseException as error:
            self._clean_up()
            if isinstance(error, OSError):
                raise storage_error(error, self.staging, "create") from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clean_up()

    def _place(self) -> tuple[object, Collection[str]]:
        return self.target, (self.manifest_name,)

    def _folder(self) -> LocalFolder:
        if self._into is None or self._into.root != self.staging:
            self._into = LocalFolder(self.staging, own=True)
        return self._into

    def _writer(self, file: str, layout: Layout) -> RecordFile:
        return self._folder()._writer(file, layout)

    def _again(self, file: str) -> Iterator[memoryview]:
        return self._folder()._again(file)

    def _linked(self, file: Path, name: str) -> bool:
        return self._folder().linked(file, name)

    @property
    def left(self) -> str:
        """See :attr:`Publication.left`."""
        return f"beside the target, in {self.staging.name}"

    def resume(self, plan: str, why_not: Callable[[Notes], str]) -> Notes | None:
        """See :meth:`Publication.resume`."""
        taken = False
        for places, fd in dead(self.target) if self.resumable else ():
            why = (why_not(FileNotes(places.journal)) if places.resumable else "it was left half-written") or (
                "another one is gone on with" if taken else ""
            )
            if why:
                self.recovered += removed(places, self.manifest_name, f", and not gone on with: {why}")
                os.close(fd)
                continue
            self._clean_up()
            self.transaction, self._lock, taken = places.transaction, Lock(places.lock, fd), True
            self.recovered.append(f"went on in {places.staging}{WENT_ON}")
        return self._journal() if self.resumable else None

    def _journal(self) -> FileNotes:
        notes = FileNotes(self._places.journal, self.fsync)
        try:
            notes.open()
            if self.fsync:
                sync_folder(notes.path.parent)
        except OSError as error:
            notes.close()
            raise storage_error(error, notes.path, "write") from error
        return notes

    def versions(self) -> dict[str, tuple[int, str]]:
        """See :meth:`Publication.versions`."""
        return self._folder().versions()

    def version(self, file: str) -> str:
        """See :meth:`Publication.version`."""
        return self._folder().version(file)

    def keep(self, noted: Mapping[str, tuple[int, str]]) -> set[str]:
        """See :meth:`Publication.keep`."""
        kept = Publication.keep(self, noted)
        for parent, _, names in os.walk(self.staging):
            for name in (Path(parent, name).relative_to(self.staging).as_posix() for name in names):
                if name not in kept:
                    remove_beneath(self.staging, name)
        return kept

    def leave(self) -> None:
        """See :meth:`Publication.leave`."""
        if self._lock is not None:
            self._lock.let_go()
            self._lock, self._made = None, ()

    def check_space(self, nbytes: int) -> None:
        """See :meth:`Publication.check_space`."""
        check_space(place_of(self.target), nbytes)

    def commit(self, manifest: Manifest) -> Path:
        """See :meth:`Publication.commit`."""
        try:
            text = replace(manifest, transaction=self.transaction).to_json()
            write_new(self.staging / self.manifest_name, text.encode())
            if self.fsync:
                sync_tree(self.staging)
            self._publish()
        except OSError as error:
            # A retry of the network file system can report a done rename as failed: look, do not believe.
            if not self._places.is_published(self.manifest_name):
                raise storage_error(error, self.target, "publish") from error
        if not self._places.is_published(self.manifest_name):
            raise StorageError(
                f"{self.target}: was published, and {self.manifest_name} in it is gone, or another's\nDoes somebody else write there?"
            )
        self._clean_up()
        return self.target

    def _publish(self) -> None:
        self.check_target()
        if os.path.ismount(self.target):
            self._enter()
            return
        if self.target.is_dir() and any(self.target.iterdir()):
            if self.fsync and self._lock is not None:  # without it, nobody would know what lies aside
                self._lock.sync()
                sync_folder(self.target.parent)
            os.rename(self.target, self._places.old)
        os.rename(self.staging, self.target)
        if self.fsync:
            sync_folder(self.target.parent)

    def _enter(self) -> None:
        os.rename(self.staging, self._places.entering)
        if self.fsync:
            sync_folder(self.target)
        enter(self._places, self.manifest_name)
        if self.fsync:
            sync_folder(self.target)

    def _check_recovered(self) -> None:
        """See :meth:`check_target`; what is there may be what was just brought to its end."""
        try:
            self.check_target()
        except StorageError as error:
            raise StorageError("\n".join((str(error), *self.recovered))) from error.__cause__

    def _check_above(self) -> None:
        above = next(folder for folder in self.target.parents if folder.exists())
        if not above.is_dir():
            raise StorageError(f"{above}: is a file; {self.target} is to be written below it.\nChoose another name.")

    def check_target(self) -> None:
        """Refuse a target that may not be replaced.

        Raises:
            StorageError: It may not.
        """
        target = self.target
        if target.is_symlink():
            raise StorageError(f"{target}: is a symbolic link.\nGive the folder it points to: {real_path(target)}")
        if target.exists() and not target.is_dir():
            raise StorageError(f"{target}: is a file; a folder is to be written there.\nChoose another name.")
        if not target.is_dir() or not occupants(target):
            return
        if os.path.ismount(target):
            raise StorageError(
                f"{target}: is a mount point that is not empty; what is in it cannot be replaced by one rename\n"
                f"Choose a folder in it, such as {target / 'checkpoint'}."
            )
        if not self.overwrite:
            raise StorageError(f"{target}: exists already.\nChoose another target, or give --overwrite.")
        if not self.replaceable(target):
            raise StorageError(
                f"{target}: exists and does not look like a checkpoint; not even --overwrite replaces it.\n"
                "Choose another target, or remove the folder yourself."
            )

    def _clean_up(self) -> None:
        """Settle what this transaction left, whether it was committed or not, then let the lock go."""
        if self._lock is not None:
            try:
                settle(self._places, self.manifest_name)
                self._lock.release()
            except (OSError, Unreadable):
                self._lock.let_go()  # the file stays, so that the next start cleans up
            self._lock = None
        for folder in self._made:  # made for the target, and empty where that is not there
            with suppress(OSError):
                folder.rmdir()


def replace_text(path: Path, text: str | bytes, *, fsync: bool = True) -> None:
    """Write a small text file anew: aside, then renamed over what was there.

    Args:
        path: The file; its folder exists.
        text: Its content, stored as UTF-8, or what it is byte for byte.
        fsync: Whether it is on the disk when the call returns.

    Raises:
        StorageError: The file system refused; what was there before is still there.
    """
    try:
        write_over(path, text.encode("utf-8") if isinstance(text, str) else text, fsync=fsync)
        if fsync:
            sync_folder(path.parent)
    except OSError as error:
        raise storage_error(error, path, "write") from error
    remove_unrenamed(path.parent, escape(path.name))


def remove_unrenamed(folder: Path, name: str = "*") -> list[Path]:
    """Remove texts that were about to be renamed when their writer was killed.

    Args:
        folder: Where they lie.
        name: Of the file that they were to become; a pattern.

    Returns:
        Those that were removed: for a minute another one may be at work.
    """
    gone = []
    with suppress(OSError):  # what is there already is whole
        for path in folder.glob(f".{name}.tmp-{'[0-9a-f]' * 16}"):
            if path.is_file() and age_s(path) > _MOMENT_S and remove(path):
                gone.append(path)
    return gone


def sync_tree(folder: Path) -> None:
    """Wait until every file and folder below, and the folder itself, is on the disk.

    Raises:
        OSError: The disk failed.
        Unreadable: Nobody can say what is to be waited for.
    """
    for parent, names in reversed(list(walk(folder, refused))):  # what is in a folder before the folder
        for name in names:
            sync_file(parent / name)
        sync_folder(parent)


def sync_file(path: Path) -> None:
    """Wait until what a file holds is on the disk."""
    _sync(path, os.O_RDONLY)


def sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder_of(path: Path) -> None:
    """Make the folder that a file is to lie in.

    Raises:
        StorageError: The file system refuses.
    """
    try:
        make_folder(path.absolute().parent)
    except OSError as error:
        raise storage_error(error, path.parent, "create") from error


def check_space(folder: Path, nbytes: int) -> None:
    """Refuse early what cannot fit.

    Args:
        folder: Where it will be written; it need not exist yet.
        nbytes: How much.

    Raises:
        StorageError: Less is free.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if nbytes > free:
        raise StorageError(
            f"{folder}: {human(nbytes)} are needed, but only {human(free)} are free there.\n"
            "Free some space, or choose a target on another disk."
        ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
