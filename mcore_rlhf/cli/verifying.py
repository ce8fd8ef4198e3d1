"""``mcore-rlhf verify``: whether a checkpoint is intact."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from mcore_rlhf.formats.base import ReadOptions
from mcore_rlhf.manager.step_values import holds_values
from mcore_rlhf.manager.whole_step import WholeStep, whole_step
from mcore_rlhf.verify.checkpoint import Depth, Verdict, verify

from .describe import source_facts
from .meaning import Single, meaning
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
        typer.Exit: With code 1, where something is wrong.
    """
    meant = meaning(path, options)
    if isinstance(meant, Single):
        meant = _with_values(meant)
    if isinstance(meant, WholeStep):
        from .whole import verify_step

        return verify_step(meant, options, depth, workers, json)
    with shown_progress() as progress:
        facts = verify_facts(meant.path, meant.options, depth, workers, progress)
    if json:
        emit_json(facts)
    else:
        from .render_verify import print_verdict

        print_verdict(facts)
    if not facts["intact"]:
        raise typer.Exit(1)
    return None


def _with_values(single: Single) -> Single | WholeStep:
    """A step of one model counts as that model, unless there is more in it, which must be intact as well."""
    step = whole_step(single.path, single.options.step) if single.options.role is None else None
    return step if step is not None and any(map(holds_values, step.others)) else single


def verify_facts(path: Path, options: ReadOptions, depth: Depth, workers: int, progress: Progress) -> Facts:
    """Verify a checkpoint.

    Keys: ``path``; ``intact``; ``depth``; ``checked`` (texts); ``problems`` (``kind``, ``message``, ``advice``);
    ``manifest``; ``bytes`` read; ``seconds``; ``checkpoint`` (see :func:`~.describe.source_facts`; null where it could
    not be opened).
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
        "problems": [
            {"kind": problem.kind.__name__, "message": problem.message, "advice": problem.advice}
            for problem in verdict.problems.found
        ],
        "manifest": verdict.manifest,
        "bytes": verdict.nbytes,
        "seconds": round(seconds, 3),
        "checkpoint": source_facts(verdict.source) if verdict.source is not None else None,
    }
