"""``mcore-rlhf plan``: the plan that ``convert`` would carry out, unexecuted."""

from __future__ import annotations

from dataclasses import replace

from mcore_rlhf.convert import Job, prepare
from mcore_rlhf.core.catalog import Record
from mcore_rlhf.core.plan import Copy, FilePlan, plan_file
from mcore_rlhf.formats.base import FileLayout, TargetFile
from mcore_rlhf.manager.whole_step import WholeStep

from .describe import parallel_facts, source_facts
from .job import ConversionJob
from .meaning import chosen_facts, meaning_of_source, print_choice
from .output import Facts, emit_json

SHOWN_COPIES = 10
"""Copies per file that are printed for people; JSON has all of them."""


def run(job: ConversionJob, copies: bool, json: bool) -> None:
    """Print the plan of a conversion.

    Args:
        job: What to convert, and to what.
        copies: Whether the copies themselves are listed.
        json: For machines.

    Raises:
        CheckpointError: The source is not sound, or the target cannot be made of it.
    """
    meant = meaning_of_source(job)
    if isinstance(meant, WholeStep):
        from .converting_steps import plan

        return plan(job, meant, json)
    planned = prepare(meant.path, replace(job.options, read=meant.options))
    facts = {
        **plan_facts(planned, copies, limit=None if json else SHOWN_COPIES),
        "chosen": chosen_facts(meant.chosen),
    }
    if json:
        emit_json(facts)
        return None
    print_choice(meant.chosen)
    from .render_plan import print_plan

    return print_plan(facts)


def plan_facts(job: Job, copies: bool, limit: int | None) -> Facts:
    """What a plan would do.

    Keys: ``source``; ``target`` (``format``, ``parallel``); ``files`` (``path``, ``records``, ``copies``, ``bytes``,
    ``casts``, and ``copy_list`` where asked for); ``totals`` (``files`` and the same); ``report``; ``lossless``;
    ``account``.

    Args:
        job: The planned job.
        copies: Whether the copies themselves are listed.
        limit: How many of them per file.
    """
    files = [_file_facts(job, file, copies, limit) for file in job.target.files]
    totals = {key: sum(file[key] for file in files) for key in ("records", "copies", "bytes", "casts")}
    return {
        "source": source_facts(job.source),
        "target": {"format": job.target.format, "parallel": parallel_facts(job.target.parallel)},
        "files": files,
        "totals": {"files": len(files), **totals},
        "report": job.report.as_json(),
        "lossless": job.lossless,
        "account": job.account.as_json(),
    }


def _file_facts(job: Job, file: TargetFile, copies: bool, limit: int | None) -> Facts:
    layout: FileLayout = file.layout()
    plan: FilePlan = plan_file(file.path, layout.holds, job.target.source)
    facts: Facts = {
        "path": file.path,
        "records": len(layout.records),
        "copies": len(plan.copies),
        "bytes": sum(record.nbytes for record in layout.records),
        "casts": sum(copy.cast is not None for copy in plan.copies),
    }
    if copies:
        facts["copy_list"] = [copy_facts(copy) for copy in plan.copies[:limit]]
    return facts


def copy_facts(copy: Copy) -> Facts:
    """One strided copy; ``start`` and ``strides`` in elements of the record."""
    return {
        "shape": list(copy.shape),
        "source": _end(copy.source, copy.source_start, copy.source_strides),
        "target": _end(copy.target, copy.target_start, copy.target_strides),
    }


def _end(record: Record, start: int, strides: tuple[int, ...]) -> Facts:
    return {
        "file": record.file,
        "record": record.key,
        "dtype": str(record.dtype),
        "start": start,
        "strides": list(strides),
    }
