"""``mcore-rlhf report``: what the other commands say with ``--json``, and the shard map, on one page to look at."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_rlhf.errors import CheckpointError, UsageError
from mcore_rlhf.execution.run import Progress
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import is_model, open_checkpoint, open_without_manifest
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.runs import listed_steps
from mcore_rlhf.manager.subject import Subject, find
from mcore_rlhf.report.heat import heat_map
from mcore_rlhf.report.page import Compared, ManifestConversion, Model, Page, made, write
from mcore_rlhf.report.page import PageSubject as Shown
from mcore_rlhf.report.saved import saved_roles
from mcore_rlhf.report.shards import shard_map
from mcore_rlhf.report.timeline import RunFacts, chrome_trace, run_facts
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import storage_error
from mcore_rlhf.storage.publish import make_folder_of, replace_text
from mcore_rlhf.storage.urls import checkpoint_path
from mcore_rlhf.verify.checkpoint import Depth
from mcore_rlhf.verify.differ import Comparison, Tolerance

from .comparing import compare_subjects
from .converting import compare_converted
from .describe import of_each, origin_of, problem_facts
from .inspecting import model_facts
from .options import ReportOptions, default_workers
from .output import Facts, emit_json, plain, say, size
from .progress import shown_progress
from .steps import step_facts
from .verifying import check_manifest, verify_facts

_ACCOUNT = ("items", "kept", "derived", "changed", "left_behind", "lost", "told", "unaccounted")


def run(paths: tuple[Path, ...], options: ReadOptions, request: ReportOptions, json: bool) -> None:
    """Make a page and write it.

    Args:
        paths: One checkpoint, step or root of a run; or two, which are compared.
        options: How they are opened.
        request: What else was said.
        json: For machines: print what stands on the page; the file is written only where it was named.

    Raises:
        CheckpointError: Nothing of it can be opened, or something cannot be written.
    """
    if len(paths) not in (1, 2):
        raise UsageError(f"report: takes one path, or two that are compared, and {len(paths)} were given")
    with shown_progress() as progress:
        page = _page(paths, options, request, progress)
    if request.trace is not None:
        _write_trace(request.trace, page["run"])
    output = request.output or (None if json else Path("report.html"))
    if output is not None:
        write(output, page["title"], plain(page))
    if json:
        emit_json(page)
    elif output is not None:
        say(f"{output}: {size(output.stat().st_size)}, {', '.join(_sections(page))}; open it in a browser")


def _page(paths: tuple[Path, ...], options: ReadOptions, request: ReportOptions, progress: Progress) -> Page:
    history = _run_of(paths[0], request.events) if len(paths) == 1 else None
    subjects, problems = [], []
    try:
        subjects = [find(path, options) for path in paths]
    except CheckpointError as error:
        if history is None or not _is_role(paths[0], options.role):
            raise
        problems.append(str(error))
    shown = [_shown(subject, request, progress) for subject in subjects]
    converted = len(shown) == 2 and shown[1]["conversion"] is not None
    for one, label in zip(shown, (("before", "after") if converted else ("first", "second")), strict=False):
        one["label"] = label if len(shown) == 2 else ""
    diff = _diff(subjects, converted, progress) if len(subjects) == 2 and not request.no_values else None
    two = "Conversion" if converted else "Comparison"
    kind = two if len(paths) == 2 else "Run" if history else "Checkpoint" if subjects[0].alone else "Step"
    names = [checkpoint_path(path).name or str(path) for path in paths]
    return {
        "kind": kind,
        "title": (" → " if converted else " and ").join(names),
        "subtitle": " · ".join(map(str, paths)),
        "problems": problems,
        "subjects": shown,
        "run": history,
        "diff": diff,
        "resume_check": _verdict_of(request.resume_check),
        "made": made(),
    }


def _is_role(root: Path, role: str | None) -> bool:
    """Whether some step of a run has a role; none is all of them."""
    return role is None or any(role in step.roles for step in listed_steps(checkpoint_path(root)))


def _run_of(path: Path, events: Path | None) -> RunFacts | None:
    """The run whose root a path is; None where it is none."""
    root = checkpoint_path(path)
    is_root = isinstance(root, Path) and root.is_dir() and steps.step_of(root) is None and not is_model(root)
    found = listed_steps(root) if is_root else []
    if found and isinstance(root, Path):
        return run_facts(root, found, [step_facts(step) for step in found], events)
    if events is not None:
        raise UsageError(f"--events is about a run, and {path} is not the root of one")
    return None


def _shown(subject: Subject, request: ReportOptions, progress: Progress) -> Shown:
    """A step or a lone checkpoint, model by model."""
    models = of_each(subject, lambda role: _model(subject, role, request, progress))
    step = subject.manifest
    manifest: Facts | None = None
    if step is not None:
        manifest = {
            "path": str(subject.folder / steps.MANIFEST), "files": len(step.files), "lossless": step.lossless,
            "provenance": dict(step.provenance), "report": dict(step.report),
        }  # fmt: skip
    elif subject.alone:
        manifest = next(iter(models.values()))["facts"]["manifest"]
    stated = manifest if manifest is not None and "error" not in manifest else None
    return {
        "label": "",
        "path": str(subject.folder),
        "models": {role: _told(model) for role, model in models.items()},
        "manifest": stated and {key: value for key, value in stated.items() if key != "report"},
        "origin": None if stated is None else origin_of(stated["report"]),
        "conversion": None if stated is None else _conversion(stated),
        "saved": [] if step is None else saved_roles(subject.folder, step, list(models)),
        "metrics": {} if step is None else step.metrics,
        "step_verdict": None if step is None else _step_verdict(subject, request, progress),
    }


def _told(model: Facts) -> Model:
    return {"error": model["error"]} if "error" in model else {**model}  # type: ignore[typeddict-item]


def _model(subject: Subject, role: str, request: ReportOptions, progress: Progress) -> Facts:
    folder = subject.models[role]
    source = open_without_manifest(folder, subject.reading(role))
    facts = model_facts(source, folder)
    facts["file_count"] = len(facts.pop("files"))
    depth = Depth.FULL if request.verify else Depth.QUICK
    verdict = verify_facts(folder, subject.reading(role), depth, default_workers(), progress)
    return {"facts": facts, "shards": shard_map(source), "verdict": verdict}


def _step_verdict(subject: Subject, request: ReportOptions, progress: Progress) -> Facts:
    assert subject.manifest is not None
    depth = Depth.FULL if request.verify else Depth.QUICK
    problems = problem_facts(check_manifest(subject.folder, subject.manifest, progress, depth is Depth.QUICK))
    return {"intact": not problems, "depth": depth.value, "problems": problems, "checked": []}


def _conversion(manifest: Mapping[str, Any]) -> ManifestConversion | None:
    """What a manifest says of the conversion that wrote it; None where it was none."""
    report = manifest["report"]
    account, lines = report.get("account"), report.get("lines")
    alone = isinstance(account, Mapping) and "items" in account
    accounts = {"": account} if alone else account if isinstance(account, Mapping) else {}
    known = {
        role: told
        for role, told in accounts.items()
        if isinstance(told, Mapping) and all(key in told for key in _ACCOUNT)
    }
    if not known:
        return None
    source = f"{report.get('source')}, {report.get('source_parallel')}" if alone else str(report.get("converted_from"))
    return {
        "source": source, "lossless": manifest["lossless"], "lines": {"": lines} if alone else dict(lines or {}), "accounts": known,
    }  # fmt: skip


def _diff(subjects: list[Subject], converted: bool, progress: Progress) -> Compared:
    """``diff``, or what ``convert --verify`` compares, with a heat map of every model."""
    a, b = subjects
    if converted:
        roles = [""] if a.alone and b.alone else [role for role in a.models if role in b.models]
        models = {role: _converted(a, b, role, progress) for role in roles}
        return {"equal": all(model["equal"] for model in models.values()), "models": models, "others": {}}
    facts = compare_subjects(a, b, Tolerance(), None, progress, _with_heat)
    if "models" in facts:
        return {"equal": facts["equal"], "models": facts["models"], "others": facts["others"]}
    return {"equal": facts["equal"], "models": {"": facts}, "others": {}}


def _converted(a: Subject, b: Subject, role: str, progress: Progress) -> Facts:
    sources = []
    for subject in (a, b):
        own = role or next(iter(subject.models))
        sources.append(open_checkpoint(subject.models[own], subject.reading(own), partial=True))
    return compare_converted(sources[0], sources[1], progress, _with_heat)


def _with_heat(result: Comparison) -> Facts:
    return {"heat": heat_map(result)}


def _verdict_of(path: Path | None) -> Facts | None:
    """What ``resume-check --json`` printed.

    Raises:
        UsageError: The file is not that.
    """
    if path is None:
        return None
    try:
        found = reading.read_json(path)
    except OSError as error:
        raise storage_error(error, path, "read") from None
    except ValueError as error:
        raise UsageError(f"--resume-check {path}: is no JSON: {error}") from None
    if not isinstance(found, dict) or not {"verdict", "passed", "runs"} <= found.keys():
        raise UsageError(f"--resume-check {path}: is not what mcore-rlhf resume-check --json prints")
    return found


def _write_trace(path: Path, run: RunFacts | None) -> None:
    if run is None:
        raise UsageError(
            "--trace writes the timeline of a run\nGive the root of a run, with its global_step_N folders."
        )
    make_folder_of(path)
    try:
        replace_text(path, json.dumps(chrome_trace(run)), fsync=False)
    except OSError as error:
        raise storage_error(error, path, "write") from error


def _sections(page: Page) -> list[str]:
    names = {
        "run": page["run"] is not None,
        "metrics": page["run"] is not None and any(step["metrics"] for step in page["run"]["steps"]),
        "comparison": page["diff"] is not None,
        "shard map": any("shards" in model for subject in page["subjects"] for model in subject["models"].values()),
    }
    return [name for name, there in names.items() if there] or ["overview"]
