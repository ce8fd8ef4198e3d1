"""Converting a step gives a step: every model, with data, RLHF state and RNG states, in one commit. A lone checkpoint gives one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from mcore_rlhf.convert import Job, convert, joins_run, prepare, publication_of, published_by, refuse_losses
from mcore_rlhf.core.account import Account, Report
from mcore_rlhf.core.facts import Facts, Fate, Item, Kind, Reason
from mcore_rlhf.errors import CheckpointError, Problems, Unsupported, UsageError
from mcore_rlhf.execution.fingerprint import Binding, PlanFingerprint, digest, identity
from mcore_rlhf.execution.parts import finish, run_part, were_joined
from mcore_rlhf.execution.run import Progress, publish
from mcore_rlhf.execution.saved import SavedPlan, write_plan
from mcore_rlhf.execution.work import Known, PlannedTarget, Sums, Work
from mcore_rlhf.families.job_options import PartNumber
from mcore_rlhf.families.megatron.folders import TRACKER
from mcore_rlhf.families.option_types import Takes
from mcore_rlhf.families.options import ConvertOptions
from mcore_rlhf.formats.carried import GO_ALONG
from mcore_rlhf.formats.registry import format_named
from mcore_rlhf.storage.destination import Publication
from mcore_rlhf.storage.manifest import FileEntry, Manifest, check, provenance
from mcore_rlhf.storage.paths import ReadablePath, files_below, refused
from mcore_rlhf.storage.patience import is_there
from mcore_rlhf.storage.publish import MANIFEST_NAME, LocalPublication
from mcore_rlhf.storage.upload import StorePublication
from mcore_rlhf.storage.urls import checkpoint_path, publication, refuse_overlap, write_text
from mcore_rlhf.trainers.known import OF_TRAINER, trainer_named
from mcore_rlhf.trainers.table import Trainer

from .into_run import (
    as_step,
    beside,
    in_iteration,
    laid_beside,
    like_of,
    numbered,
    of_alone,
    refuse_untracked,
    resolved,
    step_into,
    taken_out,
    track,
    values_of,
)
from .run import steps
from .run.checks import check_calls, check_values
from .run.retention import left_behind
from .run.steps import NOTE, RNG_FILE
from .run_data import add_position, say_what_was_counted, settle_data
from .run_sides import BesideModels, add_beginning, add_counters, add_made, add_progress, say_what_is_gone
from .runs import manifest_of, run_at
from .subject import Subject


@dataclass(slots=True)
class StepJob:
    """The conversion of a step, or of a lone checkpoint.

    Args:
        source: What is converted.
        jobs: The conversion of every model, by role.
        carried: Files that are taken over byte for byte, by their names in the target.
        texts: New files beside the models.
        outside: Files that are taken over as well, by where they lie in the run's root, outside of the step's folder.
        places: Where every model lies in what is published, by role.
        report: What is said of the step as a whole; every model has a report of its own.
        account: What becomes of every file beside the models; every model has an account of its own.
        published: The folder that was published, once it is: the step's own.
        told: How the trainer whose run it is in is told to go on from it; empty for none.
        trainer: The name of that trainer.
    """

    source: Subject
    jobs: Mapping[str, Job]
    carried: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, bytes] = field(default_factory=dict)
    outside: Mapping[str, ReadablePath] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    report: Report = field(default_factory=Report)
    account: Account = field(default_factory=lambda: Account({}, ()))
    published: ReadablePath | None = None
    told: str = ""
    trainer: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes to be written."""
        files = (self.source.folder / name for name in self.carried.values())
        return sum(job.space for job in self.jobs.values()) + sum(path.stat().st_size for path in files)

    @property
    def lossless(self) -> bool:
        """Whether nothing is lost."""
        return self.account.lossless and all(job.lossless for job in self.jobs.values())


