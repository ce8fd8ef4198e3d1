"""``mcore-rlhf convert``: convert, and with ``--verify`` prove that it worked: the published target is verified deeply, opened anew,
and compared with the source.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import click

from mcore_rlhf.convert import Job
from mcore_rlhf.core.catalog import MASTER, PARAM
from mcore_rlhf.core.facts import Fate, Kind
from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.execution.parts import begun
from mcore_rlhf.execution.run import Progress
from mcore_rlhf.families.job_options import PartNumber
from mcore_rlhf.families.options import ConvertOptions, ReadOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.registry import format_named, open_checkpoint
from mcore_rlhf.manager.convert_step import StepJob, convert_part, convert_step, finish_parts, published_folder
from mcore_rlhf.manager.subject import Subject
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.objects import MANIFESTS
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.store import StorePath
from mcore_rlhf.storage.transactions import place_of
from mcore_rlhf.storage.upload import conversions_left
from mcore_rlhf.storage.urls import checkpoint_path
from mcore_rlhf.verify.checkpoint import Depth
from mcore_rlhf.verify.differ import Tolerance

from .comparing import More, compare_facts, comparison_line, print_differences
from .describe import (
    account_text,
    chosen_facts,
    layout_text,
    parallel_facts,
    print_choice,
    print_problems,
    print_report,
    source_facts,
    source_text,
    yes_no,
)
from .guard import Interrupted
from .job import ConversionJob
from .output import Facts, count, duration, emit_json, print_facts, rate, say, size
from .progress import shown_progress
from .verifying import verdict_line, verify_facts
from .will_resume import after_conversion, headed, resumes_text

_HALF_UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""Largest relative error of rounding to a type: half a unit in the last place."""
_SMALLEST_HALF = {"float16": 2.0**-25}  # below its smallest normal number, float16 rounds to a fixed step


def run(job: ConversionJob, json: bool) -> None:
    """Carry out a conversion and print a summary.

    Args:
        job: What to convert, to what, and how.
        json: For machines.

    Raises:
        CheckpointError: It cannot be done; nothing was published.
        click.exceptions.Exit: With code 1, where ``--verify`` finds the published target to be wrong, or with ``--strict`` where the
            trainer whose run it went into would stop at it.
    """
    subject = job.subject()
    if job.part is not None:
        _run_part(job, subject, job.part, json)
        return
    carry_out = _executor(job)
    with shown_progress((4 if job.verify else 2) * len(subject.models)) as progress:
        target, began = job.target_folder(), time.monotonic()
        with _said_when_interrupted(published_folder(subject, target)):
            done = carry_out(subject, target, job.options, progress)
        seconds = time.monotonic() - began
        with _said_when_interrupted(target, done.published):
            proofs = _proofs(job, done, progress) if job.verify else {}
    facts = _model_facts(job, done, seconds, proofs) if done.source.alone else step_job_facts(done, seconds, proofs)
    if json:
        emit_json(facts)
    else:
        print_choice(subject.chosen)
        (_print_model if done.source.alone else print_step)(facts)
    if not all(proof["proved"] for proof in proofs.values()) or (job.options.strict and facts.get("stops")):
        raise click.exceptions.Exit(1)


def _executor(job: ConversionJob) -> Callable[[Subject, ReadablePath, ConvertOptions, Progress], StepJob]:
    if job.executor == "ray":
        from mcore_rlhf.manager.on_ray import convert_with_ray

        return lambda subject, target, options, progress: convert_with_ray(
            subject, target, options, job.address, progress
        )
    return finish_parts if job.finish else convert_step


def _run_part(job: ConversionJob, subject: Subject, part: PartNumber, json: bool) -> None:
    """Do one part, and say what it was.

    Keys: ``part`` (number, total), ``target``, ``files`` and ``bytes`` of the part, ``seconds``, ``bytes_per_second``.
    """
    target, began = job.target_folder(), time.monotonic()
    with shown_progress() as progress, _said_of_a_part(target, part):
        files = convert_part(subject, target, job.options, part, progress, job.plan)
    seconds, nbytes = time.monotonic() - began, sum(entry.nbytes for entry in files.values())
    facts = {
        "part": list(part),
        "target": str(target),
        "files": len(files),
        "bytes": nbytes,
        "seconds": round(seconds, 3),
    }
    if json:
        emit_json({**facts, "bytes_per_second": round(nbytes / max(seconds, 1e-9))})
        return
    say(f"part {part} is done")
    print_facts([("target", f"{target}: nothing is there before --finish"), ("written", _written(facts))])


