"""Where a load comes from, whichever way it was planned: the copies, and everything that is not a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.plan import FilePlan
from mcore_rlhf.families.source import TrainingState

States = Mapping[int, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Origin:
    """A checkpoint, seen from one rank.

    Args:
        root: Folder to which the plan's files are relative.
        files: The files that this rank reads.
        plan: What fills the slots.
        state: What the checkpoint holds besides tensors.
        optimizer: Whether it holds the optimizer, and that was asked for.
        states: Of every flat tensor, by number, the names of its states, without the master.
        wrapper: What DeepSpeed's optimizer keeps besides: ``clip_grad``, ``overflow``.
        report: What is kept, derived, changed and lost.
    """

    root: Path
    files: tuple[Path, ...]
    plan: FilePlan
    state: TrainingState
    optimizer: bool
    states: States
    wrapper: Mapping[str, object]
    report: Report = field(default_factory=Report)
