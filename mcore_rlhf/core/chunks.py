"""The table of chunks: which tensors there are, and which stored elements hold which part of each. One row a chunk; see :mod:`.rows`.

Views (other names, other states, other rows, tensors made of parts of others) are tables over the same rows; what is made anew is laid
beside them, when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from .catalog import MASTER, PARAM, Box, Chunk, DType, Record, Shape, TensorEntry, TensorName
from .rows import RowBlock, Rows, Strip, Tensor, Tensors
from .shares import Share, Shares


class Chunks:
    """The tensors of a checkpoint, or of one file of it, by name, and where their elements lie.

    Iterating gives the names, and costs nothing else. A view may know more names than it tells: a parameter that can be rounded from
    its master is found under its own name, though it is stored under none.

    Args:
        tensors: What the numbers mean.
        names: All that are told, in order; the wanted parts of a file may have a name twice.
        numbers: Of each, the tensor.
        untold: Names that are found besides.
    """

    __slots__ = ("_index", "_untold", "names", "numbers", "tensors")

    def __init__(
        self,
        tensors: Tensors | None = None,
        names: Iterable[TensorName] = (),
        numbers: Iterable[int] = (),
        untold: Mapping[TensorName, int] | None = None,
    ) -> None:
        self.tensors = Tensors() if tensors is None else tensors
        self.names, self.numbers = list(names), list(numbers)
        self._untold: Mapping[TensorName, int] = untold or {}
        self._index: dict[TensorName, int] | None = None

    @property
    def _found(self) -> dict[TensorName, int]:
        """Every name that is found; made when somebody looks, who seldom does in what a file is to hold."""
        if self._index is None:
            self._index = {**self._untold, **dict(zip(self.names, self.numbers, strict=True))}
        return self._index

    @classmethod
    def of(cls, entries: Iterable[TensorEntry]) -> Chunks:
        """A table of entries that are there already."""
        found = cls()
        for entry in entries:
            found.add(entry.name, Tensor.of(entry))
        return found

    def add(self, name: TensorName, tensor: Tensor) -> None:
        """A further tensor; only whoever makes the table does so."""
        self.names.append(name)
        self.numbers.append(self.tensors.add(tensor))
        self._index = None

    def place(self, names: Sequence[TensorName], block: RowBlock, record: Record) -> None:
        """Further tensors at once, of which parts lie in one record.

        Args:
            names: Their identities.
            block: Which parts, and where in the record.
            record: The record.
        """
        self.names.extend(names)
        self.numbers.extend(self.tensors.place(block, record) if names else ())
        self._index = None

    def __iter__(self) -> Iterator[TensorName]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def number(self, name: TensorName) -> int | None:
        """The number of the tensor of that name, or None."""
        return self._found.get(name)

    def numbers_of(self, names: Iterable[TensorName]) -> list[int | None]:
        """The same of many."""
        return [*map(self._found.get, names)]

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name, or None where nothing of it is stored."""
        number = self._found.get(name)
        if number is None:
            return None
        shape, chunks = self.tensors.shapes[number], tuple(self.tensors.chunks(number))
        if not chunks and all(shape):
            return None
        return TensorEntry(name, shape, self.tensors.dtypes[number], chunks)

    def dtype(self, name: TensorName) -> DType | None:
        """Its element type, or None; nothing is asked of where it lies."""
        number = self._found.get(name)
        return None if number is None else self.tensors.dtypes[number]

    def tensor(self, name: TensorName) -> Tensor:
        """One of the tensors, for another table.

        Raises:
            KeyError: There is none of that name.
        """
        tensors, number = self.tensors, self._found[name]
        return Tensor(tensors.shapes[number], tensors.dtypes[number], partial(_copied, tensors, number))

    def entries(self) -> Iterator[TensorEntry]:
        """All that are told, in order."""
        return (entry for name in self.names if (entry := self.get(name)) is not None)

    # views: other tables over the same rows

    def _seen(self, told: Mapping[TensorName, int], untold: Mapping[TensorName, int] | None = None) -> Chunks:
        return Chunks(self.tensors, told, told.values(), untold)

    def renamed(self, role: str, names: Mapping[str, str]) -> Chunks:
        """Other names of parameters, or fewer of them: a parameter may have several.

        Args:
            role: Role of all tensors.
            names: For every parameter of the view, its name here.
        """
        return self._seen(*(_renamed(found, role, names) for found in self._by_param()))

    def _by_param(self) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
        """By parameter the states of it that are told, and those that are found besides."""
        told: dict[str, dict[str, int]] = {}
        untold: dict[str, dict[str, int]] = {}
        for name, number in zip(self.names, self.numbers, strict=True):
            told.setdefault(name.param, {})[name.state] = number
        for name, number in self._found.items():
            if name.state not in told.get(name.param, ()):
                untold.setdefault(name.param, {})[name.state] = number
        return told, untold

    def rows(self, lengths: Mapping[str, int]) -> Chunks:
        """Another number of rows: the padding of a vocabulary.

        New rows repeat the last one, which is a trained padding row where there is any: zeros would give words that do not exist a
        larger share of the softmax. Megatron's own converter does the same.

        Args:
            lengths: Length of dimension 0, by parameter; all others stay as they are.
        """
        made: dict[int, int] = {}

        def number(name: TensorName, old: int) -> int:
            length = lengths.get(name.param)
            if length is None or self.tensors.shapes[old][0] == length:
                return old
            if old not in made:
                made[old] = self._with_rows(old, length)
            return made[old]

        return self._mapped(number)

    def _mapped(self, number: Callable[[TensorName, int], int]) -> Chunks:
        told = [number(name, old) for name, old in zip(self.names, self.numbers, strict=True)]
        return Chunks(self.tensors, self.names, told, {name: number(name, old) for name, old in self._untold.items()})

    def _with_rows(self, number: int, length: int) -> int:
        tensors, shape = self.tensors, self.tensors.shapes[number]

        def lay(rows: Rows) -> Iterator[Strip]:
            chunks = list(tensors.chunks(number))
            return rows.strips((*chunks, *_repeated(chunks, shape[0], length)))

        return tensors.add(Tensor((length, *shape[1:]), tensors.dtypes[number], lay), (number,))

    def recut(self, role: str, shares: Shares, shapes: Mapping[str, Shape]) -> Chunks:
        """Tensors that are made of boxes of others, in every state that the first of those has.

        Args:
            role: Role of all tensors.
            shares: For every parameter, which parts of those here it is made of. Parts that are not here are missing in it, which a
                plan notices.
            shapes: Its shape.
        """
        told: dict[TensorName, int] = {}
        untold: dict[TensorName, int] = {}
        states_told, states_untold = self._by_param()
        for param, parts in shares.items():
            first = states_told.get(parts[0].name, {})
            every = dict.fromkeys(
                state for of in (states_told, states_untold) for part in parts for state in of.get(part.name, ())
            )
            for state in (*first, *(state for state in every if state not in first)):
                below = {part.name: self._found.get(TensorName(role, part.name, state)) for part in parts}
                (told if state in first else untold)[TensorName(role, param, state)] = self._made(
                    shapes[param], [(part, number) for part in parts if (number := below[part.name]) is not None]
                )
        return self._seen(told, untold)

    def _made(self, shape: Shape, parts: Sequence[tuple[Share, int]]) -> int:
        tensors = self.tensors

        def lay(rows: Rows) -> Iterator[Strip]:
            return rows.strips(
                [
                    moved
                    for part, number in parts
                    for c in tensors.chunks(number)
                    if (moved := part.moved(c)) is not None
                ]
            )

        made = Tensor(shape, tensors.dtypes[parts[0][1]], lay)
        return tensors.add(made, [number for _, number in parts])

    def states(self, order: Mapping[str, tuple[str, ...]]) -> Chunks:
        """States that stand for one another.

        Args:
            order: For a state, those that are taken for it: the first one that there is. All others stand for themselves.
        """
        found = dict(self._found)
        for name in dict.fromkeys((name.role, name.param) for name in self._found):
            for state, instead in order.items():
                numbers = (self._found.get(TensorName(*name, other)) for other in instead)
                number = next((number for number in numbers if number is not None), None)
                if number is not None:
                    found[TensorName(*name, state)] = number
        return self._with(found)

    def _with(self, found: Mapping[TensorName, int]) -> Chunks:
        """The same names are told, and stand for other tensors."""
        return Chunks(self.tensors, self.names, [found[name] for name in self.names], found)

    def cast(self, dtype: DType | None) -> Chunks:
        """Parameters of which another type is wanted: what is stored in that one, otherwise its fp32 copy, otherwise what there is.

        Args:
            dtype: The wanted type; None for what is stored.
        """
        found = dict(self._found)
        for name, number in self._found.items():
            if name.state == MASTER:
                param = name._replace(state=PARAM)
                own = self._found.get(param)
                if own is None or dtype not in (None, self.tensors.dtypes[own]):
                    found[param] = number
        return self._with(found)

    def of_states(self, states: Collection[str]) -> Chunks:
        """Some states only."""
        told = {name: n for name, n in zip(self.names, self.numbers, strict=True) if name.state in states}
        return self._seen(told, {name: n for name, n in self._found.items() if name.state in states})

    def joined(self, other: Chunks) -> Chunks:
        """Two tables as one; where both have a name, this one's counts."""
        ours = self._taken(other)
        found = {**{name: ours[number] for name, number in other._found.items()}, **self._found}
        names = dict.fromkeys((*self.names, *other.names))
        return Chunks(self.tensors, names, [found[name] for name in names], found)

    def _taken(self, other: Chunks) -> Mapping[int, int]:
        """The tensors of another table as tensors of this one."""
        numbers = dict.fromkeys(other._found.values())
        if other.tensors is self.tensors:
            return {number: number for number in numbers}
        copies = {number: other.tensor(name) for name, number in other._found.items()}
        return {number: self.tensors.add(copy, ()) for number, copy in copies.items()}

    def below(self, folder: str) -> Chunks:
        """Files that are named from a folder further up.

        Args:
            folder: What is put in front of every file's name, with a ``/`` at the end; may be empty.
        """
        if not folder:
            return self
        tensors, records = self.tensors, dict[int, Record]()

        def moved(record: Record) -> Record:
            found = records.get(id(record))
            return found or records.setdefault(id(record), replace(record, file=folder + record.file))

        def number(_name: TensorName, old: int) -> int:
            def lay(rows: Rows) -> Iterator[Strip]:
                return rows.strips([replace(chunk, record=moved(chunk.record)) for chunk in tensors.chunks(old)])

            return tensors.add(Tensor(tensors.shapes[old], tensors.dtypes[old], lay), (old,))

        return self._mapped(number)

    def replaced(self, others: Mapping[TensorName, Tensor], *, told: bool = True, same: bool = False) -> Chunks:
        """Some tensors are others, or are there besides: such as are computed.

        Args:
            others: Those.
            told: Whether names are told that are not there now.
            same: Whether they are what is there now in another form, so that it is in a target where they are.
        """
        before = {name: (self._found[name],) if same else () for name in others}
        found = self._found | {name: self.tensors.add(one, before[name]) for name, one in others.items()}
        names = dict.fromkeys((*self.names, *others)) if told else self.names
        return Chunks(self.tensors, names, [found[name] for name in names], found)


