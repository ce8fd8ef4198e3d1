"""What to keep: rules that each want some steps, a cap on the total, and what may be deleted in consequence.

Everything is computed from what lies on the disk now (:func:`~.steps.listed`, metrics from the manifests), so a restart
forgets nothing. Whatever the rules say, these are never deleted: the newest committed step and anything newer, steps in
quarantine, other trainers' steps, what is being written, and steps that the caller protects.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from mcore_rlhf.errors import CheckpointError, UsageError
from mcore_rlhf.storage.paths import human

from . import steps
from .deletion import clean_up as clean_up
from .deletion import delete as delete
from .deletion import exports_of
from .step_names import is_hidden
from .steps import Step

_log = logging.getLogger(__name__)


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
    path: Path
    nbytes: int
    reason: str


def plan_deletions(
    root: Path, policy: Retention, protect: Collection[int] = (), *, include_damaged: bool = False
) -> list[Deletion]:
    """Which steps may go, oldest first. Nothing is deleted.

    Args:
        root: The run's root.
        policy: What to keep.
        protect: Further steps that stay: being loaded, or exported from.
        include_damaged: Whether damaged steps, and folders that hold nothing known, go as well, where a newer step is
            committed.

    Raises:
        CheckpointError: See :func:`~.steps.listed`.
    """
    visible = [step for step in steps.listed(root) if not is_hidden(step.path)]
    committed = [step for step in visible if step.resumable]
    if not committed:
        return []
    older = [step for step in visible if step.step < committed[-1].step and step.step not in protect]
    wanted = _wanted(policy, committed)
    reasons = {step.step: "no rule keeps it" for step in older if step.resumable and step.step not in wanted}
    if include_damaged:
        reasons |= {
            step.step: step.state for step in older if step.state in ("damaged", "partial") and not step.quarantined
        }
    sizes = {step.step: step.nbytes + steps.size_of(exports_of(step.path)) for step in visible}
    if policy.cap is not None:
        reasons |= _beyond(policy.cap, sizes, reasons, [step for step in older if step.resumable])
    return [
        Deletion(step.step, step.path, sizes[step.step], reasons[step.step]) for step in older if step.step in reasons
    ]


def _wanted(policy: Retention, committed: Sequence[Step]) -> set[int]:
    if not policy.keep:
        return {step.step for step in committed}
    return set[int]().union(*(rule.wants(committed) for rule in policy.keep))


def _beyond(cap: SizeCap, sizes: dict[int, int], going: Collection[int], candidates: Iterable[Step]) -> dict[int, str]:
    """The oldest of the candidates that must go for the rest to be within the cap."""
    total, found = sum(nbytes for step, nbytes in sizes.items() if step not in going), dict[int, str]()
    for step in candidates:
        if total > cap.nbytes and step.step not in going:
            found[step.step] = f"more than {human(cap.nbytes)} in all"
            total -= sizes[step.step]
    return found


def apply(root: Path, deletions: Iterable[Deletion]) -> list[Deletion]:
    """Delete what was planned, one log line each; meant to be run behind the training, in a thread of its own.

    Before each one, the disk is asked again whether a newer step is committed: without one it stays. A step that cannot be
    deleted is logged, and the others still are.

    Returns:
        What was deleted by this call.
    """
    return [deletion for deletion in deletions if _delete_one(root, deletion)]


def _delete_one(root: Path, deletion: Deletion) -> bool:
    try:
        successor = steps.newest(root)
        if successor is None or successor.step <= deletion.step:
            _log.warning("kept %s: no newer step is committed any more", deletion.path)
            return False
        if not delete(deletion.path):
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
