"""What a path on the command line means: one model, or a whole step of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from mcore_rlhf.errors import NotACheckpoint, UsageError
from mcore_rlhf.families.selection import with_role
from mcore_rlhf.families.source import ReadOptions
from mcore_rlhf.manager.run.chosen_step import ChosenStep
from mcore_rlhf.manager.whole_step import WholeStep, chosen_step, whole_step

from .job import ConversionJob
from .output import Facts, console
from .progress import shown_progress


@dataclass(frozen=True, slots=True)
class Single:
    """One model.

    Args:
        path: Its folder, or what it is found in.
        options: How it is opened.
        chosen: How its step was found in a root; None where the path says which.
    """

    path: Path
    options: ReadOptions
    chosen: ChosenStep | None = None


def meaning(path: Path, options: ReadOptions, chosen: ChosenStep | None = None) -> WholeStep | Single:
    """Understand a path: the root of a run, a step, a role's folder, an iteration.

    Args:
        path: The path.
        options: ``role`` picks one model of a step, ``step`` one step of a root.
        chosen: The step, where it is a root's and was chosen already.

    Raises:
        NotACheckpoint: The step does not have that role.
        CheckpointError: There is no such step, or it is damaged.
    """
    chosen = chosen or chosen_step(path, options.step)
    if chosen is not None:
        path, options = chosen.folder, replace(options, step=None)
    found = whole_step(path)
    if found is None:
        return Single(path, options, chosen)
    options = with_role(options, found.models)
    if options.role is None:
        return replace(found, chosen=chosen)
    if options.role not in found.models:
        there = ", ".join(found.models) or "none in a format that is known"
        raise NotACheckpoint(f"{found.folder}: has no model of the role {options.role!r}; it has: {there}")
    return Single(found.models[options.role], replace(options, step=None), chosen)


def meaning_of_source(job: ConversionJob) -> WholeStep | Single:
    """What a conversion's source means: never an older step than the newest, unless that was asked for.

    Raises:
        Corrupt: The newest step is damaged, and neither ``--step`` nor ``--newest-intact`` was given.
        CheckpointError: See :func:`meaning`.
    """
    path, options = job.source_folder(), job.options.read
    if job.newest_intact:
        with shown_progress() as progress:
            progress.stage(f"looking for the newest intact step of {path}", 0)
            return meaning(path, options, chosen_step(path, newest_intact=True, progress=progress.advance))
    found = meaning(path, options)
    if found.chosen is not None:
        found.chosen.require_newest()
    return found


def only_model(step: WholeStep, options: ReadOptions, why: str) -> Single:
    """The one model of a step that has no other.

    Args:
        step: The step.
        options: How it is opened.
        why: What asks for one model.

    Raises:
        UsageError: It has several, or none.
    """
    if len(step.models) != 1:
        raise UsageError(f"{why}, and {step.folder} is a whole step\nName one of its models with --role.")
    ((role, folder),) = step.models.items()
    return Single(folder, replace(options, role=role, step=None), step.chosen)


def chosen_facts(chosen: ChosenStep | None) -> Facts | None:
    """``root``, ``step``, ``path``, ``why``, ``passed_over`` (``step``, ``path``, ``state``, ``why``); null where no root was given."""
    if chosen is None:
        return None
    over = [
        {"step": step.step, "path": str(step.path), "state": step.state, "why": step.quarantined or step.why}
        for step in chosen.passed_over
    ]
    return {
        "root": str(chosen.root),
        "step": chosen.step,
        "path": str(chosen.folder),
        "why": chosen.why,
        "passed_over": over,
    }


def print_choice(chosen: ChosenStep | None) -> None:
    """Say which step of a root is worked on, where newer ones are passed over."""
    if chosen is None or not chosen.passed_over:
        return
    out = console()
    out.print(f"{chosen.root}: {chosen.folder.name} is taken, the {_REASONS[chosen.why]}; newer, and passed over:")
    for step in chosen.passed_over:
        out.print(f"  {step.describe()}")


_REASONS = {
    "named": "one that was named",
    "newest committed": "newest that is committed",
    "newest intact": "newest that is intact",
    "tracker": "one that its tracker names",
}
