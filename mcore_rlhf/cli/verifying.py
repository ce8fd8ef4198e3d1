"""``mcore-rlhf verify``: whether a checkpoint is intact."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import typer

from mcore_rlhf.errors import Problem
from mcore_rlhf.families.source import ReadOptions
from mcore_rlhf.manager.run.chosen_step import ChosenStep
from mcore_rlhf.manager.whole_step import WholeStep
from mcore_rlhf.verify.checkpoint import Depth, Verdict, verify

from .describe import source_facts
from .meaning import Single, chosen_facts, meaning, print_choice
from .output import Facts, emit_json
from .progress import Progress, shown_progress


def run(path: Path, options: ReadOptions, depth: Depth, workers: int, json: bool) -> None:
    """Verify a checkpoint and print the verdict.

    Args:
        path: The checkpoint.
        options: How it is opened.
        depth: How much is looked at.
        workers: Threads.
        json: For machines.

    Raises:
        typer.Exit: With code 1, where something is wrong; with 2, where a model of a step cannot be read.
    """
    meant = meaning(path, options)
    newer = meant.chosen.damage() if meant.chosen is not None else []
    with shown_progress() as progress:
        if isinstance(meant, WholeStep):
            from .whole import verify_step_facts

            facts = verify_step_facts(meant, options, depth, workers, progress)
        else:
            facts = verify_facts(meant.path, meant.options, depth, workers, progress)
    if json:
        emit_json(_with_newer(facts, newer, meant.chosen))
    else:
        _print(meant, facts, newer)
    if newer or not facts["intact"]:
        raise typer.Exit(1 if newer or _is_damaged(facts) else 2)


def _is_damaged(facts: Facts) -> bool:
    """Whether something is wrong with a step or a model, and not only unknown."""
    models = facts.get("models", {}).values()
    unknown = [model for model in models if model["intact"] is None and model["error"]["exit_code"] == 2]
    return bool(facts["problems"]) or not unknown or any(model["intact"] is False for model in models)


def _with_newer(facts: Facts, newer: list[Problem], chosen: ChosenStep | None) -> Facts:
    """What was found, and that newer steps of the root are damaged: the root is as good as its newest step."""
    return {
        **facts,
        "intact": facts["intact"] and not newer,
        "problems": [*problem_facts(newer), *facts["problems"]],
        "chosen": chosen_facts(chosen),
    }


def _print(meant: WholeStep | Single, facts: Facts, newer: list[Problem]) -> None:
    from .render_verify import print_newer, print_verdict
    from .render_whole import print_step_verdict

    print_choice(meant.chosen)
    (print_step_verdict if isinstance(meant, WholeStep) else print_verdict)(facts)
    print_newer(problem_facts(newer))


def problem_facts(problems: Iterable[Problem]) -> list[Facts]:
    """``kind``, ``message``, ``advice`` of every problem."""
    return [{"kind": item.kind.__name__, "message": item.message, "advice": item.advice} for item in problems]


def verify_facts(path: Path, options: ReadOptions, depth: Depth, workers: int, progress: Progress) -> Facts:
    """Verify a checkpoint.

    Keys: ``path``; ``intact``; ``depth``; ``checked`` (texts); ``problems`` (``kind``, ``message``, ``advice``);
    ``manifest``; ``bytes`` read; ``seconds``; ``checkpoint`` (see :func:`~.describe.source_facts`; null where it could
    not be opened); ``unread`` (why the optimizer is not understood, or null).
    """
    progress.stage(f"verifying {path}", 0)
    began = time.monotonic()
    verdict = verify(path, options, depth, workers, progress.advance)
    return _facts(path, depth, verdict, time.monotonic() - began)


def _facts(path: Path, depth: Depth, verdict: Verdict, seconds: float) -> Facts:
    return {
        "path": str(path),
        "intact": verdict.intact,
        "depth": depth.value,
        "checked": verdict.checked,
        "problems": problem_facts(verdict.problems.found),
        "manifest": verdict.manifest,
        "bytes": verdict.nbytes,
        "seconds": round(seconds, 3),
        "checkpoint": source_facts(verdict.source) if verdict.source is not None else None,
        "unread": (verdict.source and verdict.source.unread) or None,
    }
