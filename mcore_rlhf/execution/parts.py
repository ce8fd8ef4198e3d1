"""A conversion by many processes, on as many hosts: each does a part, and publishes what it did; one of them joins all parts.

Where parts lie, on a disk and in a store, is :mod:`mcore_rlhf.storage.parts`'s. Parts of another source, of other options or of another
release lie under another name, so that they are never joined with these. Which task is whose follows from the plan alone, so that
it is the same on every host.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from mcore_rlhf.core.catalog import row_major
from mcore_rlhf.core.plan import Copy, coalesced
from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, Problems, StorageError, Unsupported
from mcore_rlhf.families.job_options import PartNumber
from mcore_rlhf.families.options import ConvertOptions
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.destination import check_entry
from mcore_rlhf.storage.manifest import FileEntry, Manifest, provenance
from mcore_rlhf.storage.parts import LEDGER, Parts, part_of, parts_of, parts_there
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.publish import LocalPublication
from mcore_rlhf.storage.records import record_of, told
from mcore_rlhf.storage.transactions import JOINED
from mcore_rlhf.storage.upload import StorePublication
from mcore_rlhf.verify.audit import Pair

from .fingerprint import PlanFingerprint
from .journal import Done, Finished
from .run import Execution, Progress, journal_of, written
from .work import PlannedTarget, Reading, Work, in_blocks

_COSTS = {"write": 20, "compare": 6, "read": 3}
"""What a byte costs of each kind of task, relative to one another."""
_LEDGERS = f"{part_of('*')}/{LEDGER}"
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


def begun(target: Path, part: PartNumber) -> list[ReadablePath]:
    """Where a part of any plan for a local target is, or will be once it is done."""
    there = parts_there(LocalPublication(target))
    return [parts.place(part.number) for parts in there if parts.count == part.total]


def run_part(
    conversion: PlannedTarget,
    publication: LocalPublication | StorePublication,
    part: PartNumber,
    options: ConvertOptions,
    progress: Progress,
) -> Mapping[str, FileEntry]:
    """Do one part of a conversion, and publish what was done.

    Args:
        conversion: All of it, with readings.
        publication: Of what all parts together become; not begun.
        part: Which one.
        options: How it runs.
        progress: Is told how far it is.

    Returns:
        The files of the part, by path.

    Raises:
        CheckpointError: Something is wrong; the part was not published.
    """
    fingerprint = _asked(conversion)
    parts = parts_of(publication, fingerprint.key, part.total)
    earlier = _ledger(parts, part, fingerprint)
    if earlier is None:
        try:
            return _done(conversion, parts, part, options, progress)
        except StorageError:
            with suppress(CheckpointError):
                earlier = _ledger(parts, part, fingerprint)
            if earlier is None:
                raise  # else another process was quicker
    progress.note(f"part {part} is done already: {parts.place(part.number)}")
    return earlier.files


def _asked(conversion: PlannedTarget) -> PlanFingerprint:
    assert conversion.fingerprint is not None  # who asks for parts asks for it
    return conversion.fingerprint


def _done(
    conversion: PlannedTarget, parts: Parts, part: PartNumber, options: ConvertOptions, progress: Progress
) -> Mapping[str, FileEntry]:
    mine = share(conversion.works, part)
    nbytes = sum(file.nbytes for work in conversion.works for file in work.files if file.path in mine)
    with (
        parts.begin(part.number, anew=not options.resume) as publication,
        journal_of(conversion, publication) as journal,
    ):
        assert journal is not None  # a part has one
        files = written(conversion, publication, options, progress, journal, nbytes, mine)
        noted = {name: told(replace(done, entry=None), sparse=True) for name, done in journal.done.items()}
        report = {"part": list(part), "fingerprint": told(_asked(conversion)), "done": noted}
        publication.commit(Manifest(files, provenance=provenance(), report=report))
        return files


def finish(
    conversion: PlannedTarget,
    publication: LocalPublication | StorePublication,
    options: ConvertOptions,
    progress: Progress,
) -> ReadablePath:
    """Join the parts of a conversion, hold everything that they read against the source's checksums, and publish.

    Args:
        conversion: All of it.
        publication: Of the target; not begun.
        options: How it runs.
        progress: Is told how far it is.

    Returns:
        What was published; by a process that was killed before it could remove the parts, where they were joined before.

    Raises:
        Incomplete: Parts are missing; they are named.
        CheckpointError: Something is wrong; nothing was published, and the parts are still there.
    """
    parts = _found(publication, _asked(conversion))
    if parts.is_joined():
        parts.remove()
        return publication.target
    with parts.joining as whole:
        ledgers = _ledgers(parts, _asked(conversion))
        joined, files = _finished(ledgers.values()), dict[str, FileEntry]()
        for work in conversion.works:
            files |= Execution(work, whole, options, progress, joined, joins=True).run()
        missing = [file.path for work in conversion.works for file in work.files if file.path not in files]
        if missing:
            raise Corrupt(
                f"{parts}: no part has written {', '.join(missing[:_SHOWN])}\nRemove the folder, and do all parts again."
            )
        for part, ledger in ledgers.items():
            for name in files.keys() & ledger.files.keys():
                parts.take(part.number, name)
        files |= conversion.put_known(whole, files)
        parts.notes.put(JOINED, whole.transaction.encode())
        published = whole.commit(replace(conversion.manifest, files=files))
    parts.remove()
    return published


def were_joined(publication: LocalPublication | StorePublication) -> bool:
    """Whether a target was published of parts that are still there: who joined them was killed."""
    return any(parts.is_joined() for parts in parts_there(publication))


def _found(publication: LocalPublication | StorePublication, fingerprint: PlanFingerprint) -> Parts:
    """Those parts of a plan that can be joined, or were; where they are several, of which most are done.

    Raises:
        Incomplete: There are none.
        Unsupported: There are only those of another plan, or of a target that was replaced since then.
    """
    there, current = parts_there(publication), parts_of(publication, fingerprint.key, 0).since
    mine = [one for one in there if one.plan == fingerprint.key and (one.since == current or one.is_joined())]
    if mine:
        return max(mine, key=lambda one: (not one.is_joined(), sum(1 for _ in one.notes.list(_LEDGERS)) / one.count))
    if there:
        why = {_why_foreign(parts, fingerprint) for parts in there}
        raise Unsupported(
            f"{publication.target}: there are parts, and they are of {' or of '.join(sorted(why))}: {', '.join(map(str, there))}\n"
            "Give the options that the parts were given, or do all parts again."
        )
    raise Incomplete(
        f"{publication.target}: no part has been done\nDo them with --part 1/N to --part N/N, and then --finish."
    )


def _why_foreign(parts: Parts, fingerprint: PlanFingerprint) -> str:
    if parts.plan == fingerprint.key:
        return "this plan, from before the target was published"
    for _, data in parts.notes.read(_LEDGERS):
        try:
            found = Manifest.from_json(data, str(parts)).report["fingerprint"]
            return fingerprint.differs(record_of(PlanFingerprint, found, str(parts)))
        except (CheckpointError, KeyError):
            continue
    return "another plan"


def _ledgers(parts: Parts, fingerprint: PlanFingerprint) -> dict[PartNumber, Manifest]:
    """What all parts say that they did, and that it is there.

    Raises:
        Incomplete: Some are missing.
        Corrupt: One of them is damaged, or what it left is not there any more as it was; those are to be done again.
        StorageError: That cannot be told.
    """
    numbers = [PartNumber(number, parts.count) for number in range(1, parts.count + 1)]
    found = {part: ledger for part in numbers if (ledger := _ledger(parts, part, fingerprint)) is not None}
    missing = [str(part) for part in numbers if part not in found]
    if missing:
        some = ", ".join(missing[:_SHOWN])
        more = f", … ({len(missing)} of {parts.count})" if len(missing) > _SHOWN else ""
        raise Incomplete(
            f"{parts.whole.target}: parts are not done yet: {some}{more}\nDo them with --part, and then --finish again."
        )
    problems = Problems()
    for part, ledger in found.items():
        problems.extend(_changed(parts, part, ledger).found)
    problems.raise_if_any()
    return found


def _finished(ledgers: Iterable[Manifest]) -> Finished:
    """What parts did, as if it stood in one journal."""
    done: dict[str, Done] = {}
    for ledger in ledgers:
        for name, noted in ledger.report["done"].items():
            done[name] = replace(record_of(Done, noted, name, sparse=True), entry=ledger.files.get(name))
    return Finished(done)


def _changed(parts: Parts, part: PartNumber, ledger: Manifest) -> Problems:
    """Look at the length and the version of every file of a part, and read those again that are not as they were noted. Where one is
    another, the part is not done any more.
    """
    place, problems = parts.place(part.number), Problems()
    done, there = _finished([ledger]).done, parts.versions(part.number)
    for name, entry in ledger.files.items():
        nbytes, version = there.get(name, (-1, ""))
        if nbytes == entry.nbytes and version and name in done and version == done[name].version:
            continue
        try:
            if nbytes < 0:
                raise Incomplete(f"{place}/{name}: is missing; the manifest lists it with {entry.nbytes} bytes")
            crc = 0
            for piece in parts.files(part.number).again(name) if nbytes == entry.nbytes else ():
                crc = crc32(piece, crc)
            check_entry(f"{place}/{name}", FileEntry(nbytes, crc), entry)
        except (Corrupt, Incomplete) as error:
            problems.add_error(error)
    if problems:
        parts.notes.remove(f"{part_of(part.number)}/{LEDGER}")
        problems.add(
            Corrupt,
            f"{place}: is not what part {part} has left there",
            f"Its ledger was removed: do it again with --part {part}, and then --finish.",
        )
    return problems


def _ledger(parts: Parts, part: PartNumber, fingerprint: PlanFingerprint) -> Manifest | None:
    """What a part says that it did; None where it is not done.

    Raises:
        CheckpointError: It is damaged, or is another part's.
    """
    name = f"{part_of(part.number)}/{LEDGER}"
    where, text = f"{parts.notes}/{name}", parts.notes.get(name)
    if text is None:
        return None
    try:
        found = Manifest.from_json(text, where)
    except CheckpointError as error:
        raise type(error)(f"{error}\nRemove it, and do part {part} again.") from error
    if found.report.get("part") != list(part) or found.report.get("fingerprint") != told(fingerprint):
        raise Corrupt(f"{where}: is not that of part {part} of this plan\nRemove it, and do the part again.")
    return found
