"""``mcore-rlhf verify``: whether a checkpoint is intact."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import click

from mcore_rlhf.errors import Problem, Problems
from mcore_rlhf.execution.run import Progress
from mcore_rlhf.families.complete import gaps
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.manager.run.checks import check_values
from mcore_rlhf.manager.run.steps import MANIFEST
from mcore_rlhf.manager.runs import goes_without, run_at, unmet
from mcore_rlhf.manager.subject import Subject, look
from mcore_rlhf.storage.manifest import Manifest, check
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.verify.checkpoint import Depth, verify

from .describe import (
    chosen_facts,
    layout_line,
    of_each,
    print_choice,
    print_problems,
    problem_facts,
    source_facts,
    step_facts,
)
from .output import Facts, count, duration, emit_json, rate, say, size
from .progress import shown_progress

_SHOWN = 10


def run(path: Path, options: ReadOptions, depth: Depth, workers: int, json: bool) -> None:
    """Verify a checkpoint and print the verdict.

    Args:
        path: The checkpoint.
        options: How it is opened.
        depth: How much is looked at.
        workers: Threads.
        json: For machines.

    Raises:
        click.exceptions.Exit: With code 1, where something is wrong; with 2, where a model of a step cannot be read.
    """
    subject, facts = look(path, options, partial(_shown, depth, workers), lambda found: not found[1]["intact"])
    newer = problem_facts(subject.chosen.damage()) if subject.chosen is not None else []
    if json:
        # The root is as good as its newest step.
        problems, chosen = [*newer, *facts["problems"]], chosen_facts(subject.chosen)
        emit_json({**facts, "intact": facts["intact"] and not newer, "problems": problems, "chosen": chosen})
    else:
        print_choice(subject.chosen)
        (_print_model if subject.alone else _print_step)(facts)
        _print_newer(newer)
    if newer or not facts["intact"]:
        raise click.exceptions.Exit(1 if newer or _is_damaged(facts) else 2)


def _shown(depth: Depth, workers: int, subject: Subject) -> tuple[Subject, Facts]:
    stages = (depth is not Depth.QUICK) * len(subject.models) + (subject.manifest is not None)
    with shown_progress(stages) as progress:
        return subject, _verify(subject, depth, workers, progress)


def _is_damaged(facts: Facts) -> bool:
    """Whether something is wrong with a step or a model, and not only unknown."""
    models = facts.get("models", {}).values()
    unknown = [model for model in models if model["intact"] is None and model["error"]["exit_code"] == 2]
    return bool(facts["problems"]) or not unknown or any(model["intact"] is False for model in models)


def _verify(subject: Subject, depth: Depth, workers: int, progress: Progress) -> Facts:
    """Verify every file of a step's manifest, open every file beside the models, then verify every model.

    Keys of a lone checkpoint: see :func:`verify_facts`. Of a step those of :func:`~.describe.step_facts`; ``intact``; ``depth``;
    ``missing`` (texts: files that its trainer writes beside the models, and does without); ``problems`` of the manifest's files and of
    those beside the models; ``models`` by role; ``intact`` is null of one that cannot be read.

    Raises:
        Unreadable: All that is wrong with files of the manifest, or beside the models, is that they cannot be read.
    """
    found = check_manifest(subject.folder, subject.manifest, progress, depth is Depth.QUICK) if subject.manifest else []
    found += _unfit_values(subject, depth, found)
    found += [] if subject.manifest else unmet(subject.folder)
    run = run_at(subject.folder) if subject.alone and subject.options.step is None else None
    found += run.misled() if run is not None else []
    Problems(found).raise_if_unread()
    problems = problem_facts(found)
    models = of_each(
        subject, lambda role: verify_facts(subject.models[role], subject.reading(role), depth, workers, progress)
    )
    dp, world = (_most(models, of) for of in ("dp", "world_size"))
    adopted = subject.manifest is None or subject.manifest.provenance.get("adopted")
    missing = goes_without(subject.folder, dp=dp, world=world) if adopted else []
    if subject.alone:
        (verdict,) = models.values()
        intact, problems = verdict["intact"] and not problems, [*verdict["problems"], *problems]
        return {**verdict, "intact": intact, "missing": [*verdict["missing"], *missing], "problems": problems}
    intact = not problems and all(verdict["intact"] for verdict in models.values())
    return {
        **step_facts(subject), "intact": intact, "depth": depth.value, "missing": missing, "problems": problems, "models": models,
    }  # fmt: skip


def _most(models: Mapping[str, Facts], of: str) -> int:
    """The highest degree that one of a step's models has; 1 where none could be opened."""
    opened = (model.get("checkpoint") or {} for model in models.values())
    return max((int(found["parallel"][of]) for found in opened if found), default=1)


