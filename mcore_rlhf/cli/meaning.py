"""What a path on the command line means: one model, or a whole step of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mcore_rlhf.errors import NotACheckpoint
from mcore_rlhf.formats.base import ReadOptions
from mcore_rlhf.formats.selection import with_role
from mcore_rlhf.manager.whole_step import WholeStep, whole_step


@dataclass(frozen=True, slots=True)
class Single:
    """One model.

    Args:
        path: Its folder, or what it is found in.
        options: How it is opened.
    """

    path: Path
    options: ReadOptions


def meaning(path: Path, options: ReadOptions) -> WholeStep | Single:
    """Understand a path: the root of a run, a step, a role's folder, an iteration.

    Args:
        path: The path.
        options: ``role`` picks one model of a step, ``step`` one step of a root.

    Raises:
        NotACheckpoint: The step does not have that role.
        CheckpointError: There is no such step, or it is damaged.
    """
    found = whole_step(path, options.step)
    if found is None:
        return Single(path, options)
    options = with_role(options, found.models)
    if options.role is None:
        return found if found.manifest is not None or len(found.models) > 1 else Single(path, options)
    if options.role not in found.models:
        there = ", ".join(found.models) or "none in a format that is known"
        raise NotACheckpoint(f"{found.folder}: has no model of the role {options.role!r}; it has: {there}")
    return Single(found.models[options.role], replace(options, step=None))
