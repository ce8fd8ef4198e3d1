"""What one transaction uses beside its target, while it writes and after it died: names, a lock, and how the living clean up.

Replacing an existing folder takes two renames (the old one aside, the new one in place). A crash between the
two leaves neither at the target; the next :class:`LocalPublication` or :func:`recover` of the same
target puts the old one back, whatever became of the lock: that costs nothing, as a writer that lived after all could
then only fail to publish.

For a target ``out`` a transaction uses, all in the same parent, so that a rename suffices:

* ``.out.lock-<id>``     a file, locked with ``flock`` for as long as the writer lives; holds its host's name
* ``.out.partial-<id>``  the folder being written
* ``.out.journal-<id>``  what of it is finished, where whoever comes after a kill may go on with it
* ``.out.old-<id>``      what was at ``out`` before, while it is being replaced
* ``.out.parts-…/``      what it is joined of, where it is; a file in it names the transaction that joins

Where the target is a mount point, no rename leads over it: the same names lie in it, and what is written enters it name by name:

* ``out/.out.entering-<id>``  the folder that is being written, complete, while its contents are moved up; the manifest goes last

Whoever comes after a kill moves the rest. Such a target is not there as a whole or not at all, but it has a manifest only when it is.

The lock is made first and removed last. So after a crash every leftover has a lock file that nobody holds; after a power
failure as well, from the first rename on. An old target is whole for as long as it is called ``.old-``.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError, Unreadable
from .beneath import is_own, remove
from .manifest import Manifest
from .paths import storage_error
from .patience import age_s, names_in

MANIFEST_NAME = "mcore_rlhf.json"
JOINED = "joined"
"""The note in a folder of parts that names the transaction which joins them."""
_NOTE_NBYTES = 256
PAUSES = (0.01, 0.05, 0.2, 0.5, 1.0)
"""Seconds that are waited in turn; together far longer than a living process takes to replace a folder."""
_LEFT = re.compile(r"\.(?P<name>.+)\.(lock|old)-[0-9]+-[0-9a-f]+")
_FOREIGN_PATIENCE_S = 24 * 3600
"""A lock of another host may be held although it seems free: some network file systems lock per host only."""


@dataclass(frozen=True, slots=True)
class TransactionPaths:
    """The names that one transaction uses.

    Args:
        target: What is published.
        transaction: The transaction's id.
    """

    target: Path
    transaction: str

    def _beside(self, what: str) -> Path:
        return place_of(self.target) / f".{self.target.name}.{what}-{self.transaction}"

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
    def entering(self) -> Path:
        """The folder that was written, while what is in it enters a mount point."""
        return self._beside("entering")

    @property
    def journal(self) -> Path:
        """What was finished in the folder being written."""
        return self._beside("journal")

    @property
    def resumable(self) -> bool:
        """Whether there is something that could be gone on with, and that this user has begun: another's may be a trap."""
        return (
            _is_own(self.journal, stat.S_ISREG)
            and _is_own(self.staging, stat.S_ISDIR)
            and not os.path.lexists(self.old)
        )

    @property
    def old(self) -> Path:
        """What the target was before."""
        return self._beside("old")

    def is_published(self, manifest_name: str = MANIFEST_NAME) -> bool:
        """Whether the target is what this transaction wrote: asked of the file system, not remembered.

        Raises:
            Unreadable: Nobody can say.
        """
        try:
            return Manifest.read(self.target / manifest_name).transaction == self.transaction
        except Unreadable:
            raise
        except CheckpointError:
            return False


def place_of(target: Path) -> Path:
    """The folder in which a target's transactions lie: the one above it, or a mount point itself, beside which is another disk."""
    return target if os.path.ismount(target) else target.parent


def occupants(target: Path) -> list[str]:
    """What a folder holds, but for what lies in a mount point: our own names, and what ``mkfs`` puts there.

    Raises:
        OSError: It cannot be listed.
    """
    names = os.listdir(target)
    if not os.path.ismount(target):
        return names
    own = re.compile(rf"\.{re.escape(target.name)}\.(lock|partial|journal|entering|parts)-.*")
    return [name for name in names if name != "lost+found" and not own.fullmatch(name)]


def enter(places: TransactionPaths, manifest_name: str) -> None:
    """Move what was written into the mount point that it is for; what says that it is there goes last.

    Raises:
        OSError: The file system refused, or something is there; what had been moved lies there again where it was.
    """
    moved: list[str] = []
    try:
        for name in sorted(os.listdir(places.entering), key=lambda name: (name == manifest_name, name)):
            if os.path.lexists(places.target / name):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(places.target / name))
            os.rename(places.entering / name, places.target / name)
            moved.append(name)
    except OSError:
        for name in moved:
            os.rename(places.target / name, places.entering / name)
        os.rename(places.entering, places.staging)
        raise
    os.rmdir(places.entering)


def new_transaction() -> str:
    """An id that no other transaction has; later ones sort later."""
    return f"{time.time_ns() // 1_000_000:013d}-{os.urandom(4).hex()}"


