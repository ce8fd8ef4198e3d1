"""The whole conversion: open a source, describe a target, plan the copies, carry them out, prove, publish."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from .core.account import Account, Report
from .core.facts import Fate, Item, Kind
from .core.lowrank import LowRankSum
from .core.plan import FilePlan, plan_file
from .errors import Lossy, Problems, Untrusted, UsageError, headline
from .execution.fingerprint import Binding, identity, of_options, told_texts
from .execution.parts import Coverage, with_readings
from .execution.run import Execution, publish
from .execution.run import Progress as Progress
from .execution.spool import PlannedFile, Spool, Task, planned_file
from .execution.work import Known, PlannedTarget, Sums, Work, in_blocks
from .families.options import ConvertOptions as ConvertOptions
from .families.passes import CONVERTED, Passage, through
from .families.source import Source, bytes_of
from .formats.accounting import Tally, account_of
from .formats.base import FileLayout, Target, TargetFile
from .formats.carried import bring_along
from .formats.registry import format_at, format_named, open_checkpoint, wanted_format
from .storage.destination import Destination, Publication, TargetPaths
from .storage.links import followed
from .storage.manifest import FileEntry, Manifest, provenance
from .storage.paths import ReadablePath, beneath, canonical, real_path
from .storage.publish import MANIFEST_NAME
from .storage.urls import checkpoint_path, publication, refuse_overlap, write_text
from .verify.audit import pairs
from .verify.itself import itself


@dataclass(slots=True)
class Job:
    """A conversion that was planned and not carried out.

    Args:
        source: The opened source.
        target: The described target.
        nbytes: Bytes of tensors to be written.
        copies: Number of copies planned.
        casts: Whether values are converted on the way.
        published: The folder that was published, once it is; inside a run, only the checkpoint's own.
        seen: The source under the names of the target's family of formats; None where they are its own.
        account: What becomes of every item of the source.
        binding: What decides every byte of the target; None where nobody asked.
        tasks: Its files.
        spool: Where their plans stand.
        coverage: What of the source is read in one run each; None where nobody asked.
    """

    source: Source
    target: Target
    nbytes: int = 0
    copies: int = 0
    casts: bool = False
    published: ReadablePath | None = None
    seen: Source | None = None
    account: Account = field(default_factory=lambda: Account({}, ()))
    binding: Binding | None = None
    tasks: list[Task] = field(default_factory=list)
    spool: Spool = field(default_factory=Spool)
    coverage: Coverage | None = None

    @property
    def report(self) -> Report:
        """What is kept, derived, changed and lost."""
        return self.target.report

    @property
    def lossless(self) -> bool:
        """Whether everything that the source has is in the target, or can be derived from it."""
        return self.account.lossless

    @property
    def tag(self) -> str:
        """What the target's tracker will say; empty where it has none."""
        return str(self.target.texts.get(format_named(self.target.format).tracker, ""))

    @property
    def part(self) -> dict[str, str]:
        """What it is of its folder, as the manifest says it."""
        target = self.target
        return {"role": self.source.role, "format": target.format, "parallel": str(target.parallel)}

    def manifest(self, files: Mapping[str, FileEntry]) -> Manifest:
        """The manifest of a folder that holds its target alone."""
        report = {
            "source": self.source.format,
            "source_parallel": str(self.source.parallel),
            "lines": self.report.as_json(),
            "account": self.account.as_json(),
        }
        step, parts = self.source.state.iteration, (self.part,)
        return Manifest(files, step=step, parts=parts, lossless=self.lossless, provenance=provenance(), report=report)

    @property
    def space(self) -> int:
        """Bytes that the target will take on the disk, its texts left out."""
        return self.nbytes + sum(path.stat().st_size for path in self.target.carried.values())

    def plan(self, file: TargetFile, problems: Problems) -> tuple[FileLayout, FilePlan]:
        """Lay a file out and plan it, once for all who ask for its plan.

        Args:
            file: The file.
            problems: Told of what its plan is wrong with; with any, it is not noted.

        Raises:
            CheckpointError: What it is to hold cannot be written.
        """
        layout = file.layout()
        plan = plan_file(file.path, layout.holds, self.target.source)
        problems.extend(plan.problems.found)
        if not problems:
            self.tasks.append(self.spool.write(PlannedFile(plan, layout.records, layout.container)))
        self.nbytes += sum(record.nbytes for record in layout.records)
        return layout, plan

    def plans(self) -> Iterator[PlannedFile]:
        """The plan of every file, one at a time."""
        return (planned_file(self.spool, task) for task in self.tasks)

    def work(self, options: ConvertOptions, name: str = "", place: Callable[[str], str] = str) -> Work:
        """What has to be done, file by file.

        Args:
            options: Those that it was planned with.
            name: What its tasks are known by beside those of other models.
            place: Where a file of the target goes in the folder that is published.
        """
        read = self.seen or self.source
        checked = {
            "replicas": not options.trust_replicas,
            "parity": not options.write.no_optimizer and self.source.parity,
        }
        made = () if read.computed is None else read.computed.computations.values()
        work = Work(
            name,
            [task._replace(path=place(task.path)) for task in self.tasks],
            self.spool,
            lambda problems: in_blocks(pairs(self.source.catalog, problems, **checked), f"compared {name}:"),
            lambda: self.source.files,
            lambda: bytes_of(read),
            self.source.distrust,
            self.nbytes,
            any(isinstance(one, LowRankSum) for one in made),
        )
        return work if self.coverage is None else with_readings(work, self.coverage)

    def conversion(self, options: ConvertOptions, below: str = "") -> PlannedTarget:
        """All of it; of a target with a tag, what is below the tag's folder, and no tracker."""
        job = replace(self, target=replace(self.target, texts={})) if below else self

        def place(path: str) -> str:
            return path.removeprefix(below)

        work = job.work(options, place=place)
        fingerprint = None if job.binding is None else job.binding.fingerprint()
        return PlannedTarget([work], job.manifest({}), job.known(place), job.sums(place), fingerprint, job.space)

    def known(self, place: Callable[[str], str] = str) -> dict[str, Known]:
        """The small files of the target, and those that are taken over."""
        return {
            place(name): Known(content)
            for name, content in chain(self.target.texts.items(), self.target.carried.items())
        }

    def sums(self, place: Callable[[str], str] = str) -> dict[str, Sums]:
        """The files of the target that list SHA-256 sums of others."""
        return {place(name): content_of for name, content_of in self.target.sums.items()}


