"""Publishing a folder: written aside, checked, renamed once. Either all of it is there, or nothing. See :mod:`.transactions`."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from ..errors import StorageError, Unreadable
from .beneath import make_folder, new_folder, remove_beneath, write_new
from .destination import LocalFolder, Publication
from .manifest import Manifest
from .paths import human, local_path, real_path, storage_error
from .record_file import Layout, RecordFile
from .transactions import MANIFEST_NAME as MANIFEST_NAME
from .transactions import Lock, Places, dead, new_transaction, recover, removed, settle


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
    _noted_ns: int = 0
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
    def _places(self) -> Places:
        return Places(self.target, self.transaction)

    def __enter__(self) -> LocalPublication:
        """See :meth:`Publication.__enter__`; makes the staging folder."""
        try:
            self._made = tuple(path for path in self.target.parents if not path.exists())
            make_folder(self.target.parent)
            self.recovered = recover(self.target, self.manifest_name, resumable=not self.resumable)
            self.check_target()
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

    def resume(self, why_not: Callable[[Path], str]) -> Path | None:
        """See :meth:`Publication.resume`."""
        taken = False
        for places, fd in dead(self.target) if self.resumable else ():
            why = (why_not(places.journal) if places.resumable else "it was left half-written") or (
                "another one is gone on with" if taken else ""
            )
            if why:
                self.recovered += removed(places, self.manifest_name, f", and not gone on with: {why}")
                os.close(fd)
                continue
            self._clean_up()
            self.transaction, self._lock, taken = places.transaction, Lock(places.lock, fd), True
            self._noted_ns = places.journal.stat().st_mtime_ns
            self.recovered.append(f"went on in {places.staging}, which a process left that was killed")
        return self._places.journal if self.resumable else None

    def keep(self, files: Mapping[str, int]) -> set[str]:
        """See :meth:`Publication.keep`; a file that was touched after the journal's last line is not what was noted there."""
        kept: set[str] = set()
        for parent, _, names in os.walk(self.staging):
            for path in (Path(parent, name) for name in names):
                name = path.relative_to(self.staging).as_posix()
                facts = path.lstat()
                untouched = stat.S_ISREG(facts.st_mode) and facts.st_ctime_ns <= self._noted_ns
                if untouched and files.get(name) == facts.st_size:
                    kept.add(name)
                else:
                    remove_beneath(self.staging, name)
        return kept

    def leave(self) -> None:
        """See :meth:`Publication.leave`."""
        if self._lock is not None:
            self._lock.let_go()
            self._lock, self._made = None, ()

    def check_space(self, nbytes: int) -> None:
        """See :meth:`Publication.check_space`."""
        check_space(self.target.parent, nbytes)

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
        if self.target.is_dir() and any(self.target.iterdir()):
            if self.fsync and self._lock is not None:  # without it, nobody would know what lies aside
                self._lock.sync()
                sync_folder(self.target.parent)
            os.rename(self.target, self._places.old)
        os.rename(self.staging, self.target)
        if self.fsync:
            sync_folder(self.target.parent)

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
        if os.path.ismount(target):  # nothing is renamed over it, and what lies beside it is on another disk
            raise StorageError(
                f"{target}: is a mount point, and a folder appears by one rename, which cannot take its place\n"
                f"Choose a folder in it, such as {target / 'checkpoint'}."
            )
        if not target.is_dir() or not any(target.iterdir()):
            return
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


def replace_text(path: Path, text: str, *, fsync: bool = True) -> None:
    """Write a small text file anew: aside, then renamed over what was there.

    Args:
        path: The file; its folder exists.
        text: Its content, stored as UTF-8.
        fsync: Whether it is on the disk when the call returns.

    Raises:
        StorageError: The file system refused; what was there before is still there.
    """
    aside = path.with_name(f".{path.name}.tmp-{new_transaction()}")
    try:
        write_new(aside, text.encode("utf-8"))
        if fsync:
            _sync(aside, os.O_RDONLY)
        os.replace(aside, path)
        if fsync:
            sync_folder(path.parent)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise storage_error(error, path, "write") from error


def sync_tree(folder: Path) -> None:
    """Wait until every file and folder below, and the folder itself, is on the disk.

    Raises:
        OSError: The disk failed.
    """
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(Path(parent, name), os.O_RDONLY)
        sync_folder(Path(parent))


def sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