def prepare_step(source: Subject, options: ConvertOptions, *, by_parts: bool = False) -> StepJob:
    """Plan the conversion of every model; nothing is written.

    Args:
        source: What is converted.
        options: How; with a trainer, into a step of its run.
        by_parts: Whether parts of it will be done by different processes.

    Raises:
        UsageError: The trainer has one model in a step and the source several, or none of the source's roles.
        CheckpointError: A model cannot be converted, or a file beside them is damaged or would run code when it is loaded;
            all problems of all of them together.
    """
    options = resolved(options)
    trainer = trainer_named(options.trainer)
    step, options, done = numbered(source, options, trainer)
    if step.alone:
        (lone,) = step.models
        return StepJob(step, {lone: prepare(step.folder, of_alone(options, step), by_parts=by_parts)})
    if not step.models:
        raise Unsupported(f"{step.folder}: none of its models is in a format that can be converted")
    left_out = [role for role in source.models if role and role not in step.models]
    around = BesideModels() if trainer is None else beside(step, trainer, left_out)
    problems, jobs, trained = _unfit_values(step), dict[str, Job](), 0
    for number, (role, folder) in enumerate(step.models.items()):
        asked = trainer if trainer is not None and role == next(iter(step.models)) else None
        wanted = {} if asked is None else {"wanted_of": partial(values_of, around, asked, done)}
        try:
            reading = replace(like_of(options, role), read=step.reading(role))
            if trainer is not None and trainer.several:
                of = replace(reading.write.run_of, number=number, trained=trained)
                reading = replace(reading, write=replace(reading.write, run_of=of))
            jobs[role] = prepare(folder, reading, by_parts=by_parts, **wanted)
            trained += jobs[role].source.optimizer is not None and not reading.write.no_optimizer
        except CheckpointError as error:
            problems.add(type(error), f"{role}: {error}")
    problems.raise_if_any()
    if trainer is None:
        job = StepJob(step, jobs, {name: name for name in step.others}, places={role: role for role in jobs})
        _note(job)
    else:
        planned = next(iter(jobs.values()))
        first = planned.source
        add_position(around, trainer, done, first)
        say_what_was_counted(around, trainer, first)
        add_counters(around, trainer, step.step or 0, first.state.args, options.write.run_of)
        settle_data(around, trainer, planned.target.parallel.dp)
        add_made(around, trainer, options.write.run_of)
        add_progress(around, trainer, done, options.write.run_of)
        add_beginning(around, trainer)
        megatron = Takes.MEGATRON in format_named(options.to).takes
        places = {role: trainer.place_of(role, megatron=megatron) or "" for role in jobs}
        job = StepJob(step, jobs, around.files, around.texts, places=places, report=around.report)
        if trainer.is_iteration:
            job.outside = taken_out(planned.target, trainer)
        _settle(job)
    if options.strict:
        refuse_losses(job.account)
    return job


def _unfit_values(source: Subject) -> Problems:
    """What may not be carried: a new manifest would vouch for it."""
    stubs = source.options.stubs
    problems = check_values(source.folder, source.others, stubs, records=source.manifest is None)
    problems.extend(check_calls(source.folder, source.others, stubs).found)
    return problems


def _note(job: StepJob) -> None:
    for role, planned in job.jobs.items():
        state = (planned.seen or planned.source).state
        if state.iteration and state.iteration != job.source.step:  # 0 where nothing says it
            job.report.add(
                Fate.NOTE, f"{role}: says that it is of iteration {state.iteration}, and the step is {job.source.step}"
            )
    unlisted = [Item(Kind.FILE, name) for name in _unlisted(job.source)]
    job.report.leave(Reason.UNLISTED, *unlisted)
    changed = any(planned.source.parallel != planned.target.parallel for planned in job.jobs.values())
    for name in job.carried.values():
        if name == RNG_FILE and changed:
            text = (
                "those of the source's ranks are carried; the manager derives states for the new layout when it resumes"
            )
            job.report.add(Fate.DERIVED, f"{name}: {text}", Item(Kind.FILE, name))
        else:
            job.report.add(Fate.KEPT, GO_ALONG.why.format(found=name), Item(Kind.FILE, name))
    _settle(job, *(item.name for item in unlisted))