def prepare(
    source: ReadablePath,
    options: ConvertOptions,
    *,
    by_parts: bool = False,
    wanted_of: Callable[[Source], Mapping[str, object]] = lambda opened: {},
) -> Job:
    """Open the source, describe the target and plan every copy; nothing is written.

    Args:
        source: What is converted.
        options: How.
        by_parts: Whether parts of it will be done by different processes.
        wanted_of: What else the target's trainer asks for beside the tensors, made of the source; it has none of these itself.

    Raises:
        UsageError: Options that mean nothing for the target, or impossible values; all of them.
        CheckpointError: The source is not sound, or the target cannot be made of it; all problems together.
    """
    wanted = wanted_format(options)
    for given in (
        options.write.tokenizer,
        options.write.reference_config,
        options.write.base_model,
        options.write.like,
    ):
        if given is not None:
            checkpoint_path(Path(given).expanduser(), follow_links=options.read.follow_links)
    read = replace(options.read, described_by=options.write.reference_config)
    opened = open_checkpoint(source, replace(read, optimizer=not options.write.no_optimizer), partial=True)
    if opened.unread and (options.write.with_optimizer or not wanted.weights_only):
        raise opened.refused(f"{opened.unread}\n--no-optimizer converts the weights alone; so does --to hf.")
    tally = Tally(opened.catalog)
    asked = wanted_of(opened)
    passage = Passage(opened, wanted, options.write, read, open_checkpoint)
    seen = through(CONVERTED, passage)
    seen = _with_asked(seen, opened, asked)
    job = Job(passage.whole, wanted.target(seen, passage.write), seen=None if seen is passage.whole else seen)
    job.coverage = Coverage() if by_parts else None
    bring_along(seen, job.target, wanted, passage.write)
    problems = Problems()
    _check_names(job, problems)
    for text in _damaged(job.target.carried.values()):
        job.report.add(Fate.LOST, f"{text}; it goes along as it is")
    for path, real in followed(job.source.root).items():
        job.report.add(Fate.NOTE, f"{path}: a link that leads out of the checkpoint, to {real}; it was followed")
    for file in job.target.files:
        layout, plan = job.plan(file, problems)
        tally.add(plan, layout.holds, job.target.source)
        if job.coverage is not None:
            job.coverage.copies(plan.copies)
        job.copies += len(plan.copies)
        job.casts = job.casts or not plan.lossless
    problems.raise_if_any()
    job.account = account_of(opened, seen, job.target, tally, without_optimizer=options.write.no_optimizer)
    job.report.close(job.account)
    if options.resume:
        job.binding = _binding(job, options)
    if options.strict:
        refuse_losses(job.account)
    return job


