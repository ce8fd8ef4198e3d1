"""Where a load comes from, whichever way it was planned: the copies, and everything that is not a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.plan import FilePlan
from mcore_rlhf.families.source import TrainingState


@dataclass(frozen=True, slots=True)
class Origin:
    """A checkpoint, seen from one rank.

    Args:
        root: Folder to which the plan's files are relative.
        files: The files that this rank reads.
        plan: What fills the slots.
        state: What the checkpoint holds besides tensors.
        states: Names of the optimizer's tensor states, without the master.
        kind: The optimizer that wrote it: ``distributed``, ``plain`` or None.
        report: What is kept, derived, changed and lost.
        scalars: Values that a plain optimizer keeps per parameter.
        opaque: By model chunk: values of the state dict that are no tensors.
        rng: Random states that this rank's own file holds, under the manager's names; None where it holds none.
    """

    root: Path
    files: tuple[Path, ...]
    plan: FilePlan
    state: TrainingState
    states: tuple[str, ...]
    kind: str | None
    report: Report
    scalars: Mapping[str, object] = field(default_factory=dict)
    opaque: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    rng: Mapping[str, object] | None = None
