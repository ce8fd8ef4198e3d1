"""Deleting a step so that no moment leaves half of one: it is renamed away first, under a lock, then removed.

The hidden folder has the name of one that is being written, ``.global_step_N.partial-<id>``, because what
:func:`mcore_rlhf.storage.staging.recover` does with those of dead processes is what is wanted here too: remove them. (A
folder named ``.old-`` would be put back.)
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from mcore_rlhf.errors import NotACheckpoint, StorageError
from mcore_rlhf.storage.paths import storage_error
from mcore_rlhf.storage.publish import sync_folder
from mcore_rlhf.storage.staging import Lock, Places, new_transaction, recover

from .step_names import MANIFEST, step_folder, step_of, target_of_lock

EXPORTS = "exports"
"""Folder in a root that holds what was exported from its steps, as ``exports/global_step_N``."""


def exports_of(folder: Path) -> Path:
    """Where by-products of a step lie outside of its own folder: they are counted with it, and go with it."""
    return step_folder(folder.parent / EXPORTS, step_of(folder) or 0)


def delete(folder: Path) -> bool:
    """Delete a step and its exports. Nothing is asked: :func:`~.retention.plan_deletions` decides what may go.

    Safe in a background thread, and beside other processes that delete the same step. A crash leaves a hidden folder with
    the lock of a dead process, which :func:`clean_up` removes.

    Args:
        folder: The step's folder.

    Returns:
        Whether it was there, and is gone now by this call.

    Raises:
        NotACheckpoint: This is not the folder of a step, by its name.
        StorageError: The file system refused. Unless even the rename failed, the step is no longer listed.
    """
    if step_of(folder) is None:
        raise NotACheckpoint(f"{folder}: is not the folder of a step (global_step_N), so it is not deleted")
    _remove(exports_of(folder))  # first: exports without their step would never be found again
    return _remove(folder)


def clean_up(root: Path) -> list[str]:
    """Remove what dead processes left in a root: half-written and half-deleted steps, and their locks.

    Safe at any time, in any number of processes; what may belong to a living one stays.

    Returns:
        What was done, one line each.
    """
    done: list[str] = []
    for folder in (root, root / EXPORTS):
        locks = folder.iterdir() if folder.is_dir() else ()
        targets = {target for lock in locks if (target := target_of_lock(lock)) is not None}
        for target in sorted(targets):
            done += recover(target, MANIFEST)
    return done


def _remove(folder: Path) -> bool:
    folder = Path(os.path.abspath(folder))
    if not os.path.lexists(folder):
        return False
    places = Places(folder, new_transaction())
    lock = _lock(places)
    try:
        os.rename(folder, places.staging)
    except FileNotFoundError:  # another process was quicker
        _let_go(lock, places)
        return False
    except OSError as error:
        _let_go(lock, places)
        raise storage_error(error, folder, "delete") from error
    try:
        sync_folder(folder.parent)
        _remove_tree(places.staging)
    except OSError as error:  # the lock file stays, so that a later start removes the rest
        raise storage_error(error, places.staging, "delete") from error
    _let_go(lock, places)
    sync_folder(folder.parent)
    return True


def _lock(places: Places) -> Lock | None:
    """The lock, or None on a full disk, which deleting is the remedy for: the empty file that is there then is taken for
    that of another host, and so does its work a day later.
    """
    try:
        return Lock(places.lock)
    except StorageError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT):
            return None
        raise


def _let_go(lock: Lock | None, places: Places) -> None:
    if lock is not None:
        lock.release()
    places.lock.unlink(missing_ok=True)


def _remove_tree(folder: Path) -> None:
    if folder.is_symlink():  # what it points to is not ours
        folder.unlink()
        return
    while folder.exists():
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:  # somebody else removes the same files: begin again with what is left
            continue
