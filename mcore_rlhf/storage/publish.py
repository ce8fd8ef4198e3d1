"""Publishing a folder: written aside, checked, renamed once. Either all of it is there, or nothing.

Replacing an existing folder takes two renames (the old one aside, the new one in place). A crash between the
two leaves neither at the target; the next :class:`LocalPublication` or :func:`recover` of the same
target puts the old one back.

For a target ``out`` a transaction uses, all in the same parent, so that a rename suffices:

* ``.out.lock-<id>``     a file, locked with ``flock`` for as long as the writer lives; holds its host's name
* ``.out.partial-<id>``  the folder being written
* ``.out.old-<id>``      what was at ``out`` before, while it is being replaced

The lock is made first and removed last. So after a crash every leftover has a lock file that nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from ..errors import CheckpointError, StorageError
from .destination import LocalFolder, Publication
from .manifest import Manifest
from .paths import human, local_path, real_path, storage_error
from .record_file import Layout, RecordFile

MANIFEST_NAME = "mcore_rlhf.json"
_PAUSES = (0.01, 0.05, 0.2, 0.5, 1.0)
_FOREIGN_PATIENCE_S = 24 * 3600
"""A lock of another host may be held although it seems free: some network file systems lock per host only."""


@dataclass(frozen=True, slots=True)
class Places:
    """The names that one transaction uses.

    Args:
        target: What is published.
        transaction: The transaction's id.
    """

    target: Path
    transaction: str

    def _beside(self, what: str) -> Path:
        return self.target.with_name(f".{self.target.name}.{what}-{self.transaction}")

    @property
    def lock(self) -> Path:
        """The lock file."""
        return self._beside("lock")

    @property
    def staging(self) -> Path:
        """The folder being written."""
        return self._beside("partial")

    @property
    def doomed(self) -> Path:
        """The folder that was being written, while it is removed."""
        return self.staging.with_name(f"{self.staging.name}~")

    @property
    def old(self) -> Path:
        """What the target was before."""
        return self._beside("old")

    def is_published(self, manifest_name: str = MANIFEST_NAME) -> bool:
        """Whether the target is what this transaction wrote: asked of the file system, not remembered."""
        try:
            return Manifest.read(self.target / manifest_name).transaction == self.transaction
        except CheckpointError:
            return False


def new_transaction() -> str:
    """An id that no other transaction has; later ones sort later."""
    return f"{time.time_ns() // 1_000_000:013d}-{os.urandom(4).hex()}"


class Lock:
    """A lock file that is held until :meth:`release`, or until the process dies.

    Args:
        path: The file, which must not exist.

    Raises:
        StorageError: It cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise storage_error(error, path, "create") from error
        try:
            os.write(self._fd, os.uname().nodename.encode())
        except OSError as error:
            self.release()  # an empty lock would pass for that of another host
            raise storage_error(error, path, "create") from error
        _try_lock(self._fd)  # without flock on this file system, nobody else will think that we are dead either
        _HELD.add(self)

    def release(self) -> None:
        """Remove the file and let go."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)
            self.let_go()

    def let_go(self) -> None:
        """Let go, and leave the file: whoever comes next cleans up."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked child, such as a data loader's worker, may outlive the writer and must not pass for it."""
    for lock in list(_HELD):
        lock.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held, or not supported here
        return False
    return True


def recover(target: Path, manifest_name: str = MANIFEST_NAME) -> list[str]:
    """Clean up what dead processes left beside a target. Safe at any time, in any number of processes.

    A half-written folder is removed. An old target that was moved aside is put back where nothing was
    published, and removed where the new one was.

    Returns:
        What was done, one line each.
    """
    done: list[str] = []
    prefix = f".{target.name}.lock-"
    for lock in sorted(target.parent.glob(f"{_escaped(prefix)}*")) if target.parent.is_dir() else ():
        places = Places(target, lock.name.removeprefix(prefix))
        fd = _lock_of_the_dead(lock)
        if fd is None:
            continue
        try:
            done += settle(places, manifest_name)
            lock.unlink(missing_ok=True)
        except OSError as error:
            done.append(f"could not clean up {places.staging}: {error}")
        finally:
            os.close(fd)
    return done


def settle(places: Places, manifest_name: str = MANIFEST_NAME) -> Iterator[str]:
    """Bring a transaction that has ended, in whatever way, to all or nothing.

    Returns:
        What was done, one line each.
    """
    return iter(list(_settle(places, manifest_name)))


