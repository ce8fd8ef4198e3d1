"""The whole conversion: open a source, describe a target, plan the copies, carry them out, prove, publish."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from threading import Event
from typing import Any

from .core.account import Account, Report
from .core.catalog import Traced
from .core.execute import WINDOW_BYTES, FileRun, SourceBytes
from .core.lowrank import LowRankSum, products_in_one_thread
from .core.plan import FilePlan, plan_file
from .errors import Lossy, Problems, Unsupported, UsageError
from .families.crossing import crossed
from .families.crossing.quantized import dequantized
from .families.lora.bridge import with_peft_names
from .families.lora.names import refuse_adapters
from .families.lora.parts import adapter_alone
from .families.options import ConvertOptions as ConvertOptions
from .families.options import ReadOptions, WriteOptions, refuse
from .families.source import Source, bytes_of
from .formats.accounting import account_of
from .formats.base import Format, Target, TargetFile
from .formats.carried import bring_along
from .formats.hf import FORMAT as HF
from .formats.merging import merged
from .formats.peft import FORMAT as PEFT
from .formats.registry import FORMATS, format_named, open_checkpoint
from .formats.universal.files import LATEST as LATEST_UNIVERSAL
from .storage.destination import Destination, Moved, Publication
from .storage.manifest import FileEntry, Manifest, provenance
from .storage.paths import ReadablePath, real_path
from .storage.publish import MANIFEST_NAME
from .storage.urls import checkpoint_path, publication, refuse_overlap, write_text
from .verify.audit import Audit, Ledger, read_checksums

_BUFFERS_PER_WORKER = 8
"""A worker's buffer, the window of the source behind it, and what numpy makes of both while it gathers."""


