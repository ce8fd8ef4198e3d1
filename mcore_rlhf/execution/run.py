"""Carrying work out in this process: files and comparisons by threads, every byte of the source checked on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from threading import Event, Semaphore

from mcore_rlhf.core.catalog import UINT8, Record
from mcore_rlhf.core.execute import WINDOW_BYTES, FileRun, SourceBytes
from mcore_rlhf.core.lowrank import products_in_one_thread
from mcore_rlhf.errors import Problems, StorageError, log_of
from mcore_rlhf.families.options import ConvertOptions
from mcore_rlhf.storage.destination import Destination, Publication
from mcore_rlhf.storage.manifest import FileEntry
from mcore_rlhf.storage.paths import ReadablePath, human
from mcore_rlhf.storage.threads import Pool
from mcore_rlhf.verify.audit import Audit, Ledger, Pair, WatchedLedger, read_checksums, read_on

from .fingerprint import digest
from .journal import Done, Finished, Journal, open_journal
from .spool import Task
from .work import Block, PlannedTarget, Reading, Work

_log = log_of(__name__)

_BUFFERS_PER_WORKER = 8
"""A worker's buffer, the window of the source behind it, and what numpy makes of both while it gathers."""
_WAITING = 64
"""Tasks that are made before a worker is free for them."""


class Progress:
    """How far long work has come, stage by stage; this one shows nothing."""

    def stage(self, text: str, total_bytes: int) -> None:
        """A new stage of the work begins; 0 bytes where nobody knows how many there will be."""

    def note(self, text: str) -> None:
        """Something that the user should know, whatever comes of the work."""

    def advance(self, nbytes: int) -> None:
        """So many more bytes are done. Called from many threads, thousands of times a second."""


def publish(
    conversion: PlannedTarget, publication: Publication, options: ConvertOptions, progress: Progress
) -> ReadablePath:
    """Carry out a planned conversion, and publish it; where a process of the same plan was killed, go on from there.

    Args:
        conversion: What to do.
        publication: Where; it has begun.
        options: How.
        progress: Is told how far it is.

    Returns:
        What was published.

    Raises:
        CheckpointError: Something is wrong; nothing was published.
    """
    with journal_of(conversion, publication) as journal:
        files = written(conversion, publication, options, progress, journal, conversion.space)
        files |= conversion.put_known(publication, files)
        return publication.commit(replace(conversion.manifest, files=files))


def written(
    conversion: PlannedTarget,
    publication: Publication,
    options: ConvertOptions,
    progress: Progress,
    journal: Journal | None,
    nbytes: int,
    only: Collection[str] | None = None,
) -> dict[str, FileEntry]:
    """Write the files of a conversion.

    Args:
        conversion, publication, options, progress: See :func:`publish`.
        journal: Of the publication.
        nbytes: Bytes that all of it takes.
        only: See :class:`Execution`.

    Returns:
        What was written, now or before a kill, by path.
    """
    for line in publication.recovered:
        progress.note(line)
    done = {} if journal is None else journal.files
    publication.check_space(nbytes - sum(entry.nbytes for entry in done.values()))
    files: dict[str, FileEntry] = {}
    for work in conversion.works:
        files |= Execution(work, publication, options, progress, journal, only).run()
    return files


@contextmanager
def journal_of(conversion: PlannedTarget, publication: Publication) -> Iterator[Journal | None]:
    """The journal of what is published, with what a killed process did; None where none is kept.

    Where the process is asked to end (Ctrl-C, SIGTERM), the disk is full or storage fails, what is finished stays for the next one, as
    after a kill.
    """
    fingerprint = conversion.fingerprint
    journal = None if fingerprint is None else open_journal(fingerprint, publication)
    if journal is None:
        yield None
        return
    try:
        yield journal
    except KeyboardInterrupt:
        if journal.files:
            publication.leave()
        raise
    except StorageError as error:
        if (
            not journal.files or error.__cause__ is None
        ):  # what no system refused, such as a target that is there, stays so
            raise
        publication.leave()
        raise StorageError(
            f"{error}\nWhat is finished is kept {publication.left}: the same command goes on there; with --no-resume it begins anew."
        ) from error
    finally:
        journal.notes.close()