def _settle(job: StepJob, *more: str) -> None:
    """Close the account of what lies beside the models."""
    if job.source.manifest is None:
        say_what_is_gone(job.report, job.source.folder, [planned.source.parallel for planned in job.jobs.values()])
    there = {Item(Kind.FILE, name): name for name in (*job.source.others, *more)}
    job.account = Account.of(Facts.of(there).handed_on({}, job.report.said).fates, job.report.lost)
    job.report.close(job.account)


def _unlisted(source: Subject) -> list[str]:
    """Files beside the models that the step's manifest does not know: somebody put them there after it was committed."""
    if source.manifest is None:
        return []
    known = (*source.models, steps.MANIFEST, MANIFEST_NAME, NOTE)
    names = (name for name in files_below(source.folder, refused) if name.partition("/")[0] not in known)
    return [name for name in names if name not in source.manifest.files]


def convert_step(
    source: Subject, target: ReadablePath, options: ConvertOptions, progress: Progress | None = None
) -> StepJob:
    """Convert a step, or a lone checkpoint, and publish it at once.

    Args:
        source: What is converted.
        target: Of a step: the root of a run, in which ``global_step_N`` appears, or the step's new folder itself, by its name.
            Of a lone checkpoint: see :func:`mcore_rlhf.convert.convert`.
        options: How every model is converted.
        progress: Is told how far it is.

    Raises:
        CheckpointError: Something is wrong; nothing was published and the source is untouched.
    """
    options = resolved(options)
    if options.trainer:
        return _convert_into_run(source, target, options, progress or Progress())
    if source.step is None:
        (lone,) = source.models
        done = convert(source.folder, target, of_alone(options, source), progress)
        return StepJob(source, {lone: done}, published=done.published)
    publication = _publication(source, target, options)
    with publication:
        job = prepare_step(source, options)
        publish(conversion_of(job, options), publication, options, progress or Progress())
    _track(job, target, options)
    return job


def _convert_into_run(source: Subject, root: ReadablePath, options: ConvertOptions, progress: Progress) -> StepJob:
    """Convert into the root of another trainer's run: a step's new folder appears there at once, whole; then the tracker names it.

    Raises:
        CheckpointError: See :func:`prepare_step`; or the step is there already.
    """
    trainer = trainer_named(options.trainer)
    assert trainer is not None
    source = as_step(source, trainer, options) if source.alone else source  # opened once, to hear its step
    step = step_into(source, trainer)
    folder = root if trainer.unfolded else root / trainer.folder_of(step)
    refuse_overlap(source.folder, folder)
    _refuse_of_others(root, trainer)
    if trainer.counted and is_there(root / trainer.counted):
        raise UsageError(
            f"{root / trainer.counted}: names a step to {trainer.title}, whatever its tracker names\nGive the step a root of its own."
        )
    name = manifest_of(trainer)
    if not options.overwrite and is_there(folder / name):
        refuse_untracked(root, trainer, step)
    replaceable = partial(_is_as_written, name) if trainer.in_place else lambda there: (there / name).is_file()
    with publication(folder, replaceable, manifest_name=name, **published_by(options)) as into:
        job = prepare_step(source, options)
        with laid_beside(root, job.outside, fsync=options.fsync):
            publish(conversion_of(job, options), into, options, progress)
    in_parts = Takes.MEGATRON in format_named(options.to).takes
    job.published, job.trainer = folder, trainer.name
    parts = options.write.run_of.parts if in_parts else None
    told = f"{trainer.told} {parts.told}".rstrip() if parts is not None else trainer.told
    job.told = f"{trainer.title}: {told.format(root=root, step=step, path=folder)}"
    track(root, trainer, step, fsync=options.fsync)
    return job


def _is_as_written(name: str, run: ReadablePath) -> bool:
    """Whether a run's folder holds what a conversion left there and nothing else: its trainer may have gone on in it since.

    Args:
        name: What our manifest is called in it.
        run: The folder.
    """
    if not (run / name).is_file():
        return False
    manifest = Manifest.read(run / name)
    return {*files_below(run, refused)} <= {name, *manifest.files} and not check(run, manifest).found