def _with_asked(seen: Source, opened: Source, asked: Mapping[str, object]) -> Source:
    """The source with what the target's trainer asks for, after what drops another family's; a name that was another's is the target's."""
    more = {key: value for key, value in asked.items() if key in opened.state.other or key not in seen.state.other}
    for key in sorted(more.keys() & opened.state.other.keys()):
        text = f"{key}: of another trainer's counters; the one that it goes to calls another thing so, and has its own"
        seen.notes.add(Fate.LOST, text, Item(Kind.VALUE, key))
    return replace(seen, state=replace(seen.state, other={**seen.state.other, **more})) if more else seen


def refuse_losses(account: Account) -> None:
    """What ``--strict`` asks for.

    Args:
        account: Of what is converted.

    Raises:
        Lossy: Something would be lost; all of it, by name.
    """
    if not account.lossless:
        raise Lossy(
            "--strict refuses what the target would lose:\n" + "\n".join(f"  - {text}" for text in account.lost)
        )


def _damaged(files: Iterable[ReadablePath]) -> list[str]:
    """What is wrong with files that nobody opens, by what they say of themselves: a sentence each."""
    problems = Problems()
    for path in files:
        list(itself(path.parent, [path.name], (), problems))
    return [headline(problem.message).rstrip(".") for problem in problems.found]


def _check_names(job: Job, problems: Problems) -> None:
    """What every file of the target will be called, and its tag, before anything is written."""
    target, root = job.target, job.source.root
    names = TargetPaths(root, (MANIFEST_NAME,))
    for name in chain((file.path for file in target.files), target.texts, target.carried, target.sums):
        try:
            names.add(name)
        except Untrusted as error:
            problems.add_error(error)
    if tag := job.tag:
        canonical(tag, root, "tag", parts=1)
    problems.raise_if_any()


def _binding(job: Job, options: ConvertOptions) -> Binding:
    root = job.source.root if job.source.computed is None else job.source.computed.root
    made = (job.seen or job.source).computed
    computations = {} if made is None else made.computations
    lines = [task.told for task in job.tasks]
    lines += (f"{name} {computations[name]!r}" for name in sorted(computations))  # copies say only where from
    lines += told_texts(job.target.texts)
    files = identity(root, job.source.files, job.target.carried.values())
    return Binding(root, files, of_options(options), lines, made is not None)


def convert(
    source: ReadablePath, target: ReadablePath, options: ConvertOptions, progress: Progress | None = None
) -> Job:
    """Convert a checkpoint, with optimizer, and publish it at once.

    Args:
        source: A root, an iteration, or a step with roles.
        target: The root that the target's framework would be given to load; must not exist. A universal checkpoint may also
            go into a DeepSpeed run that is there, even its own source: then it becomes ``<tag>_uni`` in it, and
            ``latest_universal``, at which alone loaders look, names it last. ``overwrite`` is about ``<tag>_uni`` then.
        options: How source and target are to be, and how the conversion runs.
        progress: Is told how far it is.

    Returns:
        The job that was carried out, with its report.

    Raises:
        CheckpointError: Something is wrong; nothing was published and the source is untouched.
    """
    source, target = checkpoint_path(source), checkpoint_path(target)
    if joins_run(options.to, target):
        job = add_to_run(source, target, options, progress)
        name_latest(target, job, options)
        return job
    refuse_overlap(source, target)
    with publication_of(target, options) as publication:
        job = prepare(source, options)
        _publish(job, publication, options, progress)
    return job


