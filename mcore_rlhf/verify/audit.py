"""What is checked of a source as it is read: every record's checksum, whole tensors, equal replicas, masters that agree."""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np

from mcore_rlhf.core.cast import Words, differing_after_rounding
from mcore_rlhf.core.catalog import MASTER, PARAM, Chunk, Record, Shape, TensorEntry, TensorName, row_major
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.execute import AHEAD_BYTES, WINDOW_BYTES, WORDS, ReadsAhead, SourceBytes, rows_of, strided
from mcore_rlhf.core.plan import Copy, check_tiles, coalesced
from mcore_rlhf.errors import Corrupt, CoverageError, Problems
from mcore_rlhf.models.implied import UNTIED
from mcore_rlhf.models.megatron import EMBEDDING, OUTPUT
from mcore_rlhf.storage.checksum import combine, crc32, crc32_of_zeros
from mcore_rlhf.storage.record_file import StoredFile

Task = Callable[[], None]
_Progress = Callable[[int], None]
Span = tuple[int, int, int]
"""Start and stop in bytes from a record's start, and the CRC-32 of what lies between."""

Spans = dict[tuple[str, str], list[Span]]
"""What was read of a source: by file and record, disjoint and in order."""


@dataclass(slots=True)
class _Seen:
    """The spans of one record that were read, disjoint and in order."""

    spans: list[Span] = field(default_factory=list)

    def add(self, start: int, stop: int, crc: int) -> None:
        """Note a span, joined to the one before it; what overlaps a known span is left to be read again at the end."""
        at = bisect_right(self.spans, (start, stop, 1 << 32))
        if at and self.spans[at - 1][1] > start:
            return
        if at < len(self.spans) and self.spans[at][0] < stop:
            return
        if at and self.spans[at - 1][1] == start:
            before = self.spans[at - 1]
            self.spans[at - 1] = (before[0], stop, combine(before[2], crc, stop - start))
        else:
            self.spans.insert(at, (start, stop, crc))

    def covers(self, start: int, stop: int) -> bool:
        """Whether one known span holds the whole range."""
        at = bisect_right(self.spans, (start, 1 << 62, 0))
        return at > 0 and self.spans[at - 1][1] >= stop


def read_checksums(files: Iterable[StoredFile]) -> None:
    """Read the checksums of files where their format puts that off, so as to hear of damage before the work begins.

    Raises:
        CheckpointError: Files are damaged, or one lies in the place of another: all that do.
    """
    first: dict[object, StoredFile] = {}
    problems, there = Problems(), list(files)
    named = {file.path for file in there}
    for file in there:
        other = file
        if len(file.records) and file.rank is not None:
            other = first.setdefault(tuple((nbytes, crc) for _, _, nbytes, crc in file.records), file)
        if _is_copy(other, file):
            problems.add(
                Corrupt,
                f"{file.path}: is the same as {other.path}, byte for byte, and should have other parts of the same tensors",
                "One is a copy of the other: copy it again from where its rank wrote it.",
            )
        elif name := misplaced(file, named):
            problems.add(
                Corrupt,
                f"{file.path}: {name}",
                "Files were swapped, or one was copied over another: copy them again from where they were written.",
            )
    problems.raise_if_any()


def misplaced(file: StoredFile, beside: Collection[str], *, of_rank: bool = False) -> str:
    """What is said of a file that was written under the name of another one that is there; empty where it was not, or does not say.

    Args:
        file: It.
        beside: The files that are there.
        of_rank: Whether another rank's alone is meant: under another name it may be a copy that somebody put aside.
    """
    name = _other_name(file)
    is_meant = name in beside and not (of_rank and _DIGITS.sub("", name) != _DIGITS.sub("", file.path))
    return f"was written as {name}, and lies in the place of another file" if is_meant else ""


def _other_name(file: StoredFile) -> str:
    """What a file was called beside its place when it was written, where it says so, and that is not what it is called."""
    place = PurePosixPath(file.path)
    return str(place.parent / f"{file.stem}{place.suffix}") if file.stem not in ("", place.stem) else ""


_DIGITS = re.compile(r"\d+")
_TENSOR = re.compile(r"data/\d+|.*\[[\d,]*\]")
_FEWEST = 3
"""Tensors by which a file is told from padding and new states, which those of several ranks of a small model may be alike in."""


def _is_copy(one: StoredFile, other: StoredFile) -> bool:
    """Whether one of two files of equal content lies in the place of the other; a parameter and its master may be equal too."""
    if one.rank == other.rank:
        return False
    told = {crc for key, _, nbytes, crc in one.records if _TENSOR.fullmatch(key) and crc != crc32_of_zeros(nbytes)}
    names = [[_DIGITS.sub("", key) for key, *_ in file.records] for file in (one, other)]
    alike = sum(a == b for a, b in zip(*names, strict=True))
    return len(told) >= _FEWEST and 2 * alike >= len(names[0])


