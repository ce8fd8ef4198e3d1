"""Converting a step gives a step: every model, with data, RLHF state and RNG states, in one commit. A lone checkpoint gives one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mcore_rlhf.convert import ConvertOptions, Job, Progress, convert, prepare, published_by, write_target
from mcore_rlhf.core.account import Account, Fate, Item, Kind, Reason, Report, Stage
from mcore_rlhf.errors import CheckpointError, Corrupt, Problems, Unsupported
from mcore_rlhf.storage.destination import Destination, Moved
from mcore_rlhf.storage.manifest import FileEntry, Manifest, provenance
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.urls import publication, refuse_overlap, write_text

from .run import steps
from .run.checks import check_values
from .run.steps import NOTE, RNG_FILE, TRACKER
from .subject import Subject


@dataclass(slots=True)
class StepJob:
    """The conversion of a step, or of a lone checkpoint.

    Args:
        source: What is converted.
        jobs: The conversion of every model, by role.
        carried: Files that are taken over byte for byte.
        report: What is said of the step as a whole; every model has a report of its own.
        account: What becomes of every file beside the models; every model has an account of its own.
        published: The folder that was published, once it is: the step's own.
    """

    source: Subject
    jobs: Mapping[str, Job]
    carried: tuple[str, ...] = ()
    report: Report = field(default_factory=Report)
    account: Account = field(default_factory=lambda: Account({}, ()))
    published: ReadablePath | None = None

    @property
    def nbytes(self) -> int:
        """Bytes to be written."""
        files = (self.source.folder / name for name in self.carried)
        return sum(job.space for job in self.jobs.values()) + sum(path.stat().st_size for path in files)

    @property
    def lossless(self) -> bool:
        """Whether nothing is lost."""
        return self.account.lossless and all(job.lossless for job in self.jobs.values())


def prepare_step(source: Subject, options: ConvertOptions) -> StepJob:
    """Plan the conversion of every model; nothing is written.

    Raises:
        CheckpointError: A model cannot be converted, or a file beside them is damaged or would run code when it is loaded;
            all problems of all of them together.
    """
    if source.alone:
        (lone,) = source.models
        return StepJob(source, {lone: prepare(source.folder, replace(options, read=source.options))})
    if not source.models:
        raise Unsupported(f"{source.folder}: none of its models is in a format that can be converted")
    problems, jobs = _unfit_values(source), {}
    for role, folder in source.models.items():
        try:
            jobs[role] = prepare(folder, replace(options, read=source.reading(role)))
        except CheckpointError as error:
            problems.add(type(error), f"{role}: {error}")
    problems.raise_if_any()
    job = StepJob(source, jobs, source.others)
    _note(job)
    return job


def _unfit_values(source: Subject) -> Problems:
    """What may not be carried: a new manifest would vouch for it."""
    return check_values(source.folder, source.others, source.options.stubs, records=source.manifest is None)


def _note(job: StepJob) -> None:
    for role, planned in job.jobs.items():
        state = planned.source.state
        if state.iteration and state.iteration != job.source.step:  # 0 where nothing says it
            job.report.add(
                Fate.NOTE, f"{role}: says that it is of iteration {state.iteration}, and the step is {job.source.step}"
            )
    unlisted = [Item(Kind.FILE, name) for name in _unlisted(job.source)]
    job.report.leave(Reason.UNLISTED, *unlisted)
    changed = any(planned.source.parallel != planned.target.parallel for planned in job.jobs.values())
    for name in job.carried:
        if name == RNG_FILE and changed:
            text = (
                "those of the source's ranks are carried; the manager derives states for the new layout when it resumes"
            )
            job.report.add(Fate.DERIVED, f"{name}: {text}", Item(Kind.FILE, name))
        else:
            job.report.add(Fate.KEPT, f"{name}, byte for byte", Item(Kind.FILE, name))
    there = {Item(Kind.FILE, name): name for name in (*job.source.others, *(item.name for item in unlisted))}
    job.account = Account.of(there, [Stage({}, job.report.said)], job.report.lost)
    job.report.close(job.account)


def _unlisted(source: Subject) -> list[str]:
    """Files beside the models that the step's manifest does not know: somebody put them there after it was committed."""
    if source.manifest is None:
        return []
    found = (path.relative_to(source.folder) for path in source.folder.rglob("*") if path.is_file())
    names = [path.as_posix() for path in found if path.parts[0] not in (*source.models, steps.MANIFEST, NOTE)]
    return sorted(name for name in names if name not in source.manifest.files)


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
    if source.step is None:
        (lone,) = source.models
        done = convert(source.folder, target, replace(options, read=source.options), progress)
        return StepJob(source, {lone: done}, published=done.published)
    folder = target if steps.step_of(target) is not None else steps.step_folder(target, source.step)
    if steps.step_of(folder) != source.step:
        raise Unsupported(
            f"{target}: holds step {source.step}, so it is called {steps.step_folder(target, source.step).name}"
        )
    refuse_overlap(source.folder, folder)
    made = publication(folder, _is_step, manifest_name=steps.MANIFEST, **published_by(options))
    with made:
        job = prepare_step(source, options)
        made.check_space(job.nbytes)
        made.commit(_written(job, made, options, progress or Progress()))
    job.published = folder
    newest = steps.newest(folder.parent)
    if folder.parent == target and (newest is None or newest.step <= source.step):
        write_text(target / TRACKER, str(source.step))
    return job


def _is_step(folder: ReadablePath) -> bool:
    return (folder / steps.MANIFEST).is_file()


def _written(job: StepJob, to: Destination, options: ConvertOptions, progress: Progress) -> Manifest:
    files: dict[str, FileEntry] = {}
    parts, lines, accounts = [], {"step": job.report.as_json()}, {"step": job.account.as_json()}
    for role, planned in job.jobs.items():
        below = Moved(to, f"{role}/".__add__)
        written = write_target(planned, below, options, progress)
        files.update((below.path(name), entry) for name, entry in written.items())
        parts.append({**planned.part, "role": role})
        lines[role], accounts[role] = planned.report.as_json(), planned.account.as_json()
    for name in job.carried:
        files[name] = _carry(job.source, name, to)
    carried = [dict(part) for part in job.source.manifest.parts] if job.source.manifest else []
    parts += [part for part in carried if part["role"] not in job.jobs]
    old = dict(job.source.manifest.report) if job.source.manifest else {}
    report = {**old, "converted_from": str(job.source.folder), "lines": lines, "account": accounts}
    return Manifest(
        files, step=job.source.step, parts=tuple(parts), lossless=job.lossless, provenance=provenance(), report=report
    )


def _carry(source: Subject, name: str, to: Destination) -> FileEntry:
    """Take a file over, and see that it is what the source's manifest says."""
    here = source.folder / name
    entry = to.put(name, here)
    listed = source.manifest.files[name] if source.manifest is not None else entry
    if entry != listed:
        raise Corrupt(f"{here}: is damaged: CRC-32 {entry.crc32:08x}, the manifest says {listed.crc32:08x}")
    return entry