class Progress:
    """How far long work has come, stage by stage; this one shows nothing."""

    def stage(self, text: str, total_bytes: int) -> None:
        """A new stage of the work begins; 0 bytes where nobody knows how many there will be."""

    def advance(self, nbytes: int) -> None:
        """So many more bytes are done. Called from many threads, thousands of times a second."""


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
    """

    source: Source
    target: Target
    nbytes: int = 0
    copies: int = 0
    casts: bool = False
    published: ReadablePath | None = None
    seen: Source | None = None
    account: Account = field(default_factory=lambda: Account({}, ()))

    @property
    def report(self) -> Report:
        """What is kept, derived, changed and lost."""
        return self.target.report

    @property
    def lossless(self) -> bool:
        """Whether everything that the source has is in the target, or can be derived from it."""
        return self.account.lossless

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

    def plans(self) -> Iterator[tuple[TargetFile, FilePlan]]:
        """The plan of every file, one at a time."""
        for file in self.target.files:
            yield file, plan_file(file.path, file.layout().holds, self.target.source)


def prepare(source: ReadablePath, options: ConvertOptions) -> Job:
    """Open the source, describe the target and plan every copy; nothing is written.

    Raises:
        UsageError: Options that mean nothing for the target, or impossible values; all of them.
        CheckpointError: The source is not sound, or the target cannot be made of it; all problems together.
    """
    refuse(options.to, read=options.read, write=options.write, run=options)
    wanted = format_named(options.to)
    opened = open_checkpoint(source, replace(options.read, optimizer=not options.write.no_optimizer), partial=True)
    if opened.unread and (options.write.with_optimizer or not wanted.weights_only):
        raise Unsupported(f"{opened.unread}\n--no-optimizer converts the weights alone; so does --to hf.")
    traced = opened.catalog
    assert isinstance(traced, Traced)  # as all that was opened
    whole, seen, write = _seen_by(wanted, opened, options.read, options.write)
    job = Job(whole, wanted.target(seen, write), seen=None if seen is whole else seen)
    bring_along(seen, job.target)
    problems = Problems()
    for file in job.target.files:
        with traced:
            layout = file.layout()
            plan = plan_file(file.path, layout.holds, job.target.source)
        traced.plan(layout.holds)
        problems.extend(plan.problems.found)
        job.nbytes += sum(record.nbytes for record in layout.records)
        job.copies += len(plan.copies)
        job.casts = job.casts or not plan.lossless
    problems.raise_if_any()
    job.account = account_of(opened, seen, job.target, traced, without_optimizer=options.write.no_optimizer)
    job.report.close(job.account)
    if options.strict and not job.lossless:
        raise Lossy(
            "--strict refuses what the target would lose:\n" + "\n".join(f"  - {text}" for text in job.account.lost)
        )
    return job


def _seen_by(
    wanted: Format, opened: Source, read: ReadOptions, write: WriteOptions
) -> tuple[Source, Source, WriteOptions]:
    """A source as a target wants it: merged if that was asked for, and under the names of the target's family.

    Args:
        wanted: The target's format.
        opened: The source.
        read: How it was opened.
        write: What the target is to be.

    Returns:
        All files that are read, as one source; what the target is made of; and what is left to be said to it.

    Raises:
        CheckpointError: The target cannot be made of it.
    """
    _refuse_contradictions(wanted, write)
    model = dequantized(opened, write) if write.dequantize else opened
    if write.merge_adapter:
        opened, model, write = merged(opened, read, write)
    elif wanted is HF or wanted.family == "megatron":
        refuse_adapters(opened, wanted.name)
    else:
        model = with_peft_names(model, write)
        model = adapter_alone(model, write.reference_config) if wanted is PEFT else model
    return opened, crossed(model, wanted, write), write


def _refuse_contradictions(wanted: Format, write: WriteOptions) -> None:
    """What is asked for must be something that can be: a base that nobody looks at would be a base that nobody checks.

    Raises:
        UsageError: A merged model as an adapter, or a base without a merge.
    """
    if write.merge_adapter and wanted is PEFT:
        raise UsageError(
            f"--merge-adapter makes a whole model, and --to {wanted.name} writes an adapter alone\n"
            "Give one of them: --to hf for the merged model."
        )
    if write.merge_adapter and write.dequantize:
        raise UsageError(
            "--dequantize: not together with --merge-adapter\nMake a plain base of the quantized one first: --to hf --dequantize."
        )
    if write.base_model is not None and not write.merge_adapter and wanted is not PEFT:
        raise UsageError(
            "--base-model: nothing is merged, so that the base would not be looked at\nAdd --merge-adapter, or leave it out."
        )


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
    if options.to == "universal" and _is_run(target):
        job = add_to_run(source, target, options, progress)
        name_latest(target, job, options)
        return job
    refuse_overlap(source, target)
    with _publication(target, options) as publication:
        job = prepare(source, options)
        _publish(job, publication, options, progress)
    return job


def add_to_run(
    source: ReadablePath, root: ReadablePath, options: ConvertOptions, progress: Progress | None = None
) -> Job:
    """Convert a checkpoint to ``<root>/<tag>_uni``, which nothing names yet: see :func:`name_latest`.

    Raises:
        CheckpointError: Something is wrong; nothing was published.
    """
    job = prepare(source, options)
    folder = root / str(job.target.texts[LATEST_UNIVERSAL])
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
    with _publication(folder, options) as publication:
        _publish(job, publication, options, progress, tag=str(job.target.texts[LATEST_UNIVERSAL]))


def name_latest(root: ReadablePath, job: Job, options: ConvertOptions) -> None:
    """Let a run's ``latest_universal`` name what a job wrote.

    Raises:
        StorageError: It could not be replaced.
    """
    write_text(root / LATEST_UNIVERSAL, str(job.target.texts[LATEST_UNIVERSAL]), fsync=options.fsync)


def _is_run(root: ReadablePath) -> bool:
    """Whether a folder is the root of a DeepSpeed run, and not a universal checkpoint that was converted as a whole."""
    if (root / "latest").is_file():
        return True
    return (root / LATEST_UNIVERSAL).is_file() and not (root / MANIFEST_NAME).is_file()


def _publication(folder: ReadablePath, options: ConvertOptions) -> Publication:
    return publication(folder, is_checkpoint, **published_by(options))


def published_by(options: ConvertOptions) -> dict[str, Any]:
    """What of the options a publication is told."""
    memory = options.max_memory // (2 * max(1, options.workers))  # the other half are the windows
    return {"overwrite": options.overwrite, "fsync": options.fsync, "memory": memory}


def _publish(
    job: Job, publication: Publication, options: ConvertOptions, progress: Progress | None, *, tag: str = ""
) -> None:
    """Write a target and publish it; of one with a tag, what is below the tag's folder, and no tracker."""
    publication.check_space(job.space)
    target, below = replace(job.target, texts={}) if tag else job.target, f"{tag}/" if tag else ""
    to = Moved(publication, lambda path: path.removeprefix(below))
    files = write_target(replace(job, target=target), to, options, progress)
    job.published = publication.commit(job.manifest({to.path(path): entry for path, entry in files.items()}))


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
    return _Conversion(job, to, options, progress or Progress()).run()