class Lock:
    """A lock file that is held until :meth:`release`, or until the process dies.

    Args:
        path: The file, which must not exist.
        taken: Or the file, open and locked, that a dead process left.

    Raises:
        StorageError: It cannot be created.
    """

    def __init__(self, path: Path, taken: int = -1) -> None:
        self.path, self._fd = path, taken
        if taken >= 0:
            os.ftruncate(taken, 0)
            os.pwrite(taken, _owner().encode(), 0)
            _HELD.add(self)
            return
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise storage_error(error, path, "create") from error
        try:
            os.write(self._fd, _owner().encode())
        except OSError as error:
            self.release()  # an empty lock would pass for that of another host
            raise storage_error(error, path, "create") from error
        _try_lock(self._fd)  # without flock on this file system, nobody else will think that we are dead either
        _HELD.add(self)

    def sync(self) -> None:
        """Wait until what it says is on the disk; that it is there at all, is for its folder to say.

        Raises:
            OSError: The disk failed.
        """
        os.fsync(self._fd)

    def release(self) -> None:
        """Remove the file and let go."""
        if self._fd >= 0:
            try:
                self.path.unlink(missing_ok=True)
            finally:
                self.let_go()  # where the file cannot be removed now, whoever comes next does it

    def let_go(self) -> None:
        """Let go, and leave the file: whoever comes next cleans up."""
        fd, self._fd = (
            self._fd,
            -1,
        )  # before it is closed: that may fail, or be done in a child meanwhile, and then it is another's
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)


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


def recover(
    target: Path, manifest_name: str = MANIFEST_NAME, *, resumable: bool = True, alone: bool = False
) -> list[str]:
    """Clean up what dead processes left beside a target. Safe at any time, in any number of processes.

    A half-written folder is removed. An old target that was moved aside is put back where nothing was
    published, and removed where the new one was.

    Args:
        target: The target.
        manifest_name: Name of the manifest in it.
        resumable: Whether a half-written folder with a journal is removed as well.
        alone: Whether nobody else can be replacing the target now: of a root's steps, for the holder of the root's lock.

    Returns:
        What was done, one line each.
    """
    done: list[str] = []
    for places, fd in dead(target):
        if resumable or not places.resumable:
            done += removed(places, manifest_name)
        os.close(fd)
    done += _put_back(target, manifest_name, alone)
    for folder in joined(target, manifest_name):
        remove_joined(folder)
        done.append(f"removed {folder}: {target} was published of it")
    return done


def recover_in(folder: Path, manifest_name: str = MANIFEST_NAME) -> list[str]:
    """Clean up what dead processes left of every target in a folder; what has another manifest, or can be gone on with, stays.

    Args:
        folder: Where the targets lie; it need not be there.
        manifest_name: Name of the manifest in each.

    Returns:
        What was done, one line each.
    """
    names = names_in(folder) if folder.is_dir() else []
    found = sorted({left["name"] for left in map(_LEFT.fullmatch, names) if left})
    ours = [name for name in found if not (folder / name).exists() or (folder / name / manifest_name).is_file()]
    return [line for name in ours for line in recover(folder / name, manifest_name, resumable=False)]


def _put_back(target: Path, manifest_name: str, alone: bool) -> list[str]:
    """Bring the replacements to an end that a dead process began, whose lock may be lost, empty, or another host's.

    Between the two renames of a living process lie milliseconds, so what still lies there after some pauses was left behind.
    """
    done: list[str] = []
    for places in sorted(_replacing(target), key=_transaction, reverse=True):  # the newest first
        try:
            if not _is_occupied(target) and (alone or _stays(places)):
                os.rename(places.old, target)
                done.append(f"put {target} back: its replacement was interrupted")
            elif alone and places.is_published(manifest_name):
                done += _settle(places, manifest_name)
        except (OSError, Unreadable) as error:
            done.append(f"could not put {target} back: {error}")
    return done


def _replacing(target: Path) -> list[TransactionPaths]:
    prefix = f".{target.name}.old-"
    return [TransactionPaths(target, path.name.removeprefix(prefix)) for path in _called(target, prefix)]


def _called(target: Path, prefix: str) -> list[Path]:
    """What lies where a target's transactions do, and is called so."""
    place = place_of(target)
    return sorted(place.glob(f"{_escaped(prefix)}*")) if place.is_dir() else []


def _transaction(places: TransactionPaths) -> str:
    return places.transaction


def _stays(places: TransactionPaths) -> bool:
    """Whether an old target lies aside, and nobody goes on."""
    for pause in (0.0, *PAUSES):
        time.sleep(pause)
        if _is_held(places.lock) or _is_occupied(places.target) or not places.old.exists():
            return False
    return True


