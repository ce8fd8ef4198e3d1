"""``mcore-rlhf steps``: which steps lie in a root, and what each is worth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from mcore_rlhf.errors import NotACheckpoint, UsageError
from mcore_rlhf.manager.run import adopt, steps
from mcore_rlhf.manager.run.steps import Step
from mcore_rlhf.storage.paths import local_path

from .output import Column, Facts, console, count, emit_json, print_table, size

_TRIED = 5


def run(root: Path, quarantine: int | None, reason: str, release: int | None, json: bool) -> None:
    """Change the quarantine where that is wanted, then list.

    Args:
        root: The run's root.
        quarantine: A step to put in quarantine.
        reason: Why.
        release: A step to take out.
        json: For machines.

    Raises:
        typer.Exit: With code 1, where no step is committed.
    """
    require_root(root)
    if reason and quarantine is None:
        raise UsageError("--reason says why a step is put in quarantine\nGive --quarantine STEP as well.")
    if quarantine is not None and quarantine == release:
        raise UsageError(f"--quarantine {quarantine} and --release {release} contradict each other")
    if release is not None:
        steps.release(steps.step_folder(root, release))
    if quarantine is not None:
        steps.quarantine(steps.step_folder(root, quarantine), reason)
    found = _with_advice(steps.listed(root))
    if json:
        emit_json([step_facts(step) for step in found])
    else:
        _print(root, found)
    if not any(step.state == "committed" for step in found):
        raise typer.Exit(1)


def _with_advice(found: list[Step]) -> list[Step]:
    """The steps, where those of other trainers say whether they can be adopted: as that takes opening them, the newest few."""
    tried = [step for step in found if step.state == "foreign"][-_TRIED:]
    return [replace(step, why=f"{step.why}; {_advice(step)}") if step in tried else step for step in found]


def _advice(step: Step) -> str:
    why_not = adopt.why_not(step.path)
    if why_not:
        return f"it cannot be adopted: {why_not}"
    return f"check it and give it one: mcore-rlhf adopt {step.path}"


def require_root(root: Path) -> None:
    """Refuse what cannot be a run's root.

    Raises:
        NotACheckpoint: It does not exist, or is a file.
        UsageError: It is a step.
    """
    if not local_path(root).is_dir():
        raise NotACheckpoint(f"{root}: " + ("expected a folder, found a file" if root.exists() else "no such folder"))
    if steps.step_of(Path(root.absolute().name)) is not None:
        raise UsageError(f"{root}: is one step, but the root of a run is wanted\nGive the folder above: {root.parent}")


def step_facts(step: Step) -> Facts:
    """``step``, ``path``, ``state``, ``bytes``, ``roles``, ``time``, ``why``, ``metrics``, ``quarantined`` (texts are empty
    where there is nothing to say).
    """
    return {
        "step": step.step,
        "path": str(step.path),
        "state": step.state,
        "bytes": step.nbytes,
        "roles": list(step.roles),
        "time": step.time,
        "why": step.why,
        "metrics": dict(step.metrics),
        "quarantined": step.quarantined,
    }


def _print(root: Path, found: list[Step]) -> None:
    out = console()
    committed = sum(step.state == "committed" for step in found)
    out.print(f"{root}: {count(len(found), 'step')}, {committed} committed")
    if not found:
        return
    columns = [Column("step", True), Column("state"), Column("size", True), Column("roles"), Column("time"), Column("")]
    print_table(out, columns, [_row(step) for step in found])


def _row(step: Step) -> tuple[str, ...]:
    note = f"quarantined: {step.quarantined}" if step.quarantined else ""
    return (
        str(step.step),
        step.state,
        size(step.nbytes),
        ", ".join(step.roles),
        step.time,
        "; ".join(text for text in (note, step.why) if text),
    )
