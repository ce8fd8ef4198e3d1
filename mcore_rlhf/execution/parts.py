"""A conversion by many processes, on as many hosts: each does a part, and publishes what it did; one of them joins all parts.

For a target ``out``, beside it:

* ``.out.parts-<plan>-of-<N>/part-0003/``   what part 3 of N wrote, and ``part.json``: lengths, CRCs, and what it read of the source

A part is published as every folder is, by one rename: tried twice, even at once, it is there once. Parts of another source, of other
options or of another release lie under another name, so that they are never joined with these. Which task is whose follows from the
plan alone, so that it is the same on every host.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mcore_rlhf.core.catalog import row_major
from mcore_rlhf.core.plan import Copy, coalesced
from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, Problems, StorageError, Unsupported
from mcore_rlhf.families.job_options import PartNumber
from mcore_rlhf.families.options import ConvertOptions
from mcore_rlhf.storage.destination import Publication
from mcore_rlhf.storage.manifest import FileEntry, Manifest, check, provenance
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.publish import LocalPublication
from mcore_rlhf.storage.transactions import note_joining, recover, remove_joined
from mcore_rlhf.verify.audit import Pair

from .fingerprint import Fingerprint
from .journal import Done
from .run import Execution, Progress, journal_of
from .work import PlannedTarget, Reading, Work, in_blocks

LEDGER = "part.json"
_COSTS = {"write": 20, "compare": 6, "read": 3}
"""What a byte costs of each kind of task, relative to one another."""
_SHOWN = 8


@dataclass(slots=True)
class Coverage:
    """Which bytes of a source are read in one run each, and so are checked by whoever copies them. What is left is dealt out."""

    _ranges: dict[tuple[str, str], list[tuple[int, int]]] = field(default_factory=dict)
    _sorted: dict[tuple[str, str], int] = field(default_factory=dict)

    def copies(self, copies: Iterable[Copy]) -> None:
        """What copies read."""
        for copy in copies:
            if copy.source_strides == row_major(copy.shape):
                size, record = copy.source.dtype.itemsize, copy.source
                self._add(record.file, record.key, copy.source_start * size, (copy.source_start + copy.numel) * size)

    def pairs(self, pairs: Iterable[Pair]) -> None:
        """What is read to compare replicas."""
        for pair in pairs:
            if not pair.parity:
                copy = coalesced(pair.a.box.shape, pair.a, pair.b)
                self.copies(
                    [
                        copy,
                        replace(
                            copy, source=copy.target, source_start=copy.target_start, source_strides=copy.target_strides
                        ),
                    ]
                )

    def _add(self, file: str, key: str, start: int, stop: int) -> None:
        ranges = self._ranges.setdefault((file, key), [])
        ranges.append((start, stop))
        if len(ranges) > 2 * self._sorted.get((file, key), 0) + 64:
            ranges[:] = _union(ranges)
            self._sorted[file, key] = len(ranges)

    def missing(self, file: str, key: str, nbytes: int) -> Iterator[tuple[int, int]]:
        """What of a record is not read in one run by anybody."""
        at = 0
        for start, stop in _union(self._ranges.get((file, key), [])):
            if start > at:
                yield at, start
            at = max(at, stop)
        if at < nbytes:
            yield at, nbytes


def _union(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def with_readings(work: Work, coverage: Coverage) -> Work:
    """A work that also says what of the source has to be read only to be checked."""
    coverage.pairs(pair for block in work.compared(Problems()) for pair in block.items())
    found: list[Reading] = []
    for file in work.stored():
        for key, offset, nbytes, _ in file.records:
            found += (Reading(file.path, key, offset, *span) for span in coverage.missing(file.path, key, nbytes))
    return replace(work, readings=list(in_blocks(found, f"read {work.name}:")))


def share(works: Sequence[Work], part: PartNumber) -> set[str]:
    """The tasks of one part: the largest first, each to whom has least to do until then; files before all else."""
    loads = [(0, number) for number in range(1, part.total + 1)]
    mine: set[str] = set()
    for tasks in (_files(works), _checks(works)):
        for cost, name in sorted(tasks, key=lambda task: (-task[0], task[1])):
            load, number = loads[0]
            heapq.heapreplace(loads, (load + cost, number))
            if number == part.number:
                mine.add(name)
    return mine


def _files(works: Iterable[Work]) -> list[tuple[int, str]]:
    return [(1 + _COSTS["write"] * file.nbytes, file.path) for work in works for file in work.files]


def _checks(works: Iterable[Work]) -> Iterator[tuple[int, str]]:
    for work in works:
        for block in work.compared(Problems()):
            yield _COSTS["compare"] * block.nbytes, block.name
        for reading in work.readings:
            yield _COSTS["read"] * reading.nbytes, reading.name


def parts_folder(target: Path, fingerprint: Fingerprint, count: int) -> Path:
    """Where the parts of a plan are published."""
    return target.with_name(f".{target.name}.parts-{fingerprint.key}-of-{count}")


def is_of(folder: Path, target: Path, conversion: PlannedTarget) -> bool:
    """Whether a folder is that of the parts of a plan, whatever their number."""
    return folder.name.startswith(f".{target.name}.parts-{_asked(conversion).key}-of-")


def run_part(
    conversion: PlannedTarget, target: Path, part: PartNumber, options: ConvertOptions, progress: Progress
) -> Mapping[str, FileEntry]:
    """Do one part of a conversion, and publish what was done.

    Args:
        conversion: All of it, with readings.
        target: What all parts together become.
        part: Which one.
        options: How it runs.
        progress: Is told how far it is.

    Returns:
        The files of the part, by path.

    Raises:
        CheckpointError: Something is wrong; the part was not published.
    """
    fingerprint = _asked(conversion)
    folder = parts_folder(target, fingerprint, part.total) / f"part-{part.number:04d}"
    if not options.resume:
        recover(folder, LEDGER)
    try:
        with LocalPublication(folder, fsync=options.fsync, manifest_name=LEDGER, resumable=True) as publication:
            return _done(conversion, part, publication, options, progress)
    except StorageError:
        if not (folder / LEDGER).is_file():
            raise
        progress.note(f"part {part} is done already: {folder}")
        return _ledger(folder, part, fingerprint).files


def _asked(conversion: PlannedTarget) -> Fingerprint:
    assert conversion.fingerprint is not None  # who asks for parts asks for it
    return conversion.fingerprint


def _done(
    conversion: PlannedTarget, part: PartNumber, publication: Publication, options: ConvertOptions, progress: Progress
) -> Mapping[str, FileEntry]:
    mine = share(conversion.works, part)
    with journal_of(conversion, publication, options) as journal:
        assert journal is not None  # a local folder has one
        for line in publication.recovered:
            progress.note(line)
        nbytes = sum(file.nbytes for work in conversion.works for file in work.files if file.path in mine)
        publication.check_space(nbytes - sum(entry.nbytes for entry in journal.files.values()))
        files: dict[str, FileEntry] = {}
        for work in conversion.works:
            files |= Execution(work, publication, options, progress, journal, mine).run()
        told = {name: replace(done, entry=None).as_plain() for name, done in journal.done.items()}
        report = {"part": list(part), "fingerprint": asdict(_asked(conversion)), "done": told}
        publication.commit(Manifest(files, provenance=provenance(), report=report))
        return files


@dataclass(slots=True)
class Joined:
    """What all parts did, as if it stood in one journal."""

    done: dict[str, Done]
    folders: dict[str, Path]
    durable: bool = False

    def __contains__(self, name: str) -> bool:
        return name in self.done

    def add(self, name: str, done: Done) -> None:
        """What no part had done, and is done now."""
        self.done[name] = done


def finish(
    conversion: PlannedTarget, target: Path, publication: Publication, options: ConvertOptions, progress: Progress
) -> ReadablePath:
    """Join the parts of a conversion, hold everything that they read against the source's checksums, and publish.

    Args:
        conversion: All of it.
        target: What it becomes.
        publication: Of the target; it has begun.
        options: How it runs.
        progress: Is told how far it is.

    Returns:
        What was published.

    Raises:
        Incomplete: Parts are missing; they are named.
        CheckpointError: Something is wrong; nothing was published, and the parts are still there.
    """
    folder, joined = joined_parts(target, _asked(conversion))
    files: dict[str, FileEntry] = {}
    for work in conversion.works:
        files |= Execution(work, publication, options, progress, joined, joins=True).run()
        missing = [file.path for file in work.files if file.path not in joined.folders]
        if missing:
            raise Corrupt(
                f"{folder}: no part has written {', '.join(missing[:_SHOWN])}\nRemove the folder, and do all parts again."
            )
    for name in files:
        publication.take(joined.folders[name] / name, name)
    files |= conversion.put_known(publication, files)
    note_joining(folder, publication.transaction)
    published = publication.commit(replace(conversion.manifest, files=files))
    remove_joined(folder)
    return published


def joined_parts(target: Path, fingerprint: Fingerprint) -> tuple[Path, Joined]:
    """The parts of a plan, all of them, and the folder that they lie in.

    Raises:
        Incomplete: There are none, or some are missing.
        Unsupported: There are only those of another plan.
        Corrupt: One of them is damaged.
    """
    folder, count = _folder_of(target, fingerprint)
    parts = [PartNumber(number, count) for number in range(1, count + 1)]
    places = {part: folder / f"part-{part.number:04d}" for part in parts}
    missing = [str(part) for part in parts if not (places[part] / LEDGER).is_file()]
    if missing:
        some = ", ".join(missing[:_SHOWN]) + (f", … ({len(missing)} of {count})" if len(missing) > _SHOWN else "")
        raise Incomplete(f"{target}: parts are not done yet: {some}\nDo them with --part, and then --finish again.")
    done: dict[str, Done] = {}
    folders: dict[str, Path] = {}
    for part, place in places.items():
        ledger = _ledger(place, part, fingerprint)
        _check_files(place, ledger)
        for name, told in ledger.report["done"].items():
            entry = ledger.files.get(name)
            done[name] = replace(Done.of_plain(told), entry=entry)
            if entry is not None:
                folders[name] = place
    return folder, Joined(done, folders)


def _check_files(place: Path, ledger: Manifest) -> None:
    """Look at the length of every file of a part, and read those again that somebody touched after its ledger was written; ``ctime``
    is the time that nobody can set back.

    Raises:
        CheckpointError: Some are missing, or damaged.
    """
    problems = check(place, ledger, sizes_only=True)
    if not problems:
        noted = (place / LEDGER).stat().st_mtime_ns
        files = {name: entry for name, entry in ledger.files.items() if (place / name).stat().st_ctime_ns > noted}
        problems = check(place, replace(ledger, files=files))
    if problems:
        problems.add(
            Corrupt, f"{place}: is not what the part has left there", "Remove that folder, and do the part again."
        )
    problems.raise_if_any()


def _folder_of(target: Path, fingerprint: Fingerprint) -> tuple[Path, int]:
    """The folder of the parts of a plan that has most of them, and how many there should be."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.parts-([0-9a-f]+)-of-(\d+)")
    there = [(path, found) for path in sorted(target.parent.glob(".*")) if (found := pattern.fullmatch(path.name))]
    mine = [(path, int(found[2])) for path, found in there if found[1] == fingerprint.key]
    if mine:
        return max(mine, key=lambda one: len(list(one[0].glob(f"part-*/{LEDGER}"))) / one[1])
    if there:
        why = {_why_foreign(path, fingerprint) for path, _ in there}
        raise Unsupported(
            f"{target}: there are parts, and they are of {' or of '.join(sorted(why))}: {', '.join(str(path) for path, _ in there)}\n"
            "Give the options that the parts were given, or do all parts again."
        )
    raise Incomplete(f"{target}: no part has been done\nDo them with --part 1/N to --part N/N, and then --finish.")


def _why_foreign(folder: Path, fingerprint: Fingerprint) -> str:
    for ledger in sorted(folder.glob(f"part-*/{LEDGER}")):
        try:
            return fingerprint.differs(Manifest.read(ledger).report["fingerprint"])
        except (CheckpointError, KeyError):
            continue
    return "another plan"


def _ledger(folder: Path, part: PartNumber, fingerprint: Fingerprint) -> Manifest:
    """What a part says that it did.

    Raises:
        CheckpointError: It is damaged, or is another part's.
    """
    try:
        found = Manifest.read(folder / LEDGER)
    except CheckpointError as error:
        raise type(error)(f"{error}\nRemove {folder}, and do part {part} again.") from error
    if found.report.get("part") != list(part) or found.report.get("fingerprint") != asdict(fingerprint):
        raise Corrupt(
            f"{folder / LEDGER}: is not that of part {part} of this plan\nRemove {folder}, and do the part again."
        )
    return found
