"""``mcore-rlhf convert``: convert, and with ``--verify`` prove that it worked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import typer

from mcore_rlhf.convert import Job, convert
from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.formats.registry import format_named
from mcore_rlhf.manager.whole_step import WholeStep
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.staging import MANIFEST_NAME

from .describe import parallel_facts, source_facts, tensor_count
from .guard import Interrupted
from .job import ConversionJob
from .meaning import Single, chosen_facts, meaning_of_source, print_choice
from .output import Facts, emit_json
from .progress import Progress, shown_progress


def run(job: ConversionJob, json: bool) -> None:
    """Carry out a conversion and print a summary.

    Args:
        job: What to convert, to what, and how.
        json: For machines.

    Raises:
        CheckpointError: It cannot be done; nothing was published.
        typer.Exit: With code 1, where ``--verify`` finds the published target to be wrong.
    """
    meant = meaning_of_source(job)
    if isinstance(meant, WholeStep):
        from .converting_steps import run as run_step

        return run_step(job, meant, json)
    with shown_progress() as progress:
        facts = convert_facts(job, meant, progress)
    facts["chosen"] = chosen_facts(meant.chosen)
    if json:
        emit_json(facts)
    else:
        from .render_convert import print_conversion

        print_choice(meant.chosen)
        print_conversion(facts)
    if not facts.get("proved", True):
        raise typer.Exit(1)
    return None


def convert_facts(job: ConversionJob, meant: Single, progress: Progress) -> Facts:
    """Convert.

    Keys: ``name`` of the job; ``source``; ``target`` (``path``, ``format``, ``parallel``); ``tensors`` read, ``files``,
    ``copies``, ``bytes`` written, ``seconds``, ``bytes_per_second``; ``casts``; ``lossless``; ``account``; ``report``;
    ``load`` (the framework's options); with ``--verify`` also ``verify``, ``diff`` and ``proved``.

    Raises:
        CheckpointError: It cannot be done; nothing was published.
    """
    target, options = job.target_folder(), replace(job.options, read=meant.options)
    began = time.monotonic()
    with said_when_interrupted(target):
        done = convert(meant.path, target, options, progress)
    facts = _facts(job, done, target, time.monotonic() - began)
    if job.verify:
        with said_when_interrupted(target):
            facts.update(_prove(job, done, done.published or target, progress))
    return facts


def _facts(job: ConversionJob, done: Job, target: Path, seconds: float) -> Facts:
    return {
        "name": job.name,
        "source": source_facts(done.source),
        "target": {
            "path": str(target),
            "format": done.target.format,
            "parallel": parallel_facts(done.target.parallel),
        },
        "tensors": tensor_count(done.source, with_optimizer=not job.options.write.no_optimizer),
        "files": len(done.target.files) + len(done.target.texts) + len(done.target.carried),
        "copies": done.copies,
        "bytes": done.nbytes,
        "seconds": round(seconds, 3),
        "bytes_per_second": round(done.nbytes / max(seconds, 1e-9)),
        "casts": done.casts,
        "lossless": done.lossless,
        "account": done.account.as_json(),
        "report": done.report.as_json(),
        "load": format_named(done.target.format).load_hint(target, optimizer=_has_optimizer(job, done)),
    }


def _has_optimizer(job: ConversionJob, done: Job) -> bool:
    return (done.seen or done.source).optimizer is not None and not job.options.write.no_optimizer


def _prove(job: ConversionJob, done: Job, target: Path, progress: Progress) -> Facts:
    from .proving import prove

    return prove(job, done, target, progress)


@contextmanager
def said_when_interrupted(target: Path) -> Iterator[None]:
    """Let an interrupt say whether the target was published."""
    before = _transaction(target)
    try:
        yield
    except KeyboardInterrupt as stop:
        signum = stop.args[0] if stop.args else 2
        raise Interrupted(_what_is_left(target, before), signum) from None


def _what_is_left(target: Path, before: str | None) -> str:
    now = _transaction(target)
    if now is not None and now == before and not _leftovers(target):
        return f"{target} is as it was; the half-written copy was removed"
    if now is not None and now != before:
        return f"{target} had just been published, and is complete"
    left = _leftovers(target)
    if left:
        return f"nothing was published at {target}; another conversion to it, or what could not be removed, is in {left[0]}"
    return f"nothing was published at {target}; what was half-written has been removed"


def _leftovers(target: Path) -> list[Path]:
    hidden = f".{target.name}.partial-"
    parent = target.absolute().parent
    return [path for path in parent.iterdir() if path.name.startswith(hidden)] if parent.is_dir() else []


def _transaction(target: Path) -> str | None:
    """Which transaction published what is at the target."""
    try:
        return Manifest.read(target / MANIFEST_NAME).transaction
    except CheckpointError:
        return None