def is_checkpoint(path: ReadablePath) -> bool:
    """Whether a folder is one that ``--overwrite`` may replace."""
    return (path / MANIFEST_NAME).is_file() or any(known.detect(path) for known in FORMATS)


@dataclass(slots=True)
class _Conversion:
    job: Job
    to: Destination
    options: ConvertOptions
    progress: Progress
    stopped: Event = field(default_factory=Event)

    def run(self) -> dict[str, FileEntry]:
        """Write every file and check every byte of the source; returns what was written."""
        files: dict[str, FileEntry] = {}
        job, problems = self.job, Problems()
        read_checksums(job.source.files)
        ledger = Ledger(job.source.files)
        with bytes_of(job.seen or job.source) as source, self._pool() as pool:
            self.progress.stage("converting", job.nbytes)
            audit = Audit(job.source.catalog, source, ledger, problems, distrust=job.source.distrust)
            parity = not self.options.write.no_optimizer
            writes = (lambda file=file: self._write(file, source, ledger, files) for file in job.target.files)
            # One file has one writer: workers that run out of files begin to compare.
            self._all(pool, chain(writes, audit.tasks(replicas=not self.options.trust_replicas, parity=parity)))
            self.progress.stage("checking", ledger.unread)
            self._all(pool, ledger.tasks(source, problems, self._advance))
        problems.raise_if_any()
        for name, content in chain(job.target.texts.items(), job.target.carried.items()):
            files[name] = self.to.put(name, content)
        for name, content_of in job.target.sums.items():
            folder = f"{name.rpartition('/')[0]}/"
            beside = [path for path in files if path.rpartition("/")[0] == folder[:-1]]
            files[name] = self.to.put(name, content_of({path[len(folder) :]: self.to.sha256(path) for path in beside}))
        return files

    def _write(self, file: TargetFile, source: SourceBytes, ledger: Ledger, files: dict[str, FileEntry]) -> None:
        layout = file.layout()
        plan = plan_file(file.path, layout.holds, self.job.target.source)
        with self.to.writer(file.path, layout.container.layout(file.path)) as writer:
            records = sorted(layout.records, key=lambda record: writer.offset(record.key))  # in the file's order
            run = FileRun(plan, records, source, writer, ledger, self._window(), self._advance, writer.offset)
            files[file.path] = writer.finish(run.run(), fsync=self.options.fsync)

    def _window(self) -> int:
        share = self.options.max_memory // (max(1, self.options.workers) * _BUFFERS_PER_WORKER)
        return max(64 << 10, min(WINDOW_BYTES, share))

    def _advance(self, nbytes: int) -> None:
        self._tick(0)
        self.progress.advance(nbytes)

    def _tick(self, nbytes: int) -> None:
        """Stop a worker soon after another one failed, or the user interrupted."""
        if self.stopped.is_set():
            raise _Stopped

    @contextmanager
    def _pool(self) -> Iterator[ThreadPoolExecutor]:
        pool = ThreadPoolExecutor(max(1, self.options.workers), "convert")
        computed = (self.job.seen or self.job.source).computed
        multiplies = computed is not None and any(isinstance(one, LowRankSum) for one in computed.computations.values())
        with products_in_one_thread() if multiplies else nullcontext():
            try:
                yield pool
            except BaseException:
                self.stopped.set()
                raise
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _all(self, pool: ThreadPoolExecutor, tasks: Iterable[Callable[[], None]]) -> None:
        """Run tasks, many at a time but never all in memory; the first real error stops the rest."""
        pending = iter(tasks)
        while batch := list(islice(pending, 4096)):
            futures = [pool.submit(task) for task in batch]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = [future.exception() for future in done if future.exception() is not None]
            if failed:
                self.stopped.set()
                raise next((error for error in failed if not isinstance(error, _Stopped)), failed[0])  # type: ignore[misc]


class _Stopped(Exception):
    """Another worker failed first."""