def _is_held(lock: Path) -> bool:
    """Whether a process of this host holds a lock; of another one, no more is known than that its file is there."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(fd)
    return False


def joined(target: Path, manifest_name: str = MANIFEST_NAME) -> list[Path]:
    """Folders of parts of which a target was published by a process that died before it could remove them."""
    found: list[Path] = []
    for folder in _called(target, f".{target.name}.parts-"):
        note = folder / JOINED
        with suppress(OSError, Unreadable):
            if _is_own(folder, stat.S_ISDIR) and _is_own(note, stat.S_ISREG) and note.lstat().st_size <= _NOTE_NBYTES:
                transaction = note.read_bytes().decode(errors="replace")
                if TransactionPaths(target, transaction).is_published(manifest_name):
                    found.append(folder)
    return found


def remove_joined(folder: Path) -> None:
    """Remove parts that were published; what says so goes last, so that whoever comes after a kill goes on."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.is_dir() and not path.is_symlink():
            with suppress(OSError):
                remove(path)
    with suppress(OSError):
        remove(folder)


def dead(target: Path) -> Iterator[tuple[TransactionPaths, int]]:
    """The transactions of dead processes, each with its lock, which is held."""
    prefix = f".{target.name}.lock-"
    for lock in _called(target, prefix):
        fd = _lock_of_the_dead(lock)
        if fd is not None:
            yield TransactionPaths(target, lock.name.removeprefix(prefix)), fd


def removed(places: TransactionPaths, manifest_name: str, why: str = "") -> list[str]:
    """Settle a dead process's transaction; its lock goes last."""
    try:
        done = [f"{line}{why}" for line in settle(places, manifest_name)]
        places.lock.unlink(missing_ok=True)
    except (OSError, Unreadable) as error:
        return [f"could not clean up {places.staging}: {error}"]
    return done


def settle(places: TransactionPaths, manifest_name: str = MANIFEST_NAME) -> Iterator[str]:
    """Bring a transaction that has ended, in whatever way, to all or nothing.

    Returns:
        What was done, one line each.
    """
    return iter(list(_settle(places, manifest_name)))


def _settle(places: TransactionPaths, manifest_name: str) -> Iterator[str]:
    if places.old.exists():
        if places.is_published(manifest_name):
            os.rename(places.old, places.doomed)  # half of it may never be put back
            remove_tree(places.doomed)
            yield f"removed {places.old}: what {places.target} was before it was replaced"
        elif not _is_occupied(places.target):
            os.rename(places.old, places.target)
            yield f"put {places.target} back: its replacement was interrupted"
        else:  # somebody made a new target meanwhile: both are kept
            yield f"kept {places.old}: {places.target} was made anew by someone else"
    if _is_own(places.entering, stat.S_ISDIR):  # another's would be moved in as if it had been checked
        enter(places, manifest_name)
        yield f"moved the rest of {places.entering} into {places.target}: that was interrupted"
    if os.path.lexists(places.staging) or os.path.lexists(places.doomed):
        _remove_staging(places)
        yield f"removed {places.staging}: it was left half-written"
    places.journal.unlink(missing_ok=True)


def _remove_staging(places: TransactionPaths) -> None:
    """By another name: other ranks that still write there see at once that it was given up, and add nothing to it."""
    remove_tree(places.doomed)
    with suppress(OSError):
        os.rename(places.staging, places.doomed)
    remove_tree(places.doomed)
    remove_tree(places.staging)


def remove_tree(folder: Path) -> None:
    """Remove a folder patiently: on a network file system, what others have open goes when they close it.

    Raises:
        OSError: It cannot be removed, or something in it.
    """
    for pause in (*PAUSES, None):
        try:
            remove(folder)
            return
        except OSError:
            if pause is None:
                raise
        time.sleep(pause or 0)


def _is_own(path: Path, kind: Callable[[int], bool]) -> bool:
    """Whether there is something of that kind, no link to it, which this user has made."""
    try:
        facts = path.lstat()
    except OSError:
        return False
    return kind(facts.st_mode) and is_own(path.parent, facts.st_uid)


def _is_occupied(target: Path) -> bool:
    return target.is_symlink() or target.is_file() or (target.is_dir() and bool(occupants(target)))


def _lock_of_the_dead(path: Path) -> int | None:
    """Take over the lock of a process that is dead; None where it may be alive."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        owner = os.read(fd, 256).decode(errors="replace")
        if not is_own(path.parent, os.fstat(fd).st_uid):
            raise PermissionError(errno.EPERM, "is another user's", str(path))
        foreign = not _is_ours(owner) and age_s(path) < _FOREIGN_PATIENCE_S
        if not foreign and _try_lock(fd) and os.fstat(fd).st_ino == path.stat().st_ino:
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _owner() -> str:
    """Who holds a lock: the host, and of a SLURM job which of its processes: after a requeue that one runs elsewhere."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")
    process = ".".join(os.environ.get(name, "") for name in names)
    return os.uname().nodename + (f" {process}" if all(name in os.environ for name in names) else "")


def _is_ours(owner: str) -> bool:
    """Whether a lock is of this host, where the kernel knows who holds it, or of what this process was before it was requeued."""
    (host, _, process), (here, _, us) = owner.partition(" "), _owner().partition(" ")
    return host == here or (process == us != "")


def _escaped(name: str) -> str:
    """For glob."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)