def _copied(tensors: Tensors, number: int, rows: Rows) -> Iterator[Strip]:
    return rows.strips(tensors.chunks(number))


def _renamed(found: Mapping[str, Mapping[str, int]], role: str, names: Mapping[str, str]) -> dict[TensorName, int]:
    return {
        TensorName(role, new, state): number
        for new, old in names.items()
        for state, number in found.get(old, {}).items()
    }


CUT_ROWS = "vocabulary rows {first}–{last} are padding that the new layout does not have, and are cut"
"""What is said of one that gets fewer."""


def new_rows(have: int, rows: int) -> str:
    """What is said of a vocabulary that gets more rows; see :meth:`Chunks.rows`."""
    return f"vocabulary rows {have}–{rows - 1} are new padding and repeat row {have - 1}, in every state"


def _repeated(chunks: Iterable[Chunk], have: int, rows: int) -> Iterator[Chunk]:
    """Rows ``[have, rows)`` of a tensor that gets more of them: its last one, with stride 0.

    Args:
        chunks: Those of the tensor as it is.
        have: Its rows.
        rows: Those that it gets; nothing is repeated where they are fewer.
    """
    for chunk in chunks if rows > have else ():
        if chunk.box.stop[0] == have:
            inner = chunk.box
            last = chunk.narrow(Box((have - 1, *inner.offset[1:]), (1, *inner.shape[1:])))
            new = Box((have, *inner.offset[1:]), (rows - have, *inner.shape[1:]))
            yield Chunk(new, last.record, last.start, (0, *last.strides[1:]))