def _refuse_of_others(root: ReadablePath, trainer: Trainer | None = None) -> None:
    """Refuse a root with another trainer's steps: nobody could say afterwards whose run it is.

    Args:
        root: Where a step is to appear.
        trainer: Whose it is; None for a step of our own.

    Raises:
        UsageError: The root is another's.
    """
    run = None if trainer is None and steps.committed(root) else run_at(root)
    if run is None:
        return
    if trainer is None or (
        run.trainer.name not in (trainer.name, *trainer.over) and trainer.name not in run.trainer.over
    ):
        whose = "this one" if trainer is None else f"the one for {trainer.title}"
        raise UsageError(f"{root}: is a run of {run.trainer.title}\nGive {whose} a root of its own.")


def convert_part(
    source: Subject,
    target: ReadablePath,
    options: ConvertOptions,
    part: PartNumber,
    progress: Progress | None = None,
    plan: ReadablePath | str | None = None,
) -> Mapping[str, FileEntry]:
    """Do one part of the conversion of a step, or of a lone checkpoint; nothing appears at the target.

    Args:
        source, target, options, progress: See :func:`convert_step`.
        part: Which part.
        plan: A plan to go by, see :func:`save_plan`; None to plan anew.

    Returns:
        The files of the part, by path.

    Raises:
        CheckpointError: Something is wrong; the part was not published.
    """
    _refuse_run(options)
    publication = _by_parts(source, target, options)
    publication.check_target()
    if plan is None:
        conversion = conversion_of(prepare_step(source, replace(options, resume=True), by_parts=True), options)
    else:
        conversion = SavedPlan(checkpoint_path(plan)).load(source.folder, options)
    return run_part(conversion, publication, part, options, progress or Progress())


def save_plan(job: StepJob, path: Path, options: ConvertOptions) -> int:
    """Save a plan by which parts can go, so that none of them opens the source's files and plans anew.

    Args:
        job: The plan, made for parts, and to go on.
        path: Where; a file that is there is replaced.
        options: Those that it was made with.

    Returns:
        Its length in bytes.

    Raises:
        Unsupported: Values are computed on the way.
        StorageError: It cannot be written.
    """
    told = bindings_of(job)
    assert told is not None
    bindings = {"": next(iter(told.values()))} if job.source.alone else told
    return write_plan(path, conversion_of(job, options), bindings, job.source.folder, _beside(job), options)


def finish_parts(
    source: Subject, target: ReadablePath, options: ConvertOptions, progress: Progress | None = None
) -> StepJob:
    """Join the parts that were done with :func:`convert_part` and the same options, and publish.

    Args:
        source, target, options, progress: See :func:`convert_step`.

    Raises:
        UsageError: Into a trainer's run.
        CheckpointError: Parts are missing, or something is wrong; nothing was published.
    """
    _refuse_run(options)
    publication = _by_parts(source, target, replace(options, resume=False))
    if not were_joined(publication):
        publication.check_target()
    job = prepare_step(source, replace(options, resume=True))
    try:
        job.published = finish(conversion_of(job, options), publication, options, progress or Progress())
    except CheckpointError:
        publication.check_target()  # another one may have joined them meanwhile, and taken the parts away
        raise
    if job.source.step is not None:
        _track(job, target, options)
    return job


def _publication(source: Subject, target: ReadablePath, options: ConvertOptions) -> Publication:
    """What is published: a step's new folder, or that of a lone checkpoint.

    Raises:
        CheckpointError: The target is not called what it should be, is the source, or is a run that goes on.
    """
    if source.step is None:
        refuse_overlap(source.folder, target)
        return publication_of(target, options)
    folder = published_folder(source, target)
    if steps.step_of(folder) != source.step:
        raise Unsupported(
            f"{target}: holds step {source.step}, so it is called {steps.step_folder(target, source.step).name}"
        )
    refuse_overlap(source.folder, folder)
    _refuse_of_others(folder.parent)
    return publication(folder, _is_step, manifest_name=steps.MANIFEST, **published_by(options))