def verify_facts(path: ReadablePath, options: ReadOptions, depth: Depth, workers: int, progress: Progress) -> Facts:
    """Verify one model.

    Keys: ``path``; ``intact``; ``depth``; ``checked``, ``unchecked``, ``contradicts`` (texts); ``missing`` (texts: weights that most
    such models have, and no file lists); ``problems`` (``kind``, ``message``, ``advice``); ``manifest``; ``bytes`` read; ``seconds``;
    ``checkpoint`` (see :func:`~.describe.source_facts`; null where it could not be opened); ``unread`` (why the optimizer is not
    understood, or null).
    """
    began = time.monotonic()
    verdict = verify(path, options, depth, workers, progress.advance, partial(progress.stage, f"verifying {path}"))
    return {
        "path": str(path),
        "intact": verdict.intact,
        "depth": depth.value,
        "checked": verdict.checked,
        "unchecked": verdict.unchecked,
        "contradicts": verdict.contradicts,
        "missing": list(gaps(verdict.source)) if verdict.source is not None else [],
        "problems": problem_facts(verdict.problems.found),
        "manifest": verdict.manifest,
        "bytes": verdict.nbytes,
        "seconds": round(time.monotonic() - began, 3),
        "checkpoint": source_facts(verdict.source) if verdict.source is not None else None,
        "unread": (verdict.source and verdict.source.unread) or None,
    }


def check_manifest(
    folder: ReadablePath, manifest: Manifest, progress: Progress, sizes_only: bool = False
) -> list[Problem]:
    """Compare a step with its manifest, byte by byte, and show how far that is."""
    progress.stage(f"verifying {folder / MANIFEST}", sum(entry.nbytes for entry in manifest.files.values()))
    advance = progress.advance
    return check(folder, manifest, sizes_only=sizes_only, progress=lambda _, nbytes: advance(nbytes)).found


def _unfit_values(step: Subject, depth: Depth, damaged: list[Problem]) -> list[Problem]:
    """What is wrong with the files beside the models, but for those of which that is known already."""
    known = [problem.message for problem in damaged]
    files = [name for name in step.others if not any(text.startswith(f"{step.folder / name}: ") for text in known)]
    records = step.manifest is None and depth is not Depth.QUICK
    return check_values(step.folder, files, step.options.stubs, records=records).found


def _print_model(facts: Facts) -> None:
    found = facts["checkpoint"]
    unopened = "could not be opened" if facts["problems"] else "in no format that is known"
    say(f"{facts['path']}: {layout_line(found) if found else unopened}")
    say(verdict_line(facts))
    for text in facts["checked"]:
        say(f"  checked  {text}")
    _say_doubts(facts, "  ")
    if facts["unread"]:
        say("  not understood  " + facts["unread"].replace("\n", "\n    "))
    print_problems(facts["problems"])


def _say_doubts(facts: Facts, indent: str) -> None:
    for label, key in (("not checked", "unchecked"), ("contradicts", "contradicts"), ("missing", "missing")):
        for text in facts[key][:_SHOWN]:
            say(f"{indent}{label}  {text}")
        if len(facts[key]) > _SHOWN:
            say(f"{indent}{label}  {len(facts[key]) - _SHOWN} more (--json lists all)")


def _print_newer(problems: list[Facts]) -> None:
    """Print what is wrong with a root but for the step that was looked at: with newer ones, or with what names one."""
    if problems:
        say("damaged, elsewhere in the root:")
        print_problems(problems)


def verdict_line(facts: Facts) -> str:
    """``intact: 3.2 GiB in 1.5 s, 2.2 GiB/s``."""
    whole = "intact, but for what the optimizer holds, which is not understood" if facts["unread"] else "intact"
    word = whole if facts["intact"] else f"damaged: {count(len(facts['problems']), 'problem')}"
    if not facts["bytes"]:
        return word
    nbytes, seconds = facts["bytes"], facts["seconds"]
    return f"{word} ({size(nbytes)} read in {duration(seconds)}, {rate(nbytes, seconds)})"


def _print_step(facts: Facts) -> None:
    word = "intact" if facts["intact"] else "damaged"
    say(f"{facts['path']}: step {facts['step']}, {word}")
    problems = count(len(facts["problems"]), "problem") if facts["problems"] else "no problem"
    say(f"  files  {_looked_at(facts)}: {problems}")
    for text in facts["missing"]:
        say(f"    missing  {text}")
    print_problems(facts["problems"])
    for role, verdict in facts["models"].items():
        if "error" in verdict:
            say(f"  {role}  cannot be read: {verdict['error']['message']}")
            continue
        found = verdict["checkpoint"]
        say(f"  {role}  {layout_line(found) if found else 'not opened'}: {verdict_line(verdict)}")
        _say_doubts(verdict, "    ")
        if verdict["unread"]:
            say("    not understood  " + verdict["unread"].replace("\n", "\n      "))
        print_problems(verdict["problems"])


def _looked_at(facts: Facts) -> str:
    beside = "those beside the models opened"
    if facts["manifest"] is None:
        return f"no manifest, {beside}"
    what = "sizes" if facts["depth"] == "quick" else "CRC-32"
    return f"{what} of {count(facts['manifest']['files'], 'file')} of the manifest, {beside}"