def joins_run(to: str, root: ReadablePath) -> bool:
    """Whether a folder is a run that goes on, into which a checkpoint of a format is added, and none that was converted as a whole.

    Args:
        to: The format.
        root: The folder.
    """
    wanted = format_named(to)
    added = bool(wanted.joins) and (root / wanted.tracker).is_file() and not (root / MANIFEST_NAME).is_file()
    return added or (bool(wanted.joins) and (root / wanted.joins).is_file())


def add_to_run(
    source: ReadablePath, root: ReadablePath, options: ConvertOptions, progress: Progress | None = None
) -> Job:
    """Convert a checkpoint to ``<root>/<tag>_uni``, which nothing names yet: see :func:`name_latest`.

    Raises:
        CheckpointError: Something is wrong; nothing was published.
    """
    job = prepare(source, options)
    folder = beneath(root, job.tag, "tag", parts=1)
    read = {job.source.root / file.path.partition("/")[0] for file in job.source.files}
    if any(real_path(path) == real_path(folder) for path in read):
        raise UsageError(f"{folder}: source and target are the same folder.\nChoose another target.")
    publish_tag(job, folder, options, progress)
    return job


def publish_tag(job: Job, folder: ReadablePath, options: ConvertOptions, progress: Progress | None = None) -> None:
    """Carry out a planned universal conversion as exactly that folder, whatever its tag is called.

    Raises:
        CheckpointError: Something is wrong; nothing was published.
    """
    with publication_of(folder, options) as publication:
        _publish(job, publication, options, progress, tag=job.tag)


def name_latest(root: ReadablePath, job: Job, options: ConvertOptions) -> None:
    """Let a run's tracker, ``latest_universal``, name what a job wrote.

    Raises:
        StorageError: It could not be replaced.
    """
    write_text(root / format_named(job.target.format).tracker, job.tag, fsync=options.fsync)


def publication_of(folder: ReadablePath, options: ConvertOptions) -> Publication:
    """The publication of a lone checkpoint."""
    return publication(folder, is_checkpoint, **published_by(options))


def published_by(options: ConvertOptions) -> dict[str, Any]:
    """What of the options a publication is told."""
    memory = options.max_memory // (2 * max(1, options.workers))  # the other half are the windows
    return {"overwrite": options.overwrite, "fsync": options.fsync, "memory": memory, "resumable": options.resume}


def _publish(
    job: Job, publication: Publication, options: ConvertOptions, progress: Progress | None, *, tag: str = ""
) -> None:
    """Write a target and publish it."""
    below = f"{tag}/" if tag else ""
    job.published = publish(job.conversion(options, below), publication, options, progress or Progress())


def write_target(
    job: Job, to: Destination, options: ConvertOptions, progress: Progress | None = None
) -> dict[str, FileEntry]:
    """Write the files of a planned job where nobody else sees them yet; every byte of the source is checked on the way.

    Args:
        job: The job.
        to: Becomes what the target's framework would be given to load.
        options: Those that the job was planned with.
        progress: Is told how far it is.

    Returns:
        What was written, by path.

    Raises:
        CheckpointError: The source is damaged, or the target cannot be written.
    """
    files = Execution(job.work(options), to, options, progress or Progress()).run()
    return files | job.conversion(options).put_known(to, files)


def is_checkpoint(path: ReadablePath) -> bool:
    """Whether a folder is one that ``--overwrite`` may replace."""
    return (path / MANIFEST_NAME).is_file() or format_at(path) is not None