class _Sums:
    """The executor's checksums, which are computed alike whoever notes them."""

    __slots__ = ()

    def crc32(self, data: memoryview) -> int:
        """Checksum of a window."""
        return crc32(data)

    def combine(self, first: int, second: int, second_nbytes: int) -> int:
        """Checksum of two adjacent pieces."""
        return combine(first, second, second_nbytes)


@dataclass(slots=True)
class Ledger(_Sums):
    """Collects checksums of what passes by; is the executor's ``Checksums``.

    Args:
        files: The files of the source, with the checksums that they store.
    """

    files: Iterable[StoredFile]
    _seen: dict[tuple[str, str], _Seen] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def saw(self, record: Record, byte_offset: int, nbytes: int, crc32: int) -> None:
        """Note what a range of a source record had for a checksum when it was read."""
        with self._lock:
            seen = self._seen.setdefault((record.file, record.key), _Seen())
            seen.add(byte_offset, byte_offset + nbytes, crc32)

    def wants(self, record: Record, byte_offset: int, nbytes: int) -> bool:
        """Whether a range of a record has not been seen yet."""
        with self._lock:
            seen = self._seen.get((record.file, record.key))
            return seen is None or not seen.covers(byte_offset, byte_offset + nbytes)

    @property
    def unread(self) -> int:
        """Bytes that nobody has read yet, and that :meth:`tasks` will read."""
        total = 0
        for file in self.files:
            records = sum(nbytes for _, _, nbytes, _ in file.records)
            read = [self._seen[file.path, key].spans for key, *_ in file.records if (file.path, key) in self._seen]
            total += records - sum(stop - start for spans in read for start, stop, _ in spans)
            total += max(0, file.nbytes - records) if file.whole is not None else 0
        return total

    def join(self, several: Iterable[Spans]) -> None:
        """Take over what others saw; where spans overlap, the longest counts."""
        found: dict[tuple[str, str], list[Span]] = {}
        for spans in several:
            for key, more in spans.items():
                found.setdefault(key, []).extend(more)
        for key, more in found.items():
            seen = self._seen.setdefault(key, _Seen())
            for span in sorted(more, key=lambda span: span[0] - span[1]):
                seen.add(*span)

    def tasks(self, source: SourceBytes, problems: Problems, progress: _Progress) -> Iterator[Task]:
        """Tasks that read what nobody has read yet, and hold every record against its stored checksum.

        Args:
            source: Where to read.
            problems: Told of every record that is damaged. Tasks may run in several threads.
            progress: Called with the number of bytes just read.
        """
        for file in self.files:
            for record in file.records:
                yield partial(self._check, source, problems, progress, file.path, record)
            if file.whole is not None:
                yield partial(self._check_whole, source, problems, progress, file)

    def _check(
        self, source: SourceBytes, problems: Problems, progress: _Progress, file: str, record: tuple[str, int, int, int]
    ) -> None:
        key, offset, nbytes, expected = record
        crc, position = 0, 0
        for start, stop, seen in [*self._seen.get((file, key), _Seen()).spans, (nbytes, nbytes, 0)]:
            crc = read_on(crc, source, progress, file, offset + position, offset + start)
            crc = combine(crc, seen, stop - start)
            position = stop
        if crc != expected:
            problems.add(
                Corrupt,
                f"{file}: {key} ({nbytes} bytes) has CRC-32 {crc:08x}, but the file says {expected:08x}: its bytes are damaged",
                "Copy the file again from where it was written.",
            )

    def _check_whole(self, source: SourceBytes, problems: Problems, progress: _Progress, file: StoredFile) -> None:
        """Hold a file against the checksum of all its bytes: only what lies between records is read, which have their own."""
        crc, position = 0, 0
        for _, offset, nbytes, expected in sorted(file.records, key=lambda record: record[1]):
            if offset >= position:
                crc = read_on(crc, source, progress, file.path, position, offset)
                crc, position = combine(crc, expected, nbytes), offset + nbytes
        crc = read_on(crc, source, progress, file.path, position, file.nbytes)
        if crc != file.whole:
            problems.add(
                Corrupt,
                f"{file.path}: is damaged: CRC-32 {crc:08x}, the manifest says {file.whole:08x}",
                "Copy the file again from where it was written.",
            )