def _settle(places: Places, manifest_name: str) -> Iterator[str]:
    if places.old.exists():
        if places.is_published(manifest_name):
            shutil.rmtree(places.old)
            yield f"removed {places.old}: what {places.target} was before it was replaced"
        elif not _is_occupied(places.target):
            os.rename(places.old, places.target)
            yield f"put {places.target} back: its replacement was interrupted"
        else:  # somebody made a new target meanwhile: both are kept
            yield f"kept {places.old}: {places.target} was made anew by someone else"
    if places.staging.exists() or places.doomed.exists():
        _remove_staging(places)
        yield f"removed {places.staging}: it was left half-written"


def _remove_staging(places: Places) -> None:
    """By another name: other ranks that still write there see at once that it was given up, and add nothing to it."""
    _remove_tree(places.doomed)
    with suppress(OSError):
        os.rename(places.staging, places.doomed)
    _remove_tree(places.doomed)
    _remove_tree(places.staging)


def _remove_tree(folder: Path) -> None:
    """On a network file system, what others have open goes when they close it."""
    for pause in (*_PAUSES, None):
        try:
            shutil.rmtree(folder)
            return
        except FileNotFoundError:
            if not folder.exists():
                return
        except OSError:
            if pause is None:
                raise
        time.sleep(pause or 0)


def _is_occupied(target: Path) -> bool:
    return target.is_symlink() or target.is_file() or (target.is_dir() and any(target.iterdir()))


def _lock_of_the_dead(path: Path) -> int | None:
    """Take over the lock of a process that is dead; None where it may be alive."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        host = os.read(fd, 256).decode(errors="replace")
        foreign = host != os.uname().nodename and time.time() - path.stat().st_mtime < _FOREIGN_PATIENCE_S
        if not foreign and _try_lock(fd) and os.fstat(fd).st_ino == path.stat().st_ino:
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _escaped(name: str) -> str:
    """For glob."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)


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
    """

    target: Path
    overwrite: bool = False
    fsync: bool = True
    replaceable: Callable[[Path], bool] = _never
    manifest_name: str = MANIFEST_NAME
    transaction: str = field(default_factory=new_transaction)
    recovered: list[str] = field(default_factory=list)
    _lock: Lock | None = None
    _made: tuple[Path, ...] = ()

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
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.recovered = recover(self.target, self.manifest_name)
            self._check_target()
            self._lock = Lock(self._places.lock)
            self.staging.mkdir()
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

    def writer(self, file: str, layout: Layout) -> RecordFile:
        """See :meth:`.destination.Destination.writer`."""
        return LocalFolder(self.staging).writer(file, layout)

    def sha256(self, file: str) -> str:
        """See :meth:`.destination.Destination.sha256`."""
        return LocalFolder(self.staging).sha256(file)

    def check_space(self, nbytes: int) -> None:
        """See :meth:`Publication.check_space`."""
        check_space(self.target.parent, nbytes)

    def commit(self, manifest: Manifest) -> Path:
        """See :meth:`Publication.commit`."""
        try:
            text = replace(manifest, transaction=self.transaction).to_json()
            (self.staging / self.manifest_name).write_text(text, encoding="utf-8")
            if self.fsync:
                sync_tree(self.staging)
            self._publish()
        except OSError as error:
            # A retry of the network file system can report a done rename as failed: look, do not believe.
            if not self._places.is_published(self.manifest_name):
                raise storage_error(error, self.target, "publish") from error
        if not self._places.is_published(self.manifest_name):
            raise StorageError(f"{self.target}: was published, but its manifest cannot be read back.")
        self._clean_up()
        return self.target

    def _publish(self) -> None:
        self._check_target()
        if self.target.is_dir() and any(self.target.iterdir()):
            os.rename(self.target, self._places.old)
        os.rename(self.staging, self.target)
        if self.fsync:
            sync_folder(self.target.parent)

    def _check_target(self) -> None:
        target = self.target
        if target.is_symlink():
            raise StorageError(f"{target}: is a symbolic link.\nGive the folder it points to: {real_path(target)}")
        if target.exists() and not target.is_dir():
            raise StorageError(f"{target}: is a file; a folder is to be written there.\nChoose another name.")
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
            except OSError:
                self._lock.let_go()  # the file stays, so that the next start cleans up
            self._lock = None
        for folder in self._made:  # made for the target, and empty where that is not there
            with suppress(OSError):
                folder.rmdir()


def write_new(path: Path, data: bytes) -> None:
    """Write a small file that is not there yet; a link in its place could lead to any file of the user's.

    Raises:
        FileExistsError: Something is, be it a link that leads nowhere.
        OSError: It cannot be written.
    """
    with path.open("xb") as file:
        file.write(data)


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
        )
