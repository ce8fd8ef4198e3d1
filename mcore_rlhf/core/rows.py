"""The rows of tables of chunks, in columns: how each chunk is cut, in which record it lies, and where it starts there.

What is cut alike has one *form* (a box, and strides): layers, experts and states share theirs. A row is three numbers, so that a million
of them take 16 MB, and a plan holds forms against each other and not chunks. A tensor's rows are laid when somebody asks for them: some
formats say what a tensor is in one file, and where it lies in thousands.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from .catalog import Box, Chunk, DType, Record, Shape, TensorEntry


class Form(NamedTuple):
    """How a chunk is cut, and how its elements follow one another: all that it has in common with others.

    Args:
        box: What it is of the tensor.
        strides: From one element to the next in its record, in elements.
    """

    box: Box
    strides: Shape


class Cut(NamedTuple):
    """Which boxes of a whole tensor a local one has, and where in it: what many local tensors have in common.

    Args:
        boxes: Of the whole tensor, in its coordinates; no two meet.
        strides: Of each, in elements.
        starts: Where each begins, from the local tensor's first element.
    """

    boxes: tuple[Box, ...]
    strides: Shape
    starts: tuple[int, ...]


class RowBlock(NamedTuple):
    """Local tensors that lie in one record: what many records have in common, those of ranks, of states, of layers.

    Args:
        shapes: Of the whole tensors.
        forms: The forms of their rows, each once.
        form: Of every row, which of those.
        start: Of every row, where it begins in the record.
        ends: Of every tensor, where its rows end among these.
    """

    shapes: Sequence[Shape]
    forms: Sequence[Form]
    form: Sequence[int]
    start: array[int]
    ends: Sequence[int]

    @classmethod
    def of(cls, shapes: Sequence[Shape], cuts: Iterable[Cut], starts: Iterable[int]) -> RowBlock:
        """Contiguous local tensors.

        Args:
            shapes: Of the whole tensors.
            cuts: What they are of those.
            starts: Where they begin in the record.
        """
        forms, form, start, ends = dict[Form, int](), list[int](), array("q"), list[int]()
        for cut, begin in zip(cuts, starts, strict=True):
            form += (forms.setdefault(Form(box, cut.strides), len(forms)) for box in cut.boxes)
            start.extend([begin + at for at in cut.starts])
            ends.append(len(form))
        return cls(shapes, list(forms), form, start, ends)


class Strip(NamedTuple):
    """Rows that lie in one record.

    Args:
        forms: Their forms, by number.
        record: The record.
        starts: The first element of each in it.
    """

    forms: Sequence[int]
    record: Record
    starts: Sequence[int]


class Rows:
    """The columns. Rows are added and never changed."""

    def __init__(self) -> None:
        self.forms: list[Form] = []
        self.records: list[Record] = []
        self.form, self.record, self.start = array("i"), array("i"), array("q")
        self.box, self.numel, self.low, self.high = array("i"), array("q"), array("q"), array("q")
        """Of every form: the number of its box, that box's elements, its first row and one past its last."""
        self._forms: dict[Form, int] = {}
        self._boxes: dict[Box, int] = {}
        self._records: dict[int, int] = {}
        self._cuts: dict[int, tuple[Cut, tuple[int, ...]]] = {}

    def forms_of(self, cut: Cut) -> tuple[int, ...]:
        """The numbers of the forms of a local tensor; quick where the cut is the same object as before."""
        known = self._cuts.get(id(cut))
        if known is None:
            known = self._cuts[id(cut)] = cut, tuple(self.form_of(box, cut.strides) for box in cut.boxes)
        return known[1]

    def form_of(self, box: Box, strides: Shape) -> int:
        """The number of a form."""
        form = Form(box, strides)
        number = self._forms.get(form)
        if number is None:
            number = self._forms[form] = len(self.forms)
            self.forms.append(form)
            self.box.append(self._boxes.setdefault(box, len(self._boxes)))
            self.numel.append(box.numel)
            self.low.append(box.offset[0] if box.shape else 0)
            self.high.append(box.stop[0] if box.shape else 1)
        return number

    def strips(self, chunks: Iterable[Chunk]) -> Iterator[Strip]:
        """Chunks as what is laid."""
        return (Strip((self.form_of(c.box, c.strides),), c.record, (c.start,)) for c in chunks)

    def lay(self, tensors: Iterable[Sequence[Strip]]) -> list[int]:
        """Add the rows of tensors; returns where those of each end."""
        form, record, start, ends = list[int](), list[int](), list[int](), list[int]()
        low = len(self.start)
        for strips in tensors:
            for forms, lies_in, starts in strips:
                form += forms
                record += [self._number(lies_in)] * len(forms)
                start += starts
            ends.append(low + len(start))
        self.form.extend(form)
        self.record.extend(record)
        self.start.extend(start)
        return ends

    def _number(self, record: Record) -> int:
        at = self._records.get(id(record))  # records are kept, so that no other one gets that id
        if at is None:
            at = self._records[id(record)] = len(self.records)
            self.records.append(record)
        return at

    def place(self, block: RowBlock, record: Record) -> list[int]:
        """Add the rows of local tensors that lie in a record; returns where those of each end."""
        low, numbers = len(self.start), [self.form_of(*form) for form in block.forms]
        self.form.extend([numbers[form] for form in block.form])
        self.record.extend(array("i", [self._number(record)]) * len(block.start))
        self.start.extend(block.start)
        return [low + end for end in block.ends]

    def chunk(self, row: int) -> Chunk:
        """A row as a value."""
        box, strides = self.forms[self.form[row]]
        return Chunk(box, self.records[self.record[row]], self.start[row], strides)