@dataclass(slots=True)
class WatchedLedger(_Sums):
    """A ledger as one task sees it: what passes by is noted in the ledger, and here, for those who come after this process.

    Args:
        ledger: The ledger.
    """

    ledger: Ledger
    _seen: dict[tuple[str, str], _Seen] = field(default_factory=dict)

    @property
    def spans(self) -> Spans:
        """What this task saw."""
        return {key: seen.spans for key, seen in self._seen.items()}

    def saw(self, record: Record, byte_offset: int, nbytes: int, crc32: int) -> None:
        """See :meth:`Ledger.saw`."""
        self.ledger.saw(record, byte_offset, nbytes, crc32)
        self._seen.setdefault((record.file, record.key), _Seen()).add(byte_offset, byte_offset + nbytes, crc32)

    def wants(self, record: Record, byte_offset: int, nbytes: int) -> bool:
        """See :meth:`Ledger.wants`."""
        return self.ledger.wants(record, byte_offset, nbytes)


def read_on(crc: int, source: SourceBytes, progress: _Progress, file: str, start: int, stop: int) -> int:
    """The checksum of what was read so far and of a range of a file."""
    for at in range(start, stop, WINDOW_BYTES):
        size = min(WINDOW_BYTES, stop - at)
        if isinstance(source, ReadsAhead) and (at - start) % (AHEAD_BYTES // 2) == 0:
            source.expect([(file, at, min(AHEAD_BYTES, stop - at))])
        data = source.view(file, at, size)
        crc = combine(crc, crc32(data), size)
        del data
        source.release(file, at, size)
        progress(size)
    return crc


def paired(a_bytes: SourceBytes, a: Chunk, b_bytes: SourceBytes, b: Chunk) -> Iterator[tuple[Copy, Words, Words]]:
    """The elements of two equally shaped chunks as unsigned words, band by band; the arrays are valid until the next one.

    Yields:
        Which band it is, the first chunk's elements and the second's.
    """
    for copy in _bands(coalesced(a.box.shape, a, b)):
        with (
            _words(a_bytes, copy.source, copy.source_start, copy.shape, copy.source_strides) as left,
            _words(b_bytes, copy.target, copy.target_start, copy.shape, copy.target_strides) as right,
        ):
            yield copy, left, right


def _bands(copy: Copy) -> Iterator[Copy]:
    """Cut a pair of equally shaped pieces along their outer dimension, so that each band spans little of both sides."""
    pitch = max(
        copy.source_strides[0] * copy.source.dtype.itemsize, copy.target_strides[0] * copy.target.dtype.itemsize, 1
    )
    rows = max(1, WINDOW_BYTES // pitch)
    for row in range(0, copy.shape[0], rows):
        yield rows_of(copy, row, min(row + rows, copy.shape[0]))


@contextmanager
def _words(source: SourceBytes, record: Record, start: int, shape: Shape, strides: Shape) -> Iterator[Words]:
    """The elements of a strided piece of a record; valid inside the context only."""
    itemsize = record.dtype.itemsize
    at = record.byte_offset + start * itemsize
    nbytes = (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))) * itemsize
    data = source.view(record.file, at, nbytes)
    try:
        yield strided(np.frombuffer(data, WORDS[itemsize]), 0, shape, strides)
    finally:
        del data
        source.release(record.file, at, nbytes)


_DAMAGED = "Either file is damaged or from another step."


