"""``convert`` and ``plan`` of a whole step."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from mcore_rlhf.manager.convert_step import StepJob, convert_step, prepare_step
from mcore_rlhf.manager.whole_step import WholeStep

from .converting import said_when_interrupted
from .describe import parallel_facts, source_facts
from .job import ConversionJob
from .meaning import chosen_facts, print_choice
from .output import Facts, emit_json
from .progress import Progress, shown_progress


def plan(job: ConversionJob, step: WholeStep, json: bool) -> None:
    """Print what converting a step would do."""
    _emit(step, _facts(prepare_step(step, job.options), None), json)


def run(job: ConversionJob, step: WholeStep, json: bool) -> None:
    """Convert a step and print a summary.

    Raises:
        CheckpointError: It cannot be done; nothing was published.
        typer.Exit: With code 1, where ``--verify`` finds the published step to be wrong.
    """
    with shown_progress() as progress:
        facts = convert_facts(job, step, progress)
    _emit(step, facts, json)
    if not all(proof["proved"] for proof in facts.get("proofs", {}).values()):
        raise typer.Exit(1)


def _emit(step: WholeStep, facts: Facts, json: bool) -> None:
    if json:
        emit_json(facts)
        return
    from .render_whole import print_step_conversion

    print_choice(step.chosen)
    print_step_conversion(facts)


def convert_facts(job: ConversionJob, step: WholeStep, progress: Progress) -> Facts:
    """Convert a step.

    Keys: ``path``, ``step``; ``target``; ``models`` by role (``source``, ``target``, ``bytes``); ``carried`` files; ``bytes``;
    ``seconds``; ``lossless``; ``account`` and ``report`` (of the ``step``, and by role);
    ``load``; with ``--verify`` also ``proofs`` by role.
    """
    target = job.target_folder()
    began = time.monotonic()
    with said_when_interrupted(target):
        done, folder = convert_step(step, target, job.options, progress)
    facts = _facts(done, folder)
    facts.update(seconds=round(time.monotonic() - began, 3), load=f"resume from {folder}")
    if job.verify:
        facts["proofs"] = _proofs(job, done, folder, progress)
    return facts


def _facts(job: StepJob, target: Path | None) -> Facts:
    models = {
        role: {
            "source": source_facts(planned.source),
            "target": {"format": planned.target.format, "parallel": parallel_facts(planned.target.parallel)},
            "copies": planned.copies,
            "bytes": planned.nbytes,
        }
        for role, planned in job.jobs.items()
    }
    return {
        "path": str(job.source.folder),
        "chosen": chosen_facts(job.source.chosen),
        "step": job.source.step,
        "target": None if target is None else str(target),
        "models": models,
        "carried": list(job.carried),
        "bytes": job.nbytes,
        "lossless": job.lossless,
        "account": {
            "step": job.account.as_json(),
            **{role: planned.account.as_json() for role, planned in job.jobs.items()},
        },
        "report": {
            "step": job.report.as_json(),
            **{role: planned.report.as_json() for role, planned in job.jobs.items()},
        },
    }


def _proofs(job: ConversionJob, done: StepJob, folder: Path, progress: Progress) -> Facts:
    from .proving import prove

    return {role: prove(job, planned, folder / role, progress) for role, planned in done.jobs.items()}