def _model_facts(job: ConversionJob, step: StepJob, seconds: float, proofs: dict[str, Facts]) -> Facts:
    """Of a lone checkpoint.

    Keys: ``name`` of the job; ``source``; ``target`` (``path``, ``format``, ``parallel``); ``tensors`` read, ``files``,
    ``copies``, ``bytes`` written, ``seconds``, ``bytes_per_second``; ``casts``; ``lossless``; ``account``; ``report``;
    ``load`` (the framework's options); into a trainer's run ``for``, ``resumes`` and ``stops``; with ``--verify`` also ``verify``,
    ``diff`` and ``proved``; ``chosen``.
    """
    ((role, done),) = step.jobs.items()
    target, with_optimizer = (
        (done.published if step.told else None) or job.target_folder(),
        not job.options.write.no_optimizer,
    )
    catalog = done.source.catalog
    optimizer = (done.seen or done.source).optimizer is not None and with_optimizer
    return {
        "name": job.name,
        "source": source_facts(done.source),
        "target": {
            "path": str(target),
            "format": done.target.format,
            "parallel": parallel_facts(done.target.parallel),
        },
        "tensors": len(catalog) if with_optimizer else sum(name.state == PARAM for name in catalog),
        "files": len(done.target.files) + len(done.target.texts) + len(done.target.carried),
        "copies": done.copies,
        "bytes": done.nbytes,
        "seconds": round(seconds, 3),
        "bytes_per_second": round(done.nbytes / max(seconds, 1e-9)),
        "casts": done.casts,
        "lossless": done.lossless,
        "account": done.account.as_json(),
        "report": done.report.as_json(),
        "load": step.told
        or format_named(done.target.format).load_hint(target, optimizer=optimizer) + done.target.needs,
        **_resumes(step),
        **proofs.get(role, {}),
        "chosen": chosen_facts(step.source.chosen),
    }


def _resumes(step: StepJob) -> Facts:
    """What the trainer would restore whose run it was converted into; nothing where it was none's."""
    if not step.trainer or step.published is None:
        return {}
    return {"for": step.told.partition(":")[0], **after_conversion(step.published, step.trainer, step.told)}


