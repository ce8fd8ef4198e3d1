"""What a root knows of its mirror, and what of the mirror a run may resume from. It is read without asking the mirror, where that does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.storage.notes import FolderNotes

from .steps import Step, is_hidden

STATUS = "mirror.json"
"""In a root: what is known of its mirror."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """From which step on the mirror's are another branch's, as long as nobody has told the mirror.

    Args:
        after: The first step that this run saved; newer ones in the mirror are left behind, unless they are the root's.
        transaction: Of that step.
        committed: Whether it was committed.
    """

    after: int
    transaction: str
    committed: bool = False


@dataclass(frozen=True, slots=True)
class MirrorStatus:
    """What a root knows of its mirror.

    Args:
        url: The mirror's.
        ours: Whether this run may write there.
        mirrored: Transactions of the steps that are published there, by number.
        failed: Why steps of the root cannot be sent, by transaction.
        problem: Why nothing can be sent now; empty where it can.
        boundary: See :class:`Boundary`.
    """

    url: str = ""
    ours: bool = False
    mirrored: Mapping[int, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    boundary: Boundary | None = None

    @classmethod
    def read(cls, root: Path) -> MirrorStatus | None:
        """That of a root; None where there is none. One that cannot be read says nothing."""
        try:
            return FolderNotes(root).said(cls, STATUS)
        except CheckpointError as error:
            return cls(problem=f"{STATUS} cannot be read: {type(error).__name__}")

    def of(self, step: Step) -> str:
        """``mirrored``, ``waiting`` or ``failed`` for a step that is committed; empty for others, which are not sent."""
        if step.state != "committed":
            return ""
        if step.transaction and self.mirrored.get(step.step) == step.transaction:
            return "mirrored"
        if step.transaction in self.failed:
            return "failed"
        return "" if step.quarantined else "waiting"

    def leaves_behind(self, step: Step, local: Step | None) -> bool:
        """Whether a step of the mirror is another branch's than the root's.

        Args:
            step: It.
            local: The one of that number in the root.
        """
        boundary = self.boundary
        if boundary is None or not boundary.committed or step.step <= boundary.after:
            return False
        return local is None or local.transaction != step.transaction


def resumable(there: Iterable[Step], local: Iterable[Step], status: MirrorStatus | None) -> list[tuple[Step, str]]:
    """The steps of a mirror, newest first, each with why a run does not resume from it; empty where it may.

    Args:
        there: All steps of the mirror.
        local: All steps of the root.
        status: What the root knows of the mirror.
    """
    here = {step.step: step for step in local if not is_hidden(step.path)}
    known = settled(status, here) if status is not None else MirrorStatus()
    return [(step, _why_not(step, here.get(step.step), known)) for step in sorted(there, key=by_number, reverse=True)]


def settled(status: MirrorStatus, here: Mapping[int, Step]) -> MirrorStatus:
    """The status, in which a boundary counts whose step was committed just before the process died."""
    boundary = status.boundary
    if boundary is None or boundary.committed:
        return status
    step = here.get(boundary.after)
    committed = step is not None and (step.state, step.transaction) == ("committed", boundary.transaction)
    return replace(status, boundary=replace(boundary, committed=True) if committed else None)


def _why_not(step: Step, local: Step | None, status: MirrorStatus) -> str:
    if step.quarantined:
        return f"in quarantine: {step.quarantined}"
    if step.state != "committed":
        return f"{step.state}: {step.why}"
    if local is not None and local.quarantined and local.transaction in ("", step.transaction):
        return f"in quarantine in the root: {local.quarantined}"
    if local is not None and local.state == "committed" and local.transaction != step.transaction:
        return "the root has another step of that number"
    return "left behind by a run that went back" if status.leaves_behind(step, local) else ""


def by_number(step: Step) -> int:
    """What steps of two places are sorted by."""
    return step.step
