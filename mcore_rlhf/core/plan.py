"""Planning: what must be copied so that a target holds what a source has. A plan is the join of two tables of chunks.

Rows meet by their tensor. What a form of the one and a form of the other have in common is worked out once (a :class:`Movement`), whichever
rows have them; everything else is columns. Coverage and disjointness fall out.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from mcore_rlhf.errors import CoverageError, Incomplete, Problems

from .catalog import UINT8, Box, Chunk, DType, Record, Shape, TensorEntry, TensorName
from .chunks import Chunks
from .rows import Form, Tensors

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Copy:
    """One strided copy between two records.

    Args:
        shape: Elements to copy in every dimension; dimensions that are contiguous on both sides are merged.
        source: Record to read.
        source_start: First element in the source record.
        source_strides: Elements, one per dimension; 0 repeats an element.
        target: Record to write.
        target_start: First element in the target record.
        target_strides: Elements, one per dimension.
    """

    shape: Shape
    source: Record
    source_start: int
    source_strides: Shape
    target: Record
    target_start: int
    target_strides: Shape

    @property
    def cast(self) -> DType | None:
        """The element type that values are converted to, or None where bytes are copied as they are."""
        return None if self.source.dtype == self.target.dtype else self.target.dtype

    @property
    def contiguous(self) -> bool:
        """Whether this is one unbroken run of elements on both sides."""
        return self.source_strides == (1,) and self.target_strides == (1,)

    @property
    def numel(self) -> int:
        """Number of elements copied."""
        count = 1
        for n in self.shape:
            count *= n
        return count


class Movement(NamedTuple):
    """What chunks of two forms have in common, as a copy between records in which both begin at element 0.

    Args:
        shape, source_strides, target_strides: See :class:`Copy`.
        source_start, target_start: How far from the start of its chunk it begins, in elements.
        numel: How many elements it moves.
    """

    shape: Shape
    source_strides: Shape
    target_strides: Shape
    source_start: int
    target_start: int
    numel: int


_NOWHERE = Record("", "", UINT8, 0, 0)


def _meet(have: Form, want: Form) -> Movement | None:
    part = have.box.intersect(want.box)
    if part is None:
        return None
    copy = coalesced(part.shape, *(Chunk(f.box, _NOWHERE, 0, f.strides).narrow(part) for f in (have, want)))
    return Movement(
        copy.shape, copy.source_strides, copy.target_strides, copy.source_start, copy.target_start, part.numel
    )


@dataclass(slots=True)
class Copies(Sequence[Copy]):
    """The copies of a plan, in columns; one of them is a value when somebody looks at it.

    Args:
        movements: What moves; each may do so in many places.
        sources, targets: The records.
        movement, source, source_start, target, target_start: Of every copy its movement and both records, by number, and the elements
            at which it begins in them.
    """

    movements: Sequence[Movement] = ()
    sources: Sequence[Record] = ()
    targets: Sequence[Record] = ()
    movement: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    source: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    source_start: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    target: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    target_start: Integers = field(default_factory=lambda: np.empty(0, np.int64))

    def __len__(self) -> int:
        return len(self.movement)

    def __iter__(self) -> Iterator[Copy]:
        columns = (self.movement, self.source, self.source_start, self.target, self.target_start)
        for number, source, at, target, to in zip(*(column.tolist() for column in columns), strict=True):
            yield self._copy(number, source, at, target, to)

    @overload
    def __getitem__(self, at: int) -> Copy: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Copy]: ...

    def __getitem__(self, at: int | slice) -> Copy | Sequence[Copy]:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        columns = (self.movement, self.source, self.source_start, self.target, self.target_start)
        return self._copy(*(int(column[at]) for column in columns))

    def _copy(self, number: int, source: int, at: int, target: int, to: int) -> Copy:
        move = self.movements[number]
        return Copy(
            move.shape, self.sources[source], at, move.source_strides, self.targets[target], to, move.target_strides
        )

    @property
    def casts(self) -> int:
        """How many convert values on the way."""
        if not len(self):
            return 0
        used, which = np.unique(self.source, return_inverse=True)  # of a source's records, a file's are few
        have = np.array([self.sources[number].dtype.name for number in used.tolist()])[which]
        return int((have != np.array([record.dtype.name for record in self.targets])[self.target]).sum())


@dataclass(slots=True)
class FilePlan:
    """Everything that fills one target file, independent of all other files.

    Args:
        file: The target file.
        copies: What is copied.
        problems: What was found on the way.
        casts: What of the target is converted on the way, from which type to which; what is computed is not told here.
        used: The source's tensors that it is made of, by number.
    """

    file: str
    copies: Sequence[Copy] = ()
    problems: Problems = field(default_factory=Problems)
    casts: dict[TensorName, tuple[DType, DType]] = field(default_factory=dict)
    used: Sequence[int] = ()

    @property
    def read(self) -> list[Record]:
        """The records of the source that it reads, or computes."""
        if isinstance(self.copies, Copies):
            return [self.copies.sources[number] for number in np.unique(self.copies.source).tolist()]
        return [copy.source for copy in self.copies]

    @property
    def casts_done(self) -> int:
        """How many copies convert values."""
        if isinstance(self.copies, Copies):
            return self.copies.casts
        return sum(copy.cast is not None for copy in self.copies)

    @property
    def lossless(self) -> bool:
        """Whether no value is converted or computed on the way."""
        return not self.casts_done and not any(record.computed for record in self.read)


def plan_file(file: str, holds: Chunks, source: Chunks) -> FilePlan:
    """Plan one target file.

    Args:
        file: The target file, relative to the target's root.
        holds: The logical tensors of which the file holds parts, with those parts as chunks.
        source: Where the elements come from.

    Returns:
        The copies, and every problem found on the way: nothing is raised here, so that all files can be looked at.
    """
    plan, wanted = FilePlan(file), list[_Wanted]()
    there, types = source.tensors, holds.tensors.dtypes
    for name, number, have in zip(holds.names, holds.numbers, source.numbers_of(holds.names), strict=True):
        if have is None:
            plan.problems.add(Incomplete, f"{name}: the target needs it in {file}, and the source does not have it")
            continue
        wanted.append((name, number, have))
        stored, dtype = there.dtypes[have], types[number]
        if stored is not dtype and stored != dtype and not _is_computed(there, have):
            plan.casts[name] = stored, dtype
    plan.used = list(dict.fromkeys([have for _, _, have in wanted]))
    copies = plan.copies = _Join(plan, wanted, there, holds.tensors).copies()
    if copies.casts:
        plan.casts.update(_parts_of_other_types(plan.casts, wanted, there, types))
    _check_disjoint(plan.copies, plan)
    return plan


_Wanted = tuple[TensorName, int, int]
"""A wanted tensor: its name, its number in the file's table, and that of the source's in the source's."""


