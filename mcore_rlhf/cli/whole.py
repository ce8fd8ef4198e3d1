"""``inspect``, ``verify`` and ``diff`` of whole steps: model by model, and everything beside the models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import typer

from mcore_rlhf.errors import CheckpointError, Problem
from mcore_rlhf.families.source import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint, open_without_manifest
from mcore_rlhf.manager.run.step_names import MANIFEST
from mcore_rlhf.manager.run.step_values import check_values
from mcore_rlhf.manager.run.steps import live_of, metrics_of
from mcore_rlhf.manager.whole_step import WholeStep
from mcore_rlhf.storage.manifest import Manifest, check
from mcore_rlhf.verify.checkpoint import Depth
from mcore_rlhf.verify.differ import Tolerance

from .comparing import compare_facts
from .inspecting import inspect_facts
from .meaning import chosen_facts, print_choice
from .output import Facts, emit_json
from .progress import Progress, shown_progress
from .verifying import problem_facts, verify_facts


def inspect_step(step: WholeStep, options: ReadOptions, json: bool) -> None:
    """Print what a step is; a model that cannot be read does not hide the others.

    Raises:
        typer.Exit: With the code of the error of such a model.
    """
    facts = step_facts(step)
    facts["models"] = _of_each(
        step, lambda role, folder: inspect_facts(open_without_manifest(folder, _for(options, role)), folder)
    )
    if json:
        emit_json(facts)
    else:
        from .render_whole import print_step

        print_choice(step.chosen)
        print_step(facts)
    codes = [model["error"]["exit_code"] for model in facts["models"].values() if "error" in model]
    if codes:
        raise typer.Exit(min(codes))


def _of_each(step: WholeStep, look: Callable[[str, Path], Facts]) -> Facts:
    """What is found of every model, by role; ``error`` (``kind``, ``message``, ``exit_code``) of one that cannot be read."""
    found: Facts = {}
    for role, folder in step.models.items():
        try:
            found[role] = look(role, folder)
        except CheckpointError as error:
            told = {"kind": type(error).__name__, "message": str(error), "exit_code": error.exit_code}
            found[role] = {"error": told, "intact": None}
    return found


def step_facts(step: WholeStep) -> Facts:
    """``path``, ``step``, ``chosen``, ``manifest`` (``time``, ``metrics``, ``files``, ``bytes``, ``lossless``, ``live`` state; or null),
    ``roles``, ``others`` (files beside the models).
    """
    manifest = step.manifest
    return {
        "path": str(step.folder),
        "step": step.step,
        "chosen": chosen_facts(step.chosen),
        "roles": [dict(part) for part in manifest.parts] if manifest else [{"role": role} for role in step.models],
        "others": list(step.others),
        "manifest": manifest
        and {
            "time": manifest.provenance.get("time"),
            "metrics": metrics_of(manifest),
            "files": len(manifest.files),
            "bytes": sum(entry.nbytes for entry in manifest.files.values()),
            "lossless": manifest.lossless,
            "live": live_of(manifest),
        },
    }


def verify_step_facts(step: WholeStep, options: ReadOptions, depth: Depth, workers: int, progress: Progress) -> Facts:
    """Verify every file of the manifest, open every file beside the models, then verify every model.

    Keys: those of :func:`step_facts`; ``intact``; ``problems`` of the manifest's files and of those beside the models;
    ``models`` by role, as ``verify`` of one model says it; ``intact`` is null of one that cannot be read.
    """
    found = check_manifest(step.folder, step.manifest, progress, depth is Depth.QUICK) if step.manifest else []
    found += _unfit_values(step, options, depth, found)
    problems = problem_facts(found)
    models = _of_each(step, lambda role, folder: verify_facts(folder, _for(options, role), depth, workers, progress))
    intact = not problems and all(verdict["intact"] for verdict in models.values())
    return {**step_facts(step), "intact": intact, "depth": depth.value, "problems": problems, "models": models}


def check_manifest(folder: Path, manifest: Manifest, progress: Progress, sizes_only: bool = False) -> list[Problem]:
    """Compare a step with its manifest, byte by byte, and show how far that is."""
    progress.stage(f"verifying {folder / MANIFEST}", sum(entry.nbytes for entry in manifest.files.values()))
    advance = progress.advance
    return check(folder, manifest, sizes_only=sizes_only, progress=lambda _, nbytes: advance(nbytes)).found


def _unfit_values(step: WholeStep, options: ReadOptions, depth: Depth, damaged: list[Problem]) -> list[Problem]:
    """What is wrong with the files beside the models, but for those of which that is known already."""
    known = [problem.message for problem in damaged]
    files = [name for name in step.others if not any(text.startswith(f"{step.folder / name}: ") for text in known)]
    records = step.manifest is None and depth is not Depth.QUICK
    return check_values(step.folder, files, options.stubs, records=records).found


def compare_steps(a: WholeStep, b: WholeStep, options: ReadOptions, tolerance: Tolerance, json: bool) -> None:
    """Compare two steps and print the differences.

    Raises:
        typer.Exit: With code 1, where something differs.
    """
    with shown_progress() as progress:
        facts = compare_step_facts(a, b, options, tolerance, progress)
    if json:
        emit_json(facts)
    else:
        from .render_whole import print_step_comparison

        for step in (a, b):
            print_choice(step.chosen)
        print_step_comparison(facts)
    if not facts["equal"]:
        raise typer.Exit(1)


def compare_step_facts(
    a: WholeStep, b: WholeStep, options: ReadOptions, tolerance: Tolerance, progress: Progress
) -> Facts:
    """Compare every model that both have, and the content of all other files.

    Keys: ``a``, ``b`` (see :func:`step_facts`); ``equal``; ``models`` by role, as ``diff`` of two models says it; ``others`` by file:
    ``equal``, ``different``, or which step lacks it.
    """
    models = {}
    for role in sorted(a.models.keys() & b.models.keys()):
        first, second = (open_checkpoint(step.models[role], _for(options, role)) for step in (a, b))
        models[role] = compare_facts(first, second, tolerance, None, progress)
    lacking = {role: f"only {_having(role, a, b)} has it" for role in sorted(a.models.keys() ^ b.models.keys())}
    others = {name: _compared(a, b, name) for name in sorted({*a.others, *b.others})}
    equal = all(facts["equal"] for facts in models.values()) and not lacking and set(others.values()) <= {"equal"}
    return {"a": step_facts(a), "b": step_facts(b), "equal": equal, "models": models, "others": {**lacking, **others}}


def _having(role: str, a: WholeStep, b: WholeStep) -> Path:
    return a.folder if role in a.models else b.folder


def _compared(a: WholeStep, b: WholeStep, name: str) -> str:
    """By bytes: ``.pt`` files of ours are the same bytes for the same values."""
    paths = [step.folder / name for step in (a, b)]
    there = [path.is_file() for path in paths]
    if not all(there):
        return f"only {paths[0 if there[0] else 1].parent.parent} has it"
    same = paths[0].stat().st_size == paths[1].stat().st_size and paths[0].read_bytes() == paths[1].read_bytes()
    return "equal" if same else "different"


def _for(options: ReadOptions, role: str) -> ReadOptions:
    return replace(options, role=role, step=None)