def _by_parts(source: Subject, target: ReadablePath, options: ConvertOptions) -> LocalPublication | StorePublication:
    """The same, of what is made of parts.

    Raises:
        Unsupported: The parts would have no place to lie in.
    """
    if joins_run(options.to, target):
        raise Unsupported(f"{target}: is a run that is there, and parts make a folder of their own\nGive a new folder.")
    found = _publication(source, target, options)
    if not isinstance(found, LocalPublication | StorePublication):
        raise Unsupported(
            f"{target}: parts lie in a folder that all processes see, or in an object store\n"
            "Give one of them, and copy what is published; or convert in one process."
        )
    return found


def _refuse_run(options: ConvertOptions) -> None:
    if options.trainer:
        raise UsageError(
            f"--to {options.trainer}: the run of a trainer is written by one process\n"
            f"By parts, convert each role's folder to {options.to}, and put what is published into the run."
        )


def published_folder(source: Subject, target: ReadablePath) -> ReadablePath:
    """The folder that appears: a step's new one, where the target is the root of a run."""
    inside = source.step is not None and steps.step_of(target) is None
    return steps.step_folder(target, source.step or 0) if inside else target


def _track(job: StepJob, target: ReadablePath, options: ConvertOptions) -> None:
    """Say where a step was published; let a root's tracker name it, where it has no newer one."""
    step, job.published = job.source.step or 0, published_folder(job.source, target)
    if job.published.parent == target and not left_behind(target, step, ()):
        write_text(target / TRACKER, str(step), fsync=options.fsync)


def _is_step(folder: ReadablePath) -> bool:
    return (folder / steps.MANIFEST).is_file()


def conversion_of(job: StepJob, options: ConvertOptions) -> PlannedTarget:
    """All that has to be done for a step, or for a lone checkpoint."""
    if job.source.alone:
        (lone,) = job.jobs.values()
        return lone.conversion(options)
    works, known, sums, parts = list[Work](), dict[str, Known](), dict[str, Sums](), list[dict[str, Any]]()
    lines, accounts = {"step": job.report.as_json()}, {"step": job.account.as_json()}
    trainer = trainer_named(options.trainer)
    of_iteration = trainer is not None and trainer.is_iteration
    for role, planned in job.jobs.items():
        place = in_iteration if of_iteration else f"{job.places[role]}/".lstrip("/").__add__
        works.append(planned.work(options, role, place))
        known |= planned.known(place)
        sums |= planned.sums(place)
        parts.append({**planned.part, "role": role})
        lines[role], accounts[role] = planned.report.as_json(), planned.account.as_json()
    source, old = job.source, job.source.manifest
    for name, own in job.carried.items():
        known[name] = Known(source.folder / own, None if old is None else old.files[own])
    known |= {name: Known(content) for name, content in job.texts.items()}
    parts += [{**part} for part in (old.parts if old and not options.trainer else ()) if part["role"] not in job.jobs]
    report = {
        **({key: value for key, value in old.report.items() if key != OF_TRAINER} if old else {}),
        "converted_from": str(source.folder),
        **({OF_TRAINER: options.trainer} if options.trainer else {}),
        "lines": lines,
        "account": accounts,
    }
    manifest = Manifest(
        {}, step=source.step, parts=tuple(parts), lossless=job.lossless, provenance=provenance(), report=report
    )
    return PlannedTarget(works, manifest, known, sums, _fingerprint(job), job.nbytes)


def _fingerprint(job: StepJob) -> PlanFingerprint | None:
    """That of all models, and of what is carried beside them."""
    told = bindings_of(job)
    if told is None:
        return None
    joined = PlanFingerprint.joined({role: one.fingerprint() for role, one in told.items()})
    beside = _beside(job)
    return replace(joined, source=digest([joined.source, *(f"{name} {facts}" for name, facts in beside.items())]))


def _beside(job: StepJob) -> dict[str, str]:
    """What tells the files beside the models from what they were before."""
    return identity(job.source.folder, (), [job.source.folder / name for name in job.carried.values()])


def bindings_of(job: StepJob) -> dict[str, Binding] | None:
    """What decides the bytes of every model, by role; None where nobody asked."""
    found = {role: one.binding for role, one in job.jobs.items() if one.binding is not None}
    return found if len(found) == len(job.jobs) else None