@dataclass(slots=True)
class Execution:
    """The work of one model in this process.

    Args:
        work: What has to be done.
        to: Where files go.
        options: How many at a time, and how much memory they may take.
        progress: Is told how far it is.
        journal: Says what was done before, and hears what is done.
        only: The tasks of it that are done here; None for all, and for what all of them together prove.
        joins: Whether no file is written, since others have done it.
    """

    work: Work
    to: Destination
    options: ConvertOptions
    progress: Progress
    journal: Finished | None = None
    only: Collection[str] | None = None
    joins: bool = False
    stopped: Event = field(default_factory=Event)

    def run(self) -> dict[str, FileEntry]:
        """Write every file and check every byte of the source; returns what was written, by path."""
        work, problems, files = self.work, Problems(), dict[str, FileEntry]()
        stored = work.stored()
        read_checksums(stored)
        ledger = Ledger(stored)
        ledger.join(self._before(files))
        with work.source() as source, self._pool() as pool:
            self.progress.stage(
                "converting", sum(file.nbytes for file in work.files if self._is_mine(file.path)) or work.nbytes
            )
            self.progress.advance(sum(entry.nbytes for entry in files.values()))
            writes = (
                partial(self._write, file, source, ledger, files) for file in work.files if self._wanted(file.path)
            )
            audit = Audit(source, ledger, problems, distrust=work.distrust)
            compares = (
                partial(self._compare, block, audit, ledger)
                for block in work.compared(problems)
                if self._wanted(block.name) or self._otherwise(block)
            )
            # One file has one writer: workers that run out of files begin to compare.
            reads = (
                partial(self._read, block, source, ledger)
                for block in work.readings
                if self.only is not None and self._wanted(block.name)
            )
            self._all(pool, chain(() if self.joins else writes, compares, reads))
            if self.only is None:
                self.progress.stage("checking", ledger.unread)
                self._all(pool, ledger.tasks(source, problems, self._advance))
        problems.raise_if_any()
        return files

    def _is_mine(self, task: str) -> bool:
        return self.only is None or task in self.only

    def _wanted(self, task: str) -> bool:
        """Whether a task is to be done here, and was not done before."""
        return self._is_mine(task) and (self.journal is None or task not in self.journal)

    def _before(self, files: dict[str, FileEntry]) -> Iterator[dict[tuple[str, str], list[tuple[int, int, int]]]]:
        """What was seen of the source by those who did what is done."""
        if self.journal is None:
            return
        mine = {file.path for file in self.work.files}
        for name, done in self.journal.done.items():
            if name in mine and done.entry is not None:
                files[name] = done.entry
            if name in mine or self.work.owns(name):
                yield done.seen

    def _write(self, file: Task, source: SourceBytes, ledger: Ledger, files: dict[str, FileEntry]) -> None:
        planned, watched = self.work.planned(file), WatchedLedger(ledger)
        fsync = self.options.fsync or (self.journal is not None and self.journal.durable)
        with self.to.writer(file.path, planned.layout) as writer:
            records = sorted(planned.records, key=lambda record: writer.offset(record.key))  # in the file's order
            run = FileRun(planned.plan, records, source, writer, watched, self._window(), self._advance, writer.offset)
            files[file.path] = writer.finish(run.run(), fsync=fsync)
        _log.info("wrote %s: %s", file.path, human(files[file.path].nbytes))
        if self.journal is not None:
            self.journal.add(file.path, Done(files[file.path], seen=watched.spans))

    def _compare(self, block: Block[Pair], audit: Audit, ledger: Ledger) -> None:
        watched, problems = WatchedLedger(ledger), Problems()
        mine = replace(audit, ledger=watched, problems=problems)
        for pair in block.items():
            self._tick()
            mine.compare(pair)
        audit.problems.extend(problems.found)
        if self.journal is not None and not problems:
            self.journal.add(block.name, Done(seen=watched.spans, compared=_digest(block)))

    def _otherwise(self, block: Block[Pair]) -> bool:
        """Whether what others compared is not what is to be compared: they may have gone by a plan that somebody edited."""
        return self.joins and self.journal is not None and self.journal.done[block.name].compared != _digest(block)

    def _read(self, block: Block[Reading], source: SourceBytes, ledger: Ledger) -> None:
        watched = WatchedLedger(ledger)
        for file, key, offset, start, stop in block.items():
            crc = read_on(0, source, self._advance, file, offset + start, offset + stop)
            watched.saw(Record(file, key, UINT8, stop, offset), start, stop - start, crc)
        if self.journal is not None:
            self.journal.add(block.name, Done(seen=watched.spans))

    def _window(self) -> int:
        share = self.options.max_memory // (max(1, self.options.workers) * _BUFFERS_PER_WORKER)
        return max(64 << 10, min(WINDOW_BYTES, share))

    def _advance(self, nbytes: int) -> None:
        self._tick()
        self.progress.advance(nbytes)

    def _tick(self) -> None:
        """Cancel what a worker does, soon after another one failed, or the user interrupted."""
        if self.stopped.is_set():
            raise CancelledError

    @contextmanager
    def _pool(self) -> Iterator[Pool]:
        pool = Pool(self.options.workers, "convert")
        with products_in_one_thread() if self.work.multiplies else nullcontext():
            try:
                yield pool
            except BaseException:
                self.stopped.set()
                raise
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _all(self, pool: Pool, tasks: Iterable[Callable[[], None]]) -> None:
        """Run tasks, of which few are made before their turn; the first real error stops the rest."""
        waiting = _WAITING + 4 * self.options.workers
        room, failed = Semaphore(waiting), list[BaseException]()

        def run(task: Callable[[], None]) -> None:
            try:
                self._tick()
                task()
            except BaseException as error:
                failed.append(error)
                self.stopped.set()
            finally:
                room.release()

        for task in tasks:
            room.acquire()
            pool.submit(run, task)
            if self.stopped.is_set():
                break
        for _ in range(waiting):
            room.acquire()
        if failed:
            raise next((error for error in failed if not isinstance(error, CancelledError)), failed[0])


def _digest(block: Block[Pair]) -> str:
    return digest(map(repr, block.items()))[:16]