def _parts_of_other_types(
    told: Collection[TensorName], wanted: Sequence[_Wanted], there: Tensors, types: Sequence[DType]
) -> Iterator[tuple[TensorName, tuple[DType, DType]]]:
    """Tensors that have the target's type as a whole, and of which some parts are stored in another one.

    Where all are, whoever made the table says so: of remainders that are integers and stored as floats.
    """
    for name, number, have in wanted:
        if name in told:
            continue
        records = {there.rows.records[there.rows.record[row]] for row in there.span(have)}
        stored = {one.dtype.name: one.dtype for one in records if not one.computed}
        if len(stored) > 1 and (others := sorted(stored.keys() - {types[number].name})):
            yield name, (stored[others[0]], types[number])


def _is_computed(tensors: Tensors, number: int) -> bool:
    rows = tensors.span(number)
    return bool(rows) and tensors.rows.records[tensors.rows.record[rows.start]].computed


class _Picked(NamedTuple):
    """Some rows of a table as arrays, and what of their forms is looked at first.

    Args:
        row, form, record, start: The rows.
        box, numel, low, high: See :class:`.chunks.Rows`.
    """

    row: Integers
    form: Integers
    record: Integers
    start: Integers
    box: Integers
    numel: Integers
    low: Integers
    high: Integers

    @classmethod
    def of(cls, tensors: Tensors, row: Integers) -> _Picked:
        """Those rows."""
        rows = tensors.rows
        with tensors.lock:
            form, record, start = (_taken(column, row) for column in (rows.form, rows.record, rows.start))
            return cls(
                row, form, record, start, *(_taken(column, form) for column in (rows.box, rows.numel, rows.low, rows.high))
            )  # fmt: skip

    def at(self, which: Integers | NDArray[np.bool_] | slice) -> _Picked:
        """Some of them."""
        return _Picked(*(column[which] for column in self))