class Pair(NamedTuple):
    """Two equally shaped chunks that must agree: replicas of one box, or a master and the parameter that it rounds to.

    Args:
        name: The tensor; of a master and its parameter, the master's.
        a: The replica that is kept, or the master.
        b: The other one.
        parity: Whether it is a master and its parameter.
    """

    name: TensorName
    a: Chunk
    b: Chunk
    parity: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that are read to compare them."""
        return self.a.box.numel * (self.a.record.dtype.itemsize + self.b.record.dtype.itemsize)


def pairs(catalog: Chunks, problems: Problems, *, replicas: bool, parity: bool) -> Iterator[Pair]:
    """Everything in a catalogue that must agree with something else in it, tensor by tensor.

    Args:
        catalog: The catalogue.
        problems: Told of every tensor that is not stored whole, each element once.
        replicas: Whether copies of the same elements are compared.
        parity: Whether fp32 masters, rounded, must be the parameters.
    """
    for name in catalog:
        entry = catalog.get(name)
        wrong = "is stored nowhere" if entry is None else check_tiles(entry)
        if wrong is not None:
            problems.add(CoverageError, f"{name}: {wrong}")
        if entry is None:
            continue
        if replicas:
            for kept, other in entry.replicas():
                yield Pair(name, kept, other)
        if parity and name.state == MASTER:
            yield from _masters(catalog, name, entry)


def _masters(catalog: Chunks, name: TensorName, masters: TensorEntry) -> Iterator[Pair]:
    params = catalog.get(name._replace(state=PARAM))
    stored = params.primary() if params is not None else ()
    by_box = {chunk.box: chunk for chunk in stored}
    for master in masters.primary():
        exact = by_box.get(master.box)  # else ZeRO cuts masters where it does not cut parameters
        for param in (exact,) if exact is not None else stored:
            box = master.box.intersect(param.box) if exact is None else master.box
            if box is not None:
                yield Pair(name, master.narrow(box), param.narrow(box), parity=True)


@dataclass(slots=True)
class Audit:
    """Compares what must agree.

    Args:
        source: Where the bytes are.
        ledger: Hears of contiguous ranges that the audit is the first to read, so that they are not read again.
        problems: Told of everything that is wrong.
        progress: Called with the number of bytes just read.
        distrust: Why masters may disagree with parameters though no byte is damaged; see :class:`~..families.source.Source`.
        unlike: Names of the parameters that are not their masters, rounded, as far as they were compared.
    """

    source: SourceBytes
    ledger: Ledger | WatchedLedger
    problems: Problems
    progress: Callable[[int], None] = lambda nbytes: None
    distrust: str = ""
    unlike: set[str] = field(default_factory=set)

    @property
    def advice(self) -> str:
        """What to do where masters and parameters disagree."""
        return f"{self.distrust or _DAMAGED} The weights alone can be converted with --no-optimizer."

    def tasks(self, catalog: Chunks, *, replicas: bool, parity: bool) -> Iterator[Task]:
        """One task per tensor and check.

        Args:
            catalog: What to check.
            replicas: Whether copies of the same elements are compared.
            parity: Whether fp32 masters, rounded, must be the parameters.
        """
        for pair in pairs(catalog, self.problems, replicas=replicas, parity=parity):
            yield partial(self.compare, pair)

    def compare(self, pair: Pair) -> None:
        """Compare two chunks that must agree."""
        if pair.parity:
            self._compare_master(pair.name, pair.a, pair.b)
        else:
            self._compare_replicas(pair.name, pair.a, pair.b)

    def _compare_replicas(self, name: TensorName, kept: Chunk, other: Chunk) -> None:
        differing = 0
        for copy, a, b in paired(self.source, kept, self.source, other):
            self._tell(copy.source, copy.source_start, copy, copy.source_strides, a)
            self._tell(copy.target, copy.target_start, copy, copy.target_strides, b)
            if not np.array_equal(a, b):
                differing += int((a != b).sum())
        if differing:
            places, advice = [kept.record.file, other.record.file], "Replicas must be equal"
            if name.param == EMBEDDING:
                advice += (
                    f" (with {UNTIED} false in args, {OUTPUT} of the last stage is one; if it is not, say true there)"
                )
            if places[0] == places[1] or kept.record.key == name.param != other.record.key:
                places = [f"{chunk.record.file} ({chunk.record.key})" for chunk in (kept, other)]
            if kept.record.key == name.param != other.record.key:
                advice = (
                    f"{name.param} and {other.record.key} are two names of one tensor, as tie_word_embeddings of config.json or the "
                    "checkpoint itself says; if they are two, say false there, and otherwise they must be equal"
                )
            self.problems.add(
                Corrupt,
                f"{name}: {differing} elements of {kept.box} differ between the copies in {places[0]} and {places[1]}",
                f"{advice}; --trust-replicas takes the first copy without comparing.",
            )

    def _compare_master(self, name: TensorName, master: Chunk, param: Chunk) -> None:
        differing = 0
        try:
            for copy, high, low in paired(self.source, master, self.source, param):
                differing += differing_after_rounding(high, low, copy.source.dtype, copy.target.dtype)
        except Corrupt as error:  # masters that are computed: of what is none
            self.problems.add_error(error)
        if differing:
            self.unlike.add(name.param)
            self.problems.add(
                Corrupt,
                f"{name._replace(state=PARAM)}: {differing} elements of {master.box} in {param.record.file} are not their fp32 master "
                f"in {master.record.file}, rounded",
                self.advice,
            )

    def _tell(self, record: Record, start: int, copy: Copy, strides: tuple[int, ...], data: Words) -> None:
        """Let the ledger know the checksum of a contiguous range, if it has not seen it."""
        itemsize = record.dtype.itemsize
        offset, nbytes = start * itemsize, copy.numel * itemsize
        if strides == row_major(copy.shape) and self.ledger.wants(record, offset, nbytes):
            self.ledger.saw(record, offset, nbytes, crc32(np.ascontiguousarray(data).data.cast("B")))
            self.progress(nbytes)
