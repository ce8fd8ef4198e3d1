"""``mcore-rlhf plan``: the plan that ``convert`` would carry out, unexecuted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mcore_rlhf.convert import Job
from mcore_rlhf.core.catalog import Record
from mcore_rlhf.core.plan import Copy
from mcore_rlhf.execution.spool import PlannedFile
from mcore_rlhf.manager.convert_step import prepare_step, save_plan

from .converting import print_step, step_job_facts
from .describe import (
    account_text,
    chosen_facts,
    layout_text,
    parallel_facts,
    print_choice,
    print_report,
    source_facts,
    source_text,
    yes_no,
)
from .job import ConversionJob
from .output import Column, Facts, count, emit_json, print_facts, print_table, say, size

_SHOWN_COPIES = 10
"""Copies per file that are printed for people; JSON has all of them."""
_SHOWN_FILES = 40


def run(job: ConversionJob, copies: bool, json: bool, save: Path | None = None) -> None:
    """Print the plan of a conversion.

    Args:
        job: What to convert, and to what.
        copies: Whether the copies themselves are listed; those of a lone checkpoint are.
        json: For machines.
        save: Where the plan itself is saved.

    Raises:
        CheckpointError: The source is not sound, or the target cannot be made of it.
    """
    subject = job.subject()
    planned = prepare_step(subject, replace(job.options, resume=save is not None), by_parts=save is not None)
    if planned.source.alone:
        (alone,) = planned.jobs.values()
        facts = _model_facts(alone, copies, None if json else _SHOWN_COPIES)
        facts["chosen"] = chosen_facts(subject.chosen)
    else:
        facts = step_job_facts(planned)
    if save is not None:
        facts["saved"] = {"path": str(save), "bytes": save_plan(planned, save, job.options)}
    if json:
        emit_json(facts)
    else:
        print_choice(subject.chosen)
        (_print_model if planned.source.alone else print_step)(facts)
        if save is not None:
            say(f"\nsaved as {save}, {size(facts['saved']['bytes'])}: convert --plan {save} --part K/N goes by it")


def _model_facts(job: Job, copies: bool, limit: int | None) -> Facts:
    """What a plan would do.

    Keys: ``source``; ``target`` (``format``, ``parallel``); ``files`` (``path``, ``records``, ``copies``, ``bytes``,
    ``casts``, and ``copy_list`` where asked for); ``totals`` (``files`` and the same); ``report``; ``lossless``;
    ``account``.

    Args:
        job: The planned job.
        copies: Whether the copies themselves are listed.
        limit: How many of them per file.
    """
    files = [_file_facts(planned, copies, limit) for planned in job.plans()]
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


def _file_facts(planned: PlannedFile, copies: bool, limit: int | None) -> Facts:
    plan, records = planned.plan, planned.records
    facts: Facts = {
        "path": plan.file,
        "records": len(records),
        "copies": len(plan.copies),
        "bytes": sum(record.nbytes for record in records),
        "casts": plan.casts_done,
    }
    if copies:
        facts["copy_list"] = [_copy_facts(copy) for copy in plan.copies[:limit]]
    return facts


def _copy_facts(copy: Copy) -> Facts:
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


def _print_model(facts: Facts) -> None:
    totals = facts["totals"]
    casts = f", {count(totals['casts'])} of them with a cast" if totals["casts"] else ""
    say("plan (nothing was written)")
    print_facts(
        [
            ("source", source_text(facts["source"])),
            ("target", f"{facts['target']['format']}, {layout_text(facts['target']['parallel'])}"),
            ("work", f"{count(totals['copies'])} copies{casts}"),
            ("output", f"{size(totals['bytes'])} of tensors in {_records(totals)}"),
            ("lossless", yes_no(facts["lossless"])),
            ("account", account_text(facts["account"])),
        ],
    )
    if facts["report"]:
        say("\nreport")
    print_report(facts["report"])
    say("\nfiles")
    columns = [Column("file"), *(Column(name, True) for name in ("records", "copies", "casts", "bytes"))]
    rows = [
        (f["path"], count(f["records"]), count(f["copies"]), count(f["casts"]), size(f["bytes"]))
        for f in facts["files"]
    ]
    print_table(columns, rows, limit=_SHOWN_FILES)
    for file in facts["files"][:_SHOWN_FILES]:
        if "copy_list" in file:
            _print_copies(file)


def _records(totals: Facts) -> str:
    return f"{count(totals['records'], 'record')} of {count(totals['files'], 'file')}"


def _print_copies(file: Facts) -> None:
    say(f"\n{file['path']}")
    columns = [Column("shape"), Column("source"), Column("start", True), Column("strides"), Column("")]
    columns += [Column("target record"), Column("start", True), Column("strides")]
    rows = [_copy_row(copy) for copy in file["copy_list"]]
    if rows:
        print_table(columns, rows)
    if file["copies"] > len(rows):
        say(f"  … and {file['copies'] - len(rows):,} more (all of them: --json)")


def _copy_row(copy: Facts) -> list[str]:
    source, target = copy["source"], copy["target"]
    cast = "→" if source["dtype"] == target["dtype"] else f"→ {target['dtype']} →"
    return [
        _dims(copy["shape"]),
        f"{source['file']}:{source['record']}",
        count(source["start"]),
        _dims(source["strides"]),
        cast,
        target["record"],
        count(target["start"]),
        _dims(target["strides"]),
    ]


def _dims(numbers: list[int]) -> str:
    return "×".join(map(str, numbers))