def step_job_facts(job: StepJob, seconds: float = 0.0, proofs: dict[str, Facts] | None = None) -> Facts:
    """Of a step, planned or converted.

    Keys: ``path``, ``chosen``, ``step``; ``target`` (null where it was only planned); ``models`` by role (``source``, ``target``,
    ``copies``, ``bytes``); ``carried`` files; ``bytes``; ``lossless``; ``account`` and ``report`` (of the ``step``, and by
    role); once converted also ``seconds`` and ``load``, and into a trainer's run ``for``, ``resumes`` and ``stops``; with
    ``--verify`` also ``proofs`` by role.
    """
    models = {
        role: {
            "source": source_facts(planned.source),
            "target": {"format": planned.target.format, "parallel": parallel_facts(planned.target.parallel)},
            "copies": planned.copies,
            "bytes": planned.nbytes,
        }
        for role, planned in job.jobs.items()
    }
    facts: Facts = {
        "path": str(job.source.folder),
        "chosen": chosen_facts(job.source.chosen),
        "step": job.source.step,
        "target": None if job.published is None else str(job.published),
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
    if job.published is not None:
        facts.update(seconds=round(seconds, 3), load=job.told or f"resume from {job.published}", **_resumes(job))
    return {**facts, "proofs": proofs} if proofs else facts


@contextmanager
def _said_when_interrupted(target: ReadablePath, published: ReadablePath | None = None) -> Iterator[None]:
    """Let an interrupt say whether the target was published, where that is not known."""
    before = _transaction(target)
    try:
        yield
    except KeyboardInterrupt as stop:
        signum = stop.args[0] if stop.args else 2
        left = f"{published} is published, and not verified" if published is not None else _what_is_left(target, before)
        raise Interrupted(left, signum) from None


@contextmanager
def _said_of_a_part(target: ReadablePath, part: PartNumber) -> Iterator[None]:
    """Let an interrupt say what it left of a part."""
    try:
        yield
    except KeyboardInterrupt as stop:
        signum = stop.args[0] if stop.args else 2
        raise Interrupted(_what_is_left_of(part, target), signum) from None


def _what_is_left_of(part: PartNumber, target: ReadablePath) -> str:
    places = begun(target.absolute(), part) if isinstance(target, Path) else []
    done = next((place for place in places if place.is_dir()), None)
    if done is not None:
        return f"part {part} had just been done: {done}"
    kept = next((left[0] for left, goes_on in map(_leftovers, places) if goes_on), None)
    if kept is not None:
        return f"part {part} is not done; what is finished of it is kept in {kept}: the same command goes on there"
    return f"part {part} is not done; nothing of it is kept" if isinstance(target, Path) else f"part {part} is not done"


def _what_is_left(target: ReadablePath, before: str | None) -> str:
    now, left, goes_on = _transaction(target), *_leftovers(target)
    if now is not None and now != before:
        return _published(target)
    if goes_on:
        return (
            f"nothing was published at {target}; what is finished is kept in {left[0]}: the same command goes on there "
            "(--no-resume starts anew)"
        )
    if left:
        return f"nothing was published at {target}; another conversion to it, or what could not be removed, is in {left[0]}"
    if now is not None:
        return f"{target} is as it was; the half-written copy was removed"
    return f"nothing was published at {target}; what was half-written has been removed"


def _published(folder: ReadablePath) -> str:
    return f"{folder} had just been published, and is complete"


def _leftovers(target: ReadablePath) -> tuple[list[str], bool]:
    """What is half-written there, and whether the same command goes on in it."""
    if isinstance(target, StorePath):
        left = []
        with suppress(CheckpointError):  # the interrupt is what is to be heard of
            left = conversions_left(target)
        return left, bool(left)
    if not isinstance(target, Path):
        return [], False
    parent = place_of(target.absolute())
    names = [path.name for path in parent.iterdir()] if parent.is_dir() else []
    left = [str(parent / name) for name in names if name.startswith(f".{target.name}.partial-")]
    return left, bool(left) and any(name.startswith(f".{target.name}.journal-") for name in names)


def _transaction(target: ReadablePath) -> str | None:
    """Which transaction published what is at the target."""
    try:
        target = checkpoint_path(str(target))  # anew: a store remembers what it was
        return next(Manifest.read(target / name).transaction for name in MANIFESTS if (target / name).is_file())
    except (CheckpointError, StopIteration):
        return None


def _proofs(job: ConversionJob, done: StepJob, progress: Progress) -> dict[str, Facts]:
    """Verify what was published and compare it with the source: every model, by role."""
    assert done.published is not None
    folder = done.published
    models = {role: folder if done.source.alone else folder / done.places[role] for role in done.jobs}
    together = len({*models.values()}) < len(models)  # in one folder, as accelerate has them
    asked = {role: role if together else job.options.read.role for role in models}
    return {role: _prove(job, planned, models[role], asked[role], progress) for role, planned in done.jobs.items()}


def _prove(job: ConversionJob, done: Job, target: ReadablePath, role: str | None, progress: Progress) -> Facts:
    """Verify the target and compare it with the source.

    Returns:
        ``verify``, ``diff`` (null where the target could not be opened) and ``proved``.
    """
    options = job.options.read
    reading = ReadOptions(role, rules=options.rules, stubs=options.stubs, vocab_size=options.vocab_size)
    verdict = verify_facts(target, reading, Depth.DEEP, job.options.workers, progress)
    diff = (
        compare_converted(done.seen or done.source, open_checkpoint(target, reading), progress)
        if verdict["checkpoint"]
        else None
    )
    if diff is not None:
        lost = {item.name for item in done.account.of_fate(Fate.LOST) if item.kind is Kind.MODEL}
        _excuse(diff, lost, "that are lost, as the report says,")
        made = {"scheduler"} if done.source.state.scheduler is None else set[str]()
        _excuse(diff, made, "that the target made up, since its trainer asks for them,")
    return {
        "verify": verdict,
        "diff": diff,
        "proved": verdict["intact"] and diff is not None and diff["equal"] and diff["tensors"] > 0,
    }


def _excuse(diff: Facts, names: Collection[str], which: str) -> None:
    """Values of which something was said before anything was written are no difference of what was written."""
    excused = [found for found in diff["differences"] if found["name"] in names]
    if excused:
        diff["differences"] = [found for found in diff["differences"] if found not in excused]
        diff["equal"] = not diff["differences"]
        diff["notes"].append(f"{len(excused)} values {which} were left out")


def compare_converted(a: Source, b: Source, progress: Progress, more: More | None = None) -> Facts:
    """Compare all that both should have; parameters within their roundings, where their type was changed.

    Args:
        a: The source of a conversion.
        b: What was made of it.
        progress: Is told how far it is.
        more: What else is to be said; see :func:`~.comparing.compare_facts`.
    """
    compare = compare_facts if more is None else partial(compare_facts, more=more)
    # Adapters out of Megatron's files have masters, and no optimizer any more whose states they would be.
    weights_alone = not a.states and not b.states and any(name.state == MASTER for name in a.catalog)
    if a.states == b.states and _dtypes(a) == _dtypes(b) and not weights_alone:
        # What a folder has no place for was said before anything was written, and is no difference.
        alone = a.state.scheduler is not None and b.state.scheduler is None and not b.states
        return compare(a, b, Tolerance(), [PARAM] if alone else None, progress)
    common = [state for state in a.states if state in b.states]
    if _dtypes(a) == _dtypes(b):
        facts = compare(a, b, Tolerance(), [PARAM, *common], progress)
    else:
        facts = _both(
            compare(a, b, _rounding(a, b), [PARAM], progress),
            compare(a, b, Tolerance(), common, progress),
        )
    left_out = [state for state in (*a.states, *b.states) if state not in common]
    if left_out:
        facts["notes"].append(
            f"{', '.join(dict.fromkeys(left_out))}: only one of the two has it, and it was not compared"
        )
    return facts


def _both(params: Facts, states: Facts) -> Facts:
    heat = {"heat": {"rows": params["heat"]["rows"] + states["heat"]["rows"]}} if "heat" in params else {}
    return {
        **params,
        **heat,
        "equal": params["equal"] and states["equal"],
        "states": [*params["states"], *states["states"]],
        "tensors": params["tensors"] + states["tensors"],
        "elements": params["elements"] + states["elements"],
        "differences": params["differences"] + states["differences"],
        "notes": list(
            dict.fromkeys(
                [
                    "the parameters' type was changed: they were compared within their roundings, all other states bit for bit",
                    *params["notes"],
                    *states["notes"],
                ]
            )
        ),
    }


def _rounding(*sources: Source) -> Tolerance:
    """How far two roundings of the same value, one to each model's types, can lie apart."""
    kinds = [_dtypes(source) for source in sources]
    return Tolerance(
        sum(max(_SMALLEST_HALF.get(name, 0.0) for name in names) for names in kinds),
        sum(max(_HALF_UNITS.get(name, 0.0) for name in names) for names in kinds),
    )


def _dtypes(source: Source) -> set[str]:
    """Of the parameters as they are stored; of the model, where only masters are, though buffers lie beside them."""
    stored = {name.param: source.catalog.dtype(name) for name in source.catalog if name.state == PARAM}
    return {str(stored.get(spec.name) or spec.dtype) for spec in source.model.params}


def _print_model(facts: Facts) -> None:
    target = facts["target"]
    for line in headed(f"converted {facts['name']}" if facts["name"] else "converted", facts):
        say(line)
    print_facts(
        [
            ("source", source_text(facts["source"])),
            ("target", f"{target['path']}: {target['format']}, {layout_text(target['parallel'])}"),
            ("tensors", f"{count(facts['tensors'])} in all states, {count(facts['copies'])} copies"),
            ("written", _written(facts)),
            ("lossless", yes_no(facts["lossless"])),
            ("account", account_text(facts["account"])),
            ("load", facts["load"]),
            ("resumes", resumes_text(facts.get("resumes", {}))),
        ],
    )
    if facts["report"]:
        say("\nreport")
    print_report(facts["report"])
    if "verify" in facts:
        _print_proof("", facts)


def _written(facts: Facts) -> str:
    nbytes, seconds = facts["bytes"], facts["seconds"]
    return f"{size(nbytes)} in {count(facts['files'], 'file')}, {duration(seconds)}, {rate(nbytes, seconds)}"


def print_step(facts: Facts) -> None:
    """Print what ``convert`` of a step did, or ``plan`` says that it would do."""
    for line in headed("converted" if facts["target"] else "plan (nothing was written)", facts):
        say(line)
    lines = [("source", facts["path"]), ("target", facts["target"] or "")]
    for role, model in facts["models"].items():
        lines.append((role, f"{source_text(model['source'])} → {layout_text(model['target']['parallel'])}"))
    if "seconds" in facts:
        nbytes, seconds = facts["bytes"], facts["seconds"]
        lines.append(("written", f"{size(nbytes)}, {duration(seconds)}, {rate(nbytes, seconds)}"))
    lines += [("lossless", yes_no(facts["lossless"])), ("load", facts.get("load", ""))]
    lines += [("resumes", resumes_text(facts.get("resumes", {})))]
    print_facts(lines)
    for role, report in facts["report"].items():
        if report:
            say(f"\n{role}")
        print_report(report)
    for role, proof in facts.get("proofs", {}).items():
        _print_proof(f"{role}: ", proof)


def _print_proof(whose: str, proof: Facts) -> None:
    say(f"\n{whose}verify  {verdict_line(proof['verify'])}")
    print_problems(proof["verify"]["problems"])
    if proof["diff"] is not None:
        say(f"{whose}diff    {comparison_line(proof['diff'])}")
        print_differences(proof["diff"])