def _taken(column: array[int], rows: Integers) -> Integers:
    return np.frombuffer(column, column.typecode)[rows].astype(np.int64) if rows.size else np.empty(0, np.int64)


def _counted(starts: Sequence[int] | Integers, counts: Sequence[int] | Integers) -> tuple[Integers, Integers]:
    """All numbers of ranges, one range after the other, and of every number the range that it is of."""
    starts, counts = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
    of = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(of)) + (starts - np.cumsum(counts) + counts)[of], of


_MOST_PAIRS = 1 << 20
"""Rows that are held against each other at a time, which takes about 60 MB."""


class _Join:
    """Holds the wanted rows of a file against those of the source, tensor by tensor."""

    def __init__(self, plan: FilePlan, wanted: Sequence[_Wanted], source: Tensors, target: Tensors) -> None:
        self.plan, self.wanted, self.source, self.target = plan, wanted, source, target
        self.movements: list[Movement] = []
        self._known: dict[int, int] = {}

    def copies(self) -> Copies:
        """What is copied; told of what is stored nowhere, or twice."""
        numbers, tensor = np.unique(np.array([have for _, _, have in self.wanted], np.int64), return_inverse=True)
        held, of = _counted(*self.source.spans(numbers.tolist()))
        rows, owner = _counted(*self.target.spans([number for _, number, _ in self.wanted]))
        there, self.want = _Picked.of(self.source, held), _Picked.of(self.target, rows)
        _, first = np.unique(of * (there.box.max(initial=0) + 1) + there.box, return_index=True)
        first.sort()  # of replicas the first counts
        self.there, of = there.at(first), of[first]
        begin = np.searchsorted(of, np.arange(len(numbers) + 1))
        self.owner, tensor = owner, tensor[owner]
        self.begin, self.end = begin[tensor], begin[tensor + 1]
        parts = [self._block(*block) for block in self._blocks()]
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else [rows[:0]] * 5
        return Copies(self.movements, self.source.rows.records, self.target.rows.records, *columns)

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Runs of wanted rows that meet not too many others each."""
        upto, low = np.cumsum(self.end - self.begin), 0
        while low < len(upto):
            before = int(upto[low - 1]) if low else 0
            high = max(low + 1, int(np.searchsorted(upto, before + _MOST_PAIRS, "right")))
            yield low, high
            low = high

    def _block(self, low: int, high: int) -> tuple[Integers, ...]:
        at, which = _counted(self.begin[low:high], self.end[low:high] - self.begin[low:high])
        near = (self.there.low[at] < self.want.high[which + low]) & (self.there.high[at] > self.want.low[which + low])
        at, which = at[near], which[near]
        moves = self._moves(self.there.form[at], self.want.form[which + low])
        meet = moves >= 0
        at, which, moves = at[meet], which[meet], moves[meet]
        source_start, target_start, numel = (
            np.array([move[column] for move in self.movements], np.int64) for column in (3, 4, 5)
        )
        moved = np.concatenate([[0], np.cumsum(numel[moves])])
        ends = np.searchsorted(which, np.arange(high - low + 1))
        self._check(low, self.want.numel[low:high] - (moved[ends[1:]] - moved[ends[:-1]]))
        there, want = self.there.at(at), self.want.at(which + low)
        return moves, there.record, there.start + source_start[moves], want.record, want.start + target_start[moves]

    def _moves(self, ours: Integers, theirs: Integers) -> Integers:
        """For every pair of forms the movement between them, by number; -1 where they do not meet."""
        forms = len(self.target.rows.forms)
        pairs, which = np.unique(ours * forms + theirs, return_inverse=True)
        return np.array([self._move(pair, *divmod(pair, forms)) for pair in pairs.tolist()], np.int64)[which]

    def _move(self, pair: int, ours: int, theirs: int) -> int:
        found = self._known.get(pair)
        if found is None:
            move = _meet(self.source.rows.forms[ours], self.target.rows.forms[theirs])
            found = self._known[pair] = -1 if move is None else len(self.movements)
            self.movements += [] if move is None else [move]
        return found

    def _check(self, low: int, missing: Integers) -> None:
        for number in np.flatnonzero(missing).tolist():
            at = low + number
            sources = [self.source.rows.chunk(row) for row in self.there.row[self.begin[at] : self.end[at]].tolist()]
            chunk = self.target.rows.chunk(int(self.want.row[at]))
            text = _incomplete(sources, chunk, int(missing[number]))
            self.plan.problems.add(CoverageError, f"{self.wanted[self.owner[at]][0]}: {text}")


def _incomplete(sources: Sequence[Chunk], chunk: Chunk, missing: int) -> str:
    if missing > 0:
        return (
            f"{missing} of the {chunk.box.numel} elements of {chunk.box}, wanted in {chunk.record.file}, have no source"
        )
    some = ", ".join(f"{c.box} in {c.record.file}" for c in sources[:4])
    return f"{chunk.box}, wanted in {chunk.record.file}, has overlapping sources: {some}"


def coalesced(shape: Shape, source: Chunk, target: Chunk) -> Copy:
    """The copy of a whole chunk onto another of the same shape, with as few dimensions as possible.

    Dimensions are put in the order in which they lie in the target (which may be transposed), outermost first.
    """
    dims: list[tuple[int, int, int]] = []  # (count, source stride, target stride)
    given = [dim for dim in zip(shape, source.strides, target.strides, strict=True) if dim[0] != 1]
    for count, s, t in sorted(given, key=itemgetter(2), reverse=True):
        if dims and dims[-1][1] == s * count and dims[-1][2] == t * count:
            dims[-1] = (dims[-1][0] * count, s, t)
        else:
            dims.append((count, s, t))
    dims = dims or [(1, 1, 1)]
    counts, s_strides, t_strides = zip(*dims, strict=True)
    return Copy(counts, source.record, source.start, s_strides, target.record, target.start, t_strides)


def _check_disjoint(copies: Copies, plan: FilePlan) -> None:
    """No element of a target record may be written twice (cheaply: only unbroken runs are compared)."""
    unbroken = np.array([move.target_strides == (1,) for move in copies.movements], np.bool_)[copies.movement]
    numel = np.array([move.numel for move in copies.movements], np.int64)[copies.movement[unbroken]]
    keys: dict[str, int] = {}
    key_of = np.array([keys.setdefault(record.key, len(keys)) for record in copies.targets], np.int64)
    key, start = key_of[copies.target[unbroken]], copies.target_start[unbroken]
    order = np.lexsort((start + numel, start, key))
    key, start, end = key[order], start[order], (start + numel)[order]
    names = list(keys)
    for at in np.flatnonzero((key[1:] == key[:-1]) & (start[1:] < end[:-1])).tolist():
        text = f"elements {start[at + 1]}:{end[at]} of {names[key[at]]} would be written twice"
        plan.problems.add(CoverageError, f"{plan.file}: {text}")


def check_tiles(entry: TensorEntry) -> str | None:
    """Whether the chunks of an entry cover its whole tensor exactly once; says what is wrong, or None."""
    whole = Box.whole(entry.global_shape)
    boxes = [chunk.box for chunk in entry.primary() if chunk.box.numel]
    outside = next((box for box in boxes if not whole.contains(box)), None)
    if outside is not None:
        return f"{outside} lies outside the tensor, whose shape is {entry.global_shape}"
    covered = sum(box.numel for box in boxes)
    if covered < whole.numel:
        return f"{whole.numel - covered} of {whole.numel} elements are stored nowhere"
    if covered > whole.numel:
        return f"{covered - whole.numel} elements are stored in overlapping pieces"
    return None