Lay = Callable[[Rows], Iterable[Strip]]
"""Says which rows a tensor has."""


class Tensor(NamedTuple):
    """A tensor that comes into a table.

    Args:
        shape: Of the whole tensor.
        dtype: Element type as stored.
        lay: Says which rows it has, when somebody asks.
    """

    shape: Shape
    dtype: DType
    lay: Lay

    @classmethod
    def of(cls, entry: TensorEntry) -> Tensor:
        """An entry that is there already."""
        return cls(entry.global_shape, entry.dtype, partial(_runs, entry.chunks))


_LAID_AT_ONCE = 1 << 10
"""Tensors, so that what says where their rows are takes little memory besides the rows."""


class Tensors:
    """What the tensors of one table are, or of several that are views of it, by number; and which rows each has."""

    def __init__(self) -> None:
        self.rows = Rows()
        self.shapes: list[Shape] = []
        self.dtypes: list[DType] = []
        self.made_of: dict[int, tuple[int, ...]] = {}
        """Of what is made of others, the numbers of those."""
        self._lay: list[Lay | None] = []
        self._low, self._high = array("q"), array("q")
        self.lock = threading.RLock()
        """Held while rows are laid, and while columns are looked at as wholes."""

    def add(self, tensor: Tensor, made_of: Iterable[int] | None = None) -> int:
        """A further tensor, whose rows are laid when they are asked for; returns its number."""
        number = len(self.shapes)
        self.shapes.append(tensor.shape)
        self.dtypes.append(tensor.dtype)
        self._lay.append(tensor.lay)
        self._low.append(0)
        self._high.append(0)
        if made_of is not None:
            self.made_of[number] = tuple(made_of)
        return number

    def place(self, block: RowBlock, record: Record) -> range:
        """Further tensors, of which parts lie in one record; returns their numbers."""
        low, numbers = len(self.rows.start), range(len(self.shapes), len(self.shapes) + len(block.shapes))
        ends = self.rows.place(block, record)
        self._low.extend([low, *ends[:-1]])
        self._high.extend(ends)
        self.shapes.extend(block.shapes)
        self.dtypes.extend([record.dtype] * len(block.shapes))
        self._lay.extend([None] * len(block.shapes))
        return numbers

    def span(self, number: int) -> range:
        """The rows of a tensor."""
        if self._lay[number] is not None:
            self._fill([number])
        return range(self._low[number], self._high[number])

    def spans(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        """The first rows of tensors, and how many each has."""
        waiting = [number for number in numbers if self._lay[number] is not None]
        for at in range(0, len(waiting), _LAID_AT_ONCE):
            self._fill(waiting[at : at + _LAID_AT_ONCE])
        return [self._low[n] for n in numbers], [self._high[n] - self._low[n] for n in numbers]

    def _fill(self, numbers: Iterable[int]) -> None:
        with self.lock:
            strips = {n: list(lay(self.rows)) for n in numbers if (lay := self._lay[n]) is not None}
            left = [n for n in strips if self._lay[n] is not None]  # some may be made of others of them
            low = len(self.rows.start)
            for number, end in zip(left, self.rows.lay(strips[n] for n in left), strict=True):
                self._low[number], self._high[number], self._lay[number] = low, end, None
                low = end

    def chunks(self, number: int) -> Iterator[Chunk]:
        """Where the elements of a tensor lie, row by row."""
        return map(self.rows.chunk, self.span(number))


def _runs(chunks: Iterable[Chunk], rows: Rows) -> Iterator[Strip]:
    return rows.strips(chunks)
