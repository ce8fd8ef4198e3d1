"""What to keep: rules that each want some steps, a cap on the total, what may be deleted in consequence, and deleting it.

Everything is computed from what lies on the disk now (:func:`~.steps.listed`, metrics from the manifests), so a restart
forgets nothing. Whatever the rules say, these are never deleted: the newest committed step and anything newer, steps in
quarantine, other trainers' steps, what is being written, and steps that the caller protects.

A step that goes is renamed away first, under a lock, then removed: no moment leaves half of one. The hidden folder has the name
of one that is being written, ``.global_step_N.partial-<id>``, because what :func:`mcore_rlhf.storage.publish.recover` does with
those of dead processes is what is wanted here too: remove them. (A folder named ``.old-`` would be put back.)

Steps that a run leaves behind (it went back, or began anew, and they are newer than what it saves now) are put in quarantine:
``auto`` would take the newest step, which is none of this run's, and rules on what to keep count by number. So nothing is lost,
resume passes over them, and no rule counts them.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from mcore_rlhf.errors import CheckpointError, NotACheckpoint, StorageError, UsageError, log_of
from mcore_rlhf.storage.beneath import move, remove
from mcore_rlhf.storage.paths import ReadablePath, human, storage_error
from mcore_rlhf.storage.patience import names_in
from mcore_rlhf.storage.publish import sync_folder
from mcore_rlhf.storage.transactions import Lock, TransactionPaths, new_transaction, recover, remove_tree
from mcore_rlhf.storage.urls import remove_stored

from . import steps
from .naming import OWN, Naming
from .steps import Step, is_hidden

_log = log_of(__name__)

LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<what>lock|old|partial)-(?P<transaction>.+)")
"""What guards a step that is written, replaced or deleted, or is it."""

EXPORTS = "exports"
"""Folder in a root that holds what was exported from its steps, as ``exports/global_step_N``."""
_Path = TypeVar("_Path", bound=ReadablePath)

_OF_THIS_RUN: set[str] = set()
"""What this process has loaded or committed, by whichever manager: a run may open several, one after the other."""

_SHOWN = 10


class KeepRule(Protocol):
    """Wants some steps to be kept."""

    def wants(self, committed: Sequence[Step]) -> set[int]:
        """The numbers of the steps to keep, of the given ones (committed, not in quarantine, oldest first)."""
        ...


@dataclass(frozen=True, slots=True)
class KeepLast:
    """The newest ``n`` steps.

    Raises:
        UsageError: ``n`` is not positive.
    """

    n: int

    def __post_init__(self) -> None:
        _require_positive("the number of steps to keep", self.n)

    def wants(self, committed: Sequence[Step]) -> set[int]:
        """See :class:`KeepRule`."""
        return {step.step for step in committed[-self.n :]}


@dataclass(frozen=True, slots=True)
class KeepEvery:
    """Every step whose number is a multiple of ``m``.

    Raises:
        UsageError: ``m`` is not positive.
    """

    m: int

    def __post_init__(self) -> None:
        _require_positive("the distance of steps to keep", self.m)

    def wants(self, committed: Sequence[Step]) -> set[int]:
        """See :class:`KeepRule`."""
        return {step.step for step in committed if step.step % self.m == 0}


@dataclass(frozen=True, slots=True)
class KeepBest:
    """The best ``k`` steps by a metric that was given to ``save``; of equals, the newer.

    Where no step has the metric, nothing can be said about which is best: all are wanted. A step whose metric is not a
    number is never among the best.

    Args:
        metric: Its name.
        mode: Whether large or small is good.
        k: How many.

    Raises:
        UsageError: ``k`` is not positive, or ``mode`` is neither.
    """

    metric: str
    mode: Literal["min", "max"] = "max"
    k: int = 1

    def __post_init__(self) -> None:
        _require_positive("the number of best steps to keep", self.k)
        if self.mode not in ("min", "max"):
            raise UsageError(f"the mode of the metric {self.metric!r} should be min or max, found {self.mode!r}")

    def wants(self, committed: Sequence[Step]) -> set[int]:
        """See :class:`KeepRule`."""
        measured = [step for step in committed if self.metric in step.metrics]
        if not measured:
            return {step.step for step in committed}
        sign = 1 if self.mode == "max" else -1
        ranked = sorted(measured, key=lambda step: (sign * step.metrics[self.metric], step.step))
        return {step.step for step in ranked[-self.k :]}


@dataclass(frozen=True, slots=True)
class SizeCap:
    """No more than ``nbytes`` in all; where the rules keep more, the oldest steps go.

    Raises:
        UsageError: ``nbytes`` is not positive.
    """

    nbytes: int

    def __post_init__(self) -> None:
        _require_positive("the size cap", self.nbytes)


@dataclass(frozen=True, slots=True)
class Retention:
    """What to keep.

    Args:
        keep: A step is kept that any of them wants; without rules, all are.
        cap: Applied to what is kept.
    """

    keep: Sequence[KeepRule] = ()
    cap: SizeCap | None = None


@dataclass(frozen=True, slots=True)
class Deletion:
    """A step that may go.

    Args:
        step: Its number.
        path: Its folder.
        nbytes: What is gained: everything in the folder, and its exports.
        reason: For the log.
    """

    step: int
    path: ReadablePath
    nbytes: int
    reason: str


def plan_deletions(
    root: ReadablePath,
    policy: Retention,
    protect: Collection[int] = (),
    *,
    include_damaged: bool = False,
    coming: Step | None = None,
    naming: Naming = OWN,
) -> list[Deletion]:
    """Which steps may go, oldest first. Nothing is deleted.

    Args:
        root: The run's root.
        policy: What to keep.
        protect: Further steps that stay: being loaded, or exported from.
        include_damaged: Whether damaged steps, and folders that hold nothing known, go too, where a newer one is committed.
        coming: A step that is to be counted as if it were there already; the newest that is there stays as well.
        naming: How its steps are called.

    Raises:
        CheckpointError: See :func:`~.steps.listed`.
    """
    visible = [step for step in naming.listed(root) if not is_hidden(step.path)]
    if coming is None:
        return planned(visible, policy, protect, include_damaged=include_damaged)
    there = [step for step in visible if step.step < coming.step]
    resumable = [step.step for step in there if step.resumable]
    return planned([*there, coming], policy, {*protect, *resumable[-1:]}, include_damaged=include_damaged)


def planned(
    visible: Sequence[Step], policy: Retention, protect: Collection[int] = (), *, include_damaged: bool = False
) -> list[Deletion]:
    """See :func:`plan_deletions`.

    Args:
        visible: The steps of a root, oldest first; it need not be one that there is yet.
    """
    committed = [*{step.step: step for step in visible if step.resumable}.values()]  # of several folders, the last
    if not committed:
        return []
    older = [step for step in visible if step.step < committed[-1].step and step.step not in protect]
    wanted = _wanted(policy, committed)
    reasons = {step.path: "no rule keeps it" for step in older if step.resumable and step.step not in wanted}
    if include_damaged:
        wrong = [step for step in older if step.state in ("damaged", "partial") and not step.quarantined]
        reasons |= {step.path: step.state for step in wrong}
    sizes = {step.path: step.nbytes + steps.size_of(exports_of(step.path)) for step in visible}
    if policy.cap is not None:
        staying = {path: nbytes for path, nbytes in sizes.items() if path not in reasons}
        reasons |= _beyond(policy.cap, staying, [step for step in older if step.resumable])
    return [
        Deletion(step.step, step.path, sizes[step.path], reasons[step.path]) for step in older if step.path in reasons
    ]


def _wanted(policy: Retention, committed: Sequence[Step]) -> set[int]:
    if not policy.keep:
        return {step.step for step in committed}
    return set[int]().union(*(rule.wants(committed) for rule in policy.keep))


def _beyond(cap: SizeCap, sizes: dict[ReadablePath, int], candidates: Iterable[Step]) -> dict[ReadablePath, str]:
    """The oldest of the candidates that must go for the rest to be within the cap."""
    total, found = sum(sizes.values()), dict[ReadablePath, str]()
    for step in candidates:
        if total > cap.nbytes and step.path in sizes:
            found[step.path] = f"more than {human(cap.nbytes)} in all"
            total -= sizes[step.path]
    return found


def apply(root: ReadablePath, deletions: Iterable[Deletion], naming: Naming = OWN) -> list[Deletion]:
    """Delete what was planned, one log line each; meant to be run behind the training, in a thread of its own.

    Before each one, the disk is asked again whether a newer step is committed: without one it stays. A step that cannot be
    deleted is logged, and the others still are.

    Returns:
        What was deleted by this call.
    """
    return [deletion for deletion in deletions if _delete_one(root, deletion, naming)]


def _delete_one(root: ReadablePath, deletion: Deletion, naming: Naming) -> bool:
    try:
        successor = naming.newest(root)
        if successor is None or successor.step <= deletion.step:
            _log.warning("kept %s: no newer step is committed any more", deletion.path)
            return False
        if not delete(deletion.path, naming):
            _log.info("%s was deleted by another process", deletion.path)
            return False
    except CheckpointError as error:
        _log.warning("could not delete step %d: %s", deletion.step, error)
        return False
    _log.info("deleted %s (%s): %s", deletion.path, human(deletion.nbytes), deletion.reason)
    return True


def _require_positive(what: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{what} should be positive, found {value}")


def exports_of(folder: _Path) -> _Path:
    """Where by-products of a step lie outside of its folder: they are counted with it, and go with it."""
    return folder.parent / EXPORTS / folder.name


def delete(folder: ReadablePath, naming: Naming = OWN) -> bool:
    """Delete a step and its exports. Nothing is asked: :func:`~.retention.plan_deletions` decides what may go.

    Safe in a background thread, and beside other processes that delete the same step. A crash leaves a hidden folder with
    the lock of a dead process, which :func:`clean_up` removes.

    Args:
        folder: The step's folder.
        naming: How steps are called beside it.

    Returns:
        Whether it was there, and is gone now by this call.

    Raises:
        NotACheckpoint: This is not the folder of a step, by its name.
        StorageError: The file system refused. Unless even the rename failed, the step is no longer listed.
    """
    if naming.step_of(folder.name) is None:
        raise NotACheckpoint(f"{folder}: is not the folder of a step (global_step_N), so it is not deleted")
    exports = exports_of(folder)
    if isinstance(exports, Path) and exports.parent.is_symlink():
        raise StorageError(
            f"{exports.parent}: is a symbolic link, and nothing is deleted through one\n"
            "Remove the link, and step and exports by hand; or make it a folder of this root."
        )
    remove_folder(exports)  # first: exports without their step would never be found again
    return remove_folder(folder, naming.manifest)


def clean_up(root: ReadablePath, *, alone: bool = False, naming: Naming = OWN) -> list[str]:
    """Remove what dead processes left in a root: half-written and half-deleted steps, and their locks.

    A step that lies aside, and whose replacement nobody goes on with, is put back. Safe at any time, in any number of processes.

    Args:
        root: The run's root.
        alone: Whether the caller holds the :class:`~.root.RootLock`: then nobody else replaces steps.
        naming: How its steps are called.

    Returns:
        What was done, one line each.
    """
    done: list[str] = []
    if not isinstance(root, Path):
        return done  # a store has no locks: see `prune --dead`
    for folder in (root, root / EXPORTS):
        names = names_in(folder) if folder.is_dir() and not (folder != root and folder.is_symlink()) else ()
        targets = {found["name"] for found in map(LEFTOVER.fullmatch, names) if found and found["what"] != "partial"}
        for name in sorted(target for target in targets if naming.step_of(target) is not None):
            done += recover(folder / name, naming.manifest, alone=alone and folder == root)
    return done


def remove_folder(folder: ReadablePath, manifest: str = OWN.manifest) -> bool:
    """See :func:`delete`; of a folder by whatever name.

    Raises:
        StorageError: The file system refused.
    """
    if not isinstance(folder, Path):
        return remove_stored(folder, manifest)
    folder = Path(os.path.abspath(folder))
    if not os.path.lexists(folder):
        return False
    places = TransactionPaths(folder, new_transaction())
    lock = _lock(places)
    try:
        move(folder, places.staging)
    except FileNotFoundError:  # another process was quicker
        _let_go(lock, places)
        return False
    except OSError as error:
        _let_go(lock, places)
        raise storage_error(error, folder, "delete") from error
    try:
        sync_folder(folder.parent)
        remove_tree(places.staging)  # a step that is a link goes, what it leads to is not ours
    except OSError as error:
        if lock is not None:
            lock.let_go()  # the file stays, so that a later start removes the rest
        raise storage_error(error, places.staging, "delete") from error
    _let_go(lock, places)
    sync_folder(folder.parent)
    return True


def _lock(places: TransactionPaths) -> Lock | None:
    """The lock, or None on a full disk, which deleting is the remedy for: the empty file that is there then is taken for
    that of another host, and so does its work a day later.
    """
    try:
        return Lock(places.lock)
    except StorageError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT):
            return None
        raise


def _let_go(lock: Lock | None, places: TransactionPaths) -> None:
    if lock is not None:
        lock.release()
    remove(places.lock)


def remember(folder: ReadablePath) -> None:
    """Note that this run has loaded or committed a step, or a model in it."""
    _OF_THIS_RUN.add(_identity(folder))


def is_of_this_run(root: ReadablePath) -> bool:
    """Whether this run has loaded or committed a step of a root."""
    top = _identity(root)
    return any(f"{folder}/".startswith(f"{top}/") for folder in _OF_THIS_RUN)


def _identity(folder: ReadablePath) -> str:
    return str(folder.resolve() if isinstance(folder, Path) else folder).rstrip("/")


_GOING_ON = (
    "Resume from them: manager.load('auto'), in YAML runner.resume_dir: auto. Or give this run a root of its own. Or say that "
    "it goes on among them: ManagerOptions(on_existing='continue'), in YAML checkpoint.on_existing: continue; newer steps than "
    "it saves are then put in quarantine, and older ones are counted, and deleted, by the rules on what to keep."
)


def refuse_others(root: Path, naming: Naming = OWN, advice: str = _GOING_ON) -> None:
    """Refuse to save among the steps of another run, which rules on what to keep would then count, and delete.

    Args:
        root: The folder of all steps.
        naming: How they are called.
        advice: What can be done.

    Raises:
        UsageError: There are committed steps, and this run has neither loaded nor written any of them.
        Unreadable: There may be.
    """
    if is_of_this_run(root):
        return
    there = naming.listed(root)
    found = dict.fromkeys(step.step for step in there if step.resumable)
    if found:
        listed = ", ".join(map(str, [*found][-_SHOWN:]))
        raise UsageError(
            f"{root}: holds committed steps that this run has neither loaded nor written ({listed})\n{advice}"
        )
    for step in there:
        if not is_hidden(step.path):
            step.require_read()


def left_behind(root: ReadablePath, step: int, own: Collection[int], naming: Naming = OWN) -> list[Step]:
    """Newer steps that are not this run's, and are committed, or may be as they cannot be read; oldest first.

    Args:
        root: The folder of all steps.
        step: The newest step of this run.
        own: All steps that this run has saved.
        naming: How steps are called.
    """
    newer = takewhile(lambda found: found.step > step, naming.newest_first(root))
    there = [found for found in newer if (found.resumable or found.undecided) and found.step not in own]
    return sorted(there, key=lambda found: found.step)


def leave_behind(
    root: Path, step: int, own: Collection[int], went_back_to: int | None = None, naming: Naming = OWN
) -> list[int]:
    """Put steps that are not this run's, and newer than where it goes on from, in quarantine.

    Args:
        root: The folder of all steps.
        step: The newest step of this run.
        own: All steps that this run has saved.
        went_back_to: The step that it went back to from newer ones: a resume must not fall back to one of those,
            though the run has saved beyond it.
        naming: How steps are called.

    Returns:
        Their numbers.

    Raises:
        StorageError: A note cannot be written.
    """
    found = left_behind(root, step if went_back_to is None else min(step, went_back_to), own, naming)
    for one in found:
        steps.quarantine(one.path, f"left behind by a run that saved step {step} after it")
    return [one.step for one in found]


def move_aside(folder: Path, name: str) -> Path | None:
    """Make way for a step where something lies that this release did not write, or cannot read.

    Args:
        folder: Where the step will appear.
        name: Identity of the transaction.

    Returns:
        Where it lies now; None where there was nothing, or a step of ours, which is replaced.

    Raises:
        OSError: It cannot be renamed.
        Unreadable: It may be a step of ours, and sound.
    """
    found = steps.found_at(folder)
    if found is None or folder.is_symlink() or not any(folder.iterdir()):
        return None
    found.require_read()
    if found.state in ("committed", "damaged") and not steps.is_of_newer_release(folder):
        return None
    aside = folder.with_name(f"{folder.name}.found-{name}")
    move(folder, aside)
    return aside
