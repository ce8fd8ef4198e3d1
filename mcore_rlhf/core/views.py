"""The algebra of catalogues: one over others, made of a few parts that combine.

A view reads no tensor and holds no chunks. Iterating asks the catalogue below for its names; looking up gives the entry under the
name that was asked for, its chunks moved at most, or None for what is not there.

========================  =============================================================================================
:class:`Renamed`          other names of parameters, or fewer of them
:class:`Rows`             another number of rows: the padding of a vocabulary
:class:`Recut`            tensors that are made of boxes of others
:class:`StateOrder`       states that stand for one another, such as the master for the parameter
:class:`Cast`             parameters of another type, from what is most exact
:class:`Joined`           several catalogues as one
:class:`Below`            files that are named from a folder further up
:class:`OfStates`         some states only
:class:`Remembered`       entries that are asked for again
========================  =============================================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from .catalog import MASTER, PARAM, Box, Catalog, Chunk, DType, Shape, TensorEntry, TensorName

FROM_MASTERS: Mapping[str, tuple[str, ...]] = {PARAM: (MASTER, PARAM), MASTER: (MASTER, PARAM)}
"""A parameter is rounded from its fp32 copy where there is one."""
EITHER: Mapping[str, tuple[str, ...]] = {PARAM: (PARAM, MASTER), MASTER: (MASTER, PARAM)}
"""Each is made of the other where it is stored nowhere: ZeRO stage 3 stores masters only, an fp32 model parameters only."""

ABSENT = -1
"""In place of a dimension that the other tensor does not have; it is one element long."""


@dataclass(frozen=True, slots=True)
class View:
    """A catalogue with the names of another.

    Args:
        catalog: The one below.
    """

    catalog: Catalog

    def __iter__(self) -> Iterator[TensorName]:
        return iter(self.catalog)

    def __len__(self) -> int:
        return len(self.catalog)


@dataclass(frozen=True, slots=True)
class Renamed(View):
    """Other names, or fewer: a parameter may have several.

    Args:
        role: Role of all tensors.
        names: For every parameter of this view, its name below.
    """

    role: str
    names: Mapping[str, str]
    _names: list[TensorName] = field(default_factory=list, init=False, repr=False, compare=False)

    def __iter__(self) -> Iterator[TensorName]:
        if not self._names:
            self._names.extend(_with_states(self.catalog, self.role, self.names.items()))
        return iter(self._names)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name, or None."""
        below = self.names.get(name.param) if name.role == self.role else None
        return None if below is None else _named(self.catalog.get(TensorName(name.role, below, name.state)), name)


@dataclass(frozen=True, slots=True)
class Rows(View):
    """Another number of rows.

    Args:
        rows: Length of dimension 0, by parameter; all others stay as they are. See :func:`with_rows`.
    """

    rows: Mapping[str, int]

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name, or None."""
        entry, rows = self.catalog.get(name), self.rows.get(name.param)
        return entry if entry is None or rows is None else with_rows(entry, rows)


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a tensor: which box of which tensor under other names holds it.

    Args:
        box: In the tensor itself.
        name: The other tensor.
        other: In that tensor; of the same shape unless ``axes`` says otherwise. One of the two boxes may have steps.
        axes: For every dimension of ``box``, the dimension of ``other`` that it is, or -1 where it is none of them and one
            element long; None where all are the same.
    """

    box: Box
    name: str
    other: Box
    axes: tuple[int, ...] | None = None

    def inverse(self, name: str) -> Share:
        """The same part, seen from the other tensor.

        Args:
            name: Of the tensor that has this share.
        """
        if self.axes is None:
            return Share(self.other, name, self.box)
        places = {axis: dim for dim, axis in enumerate(self.axes)}
        return Share(self.other, name, self.box, tuple(places.get(dim, ABSENT) for dim in range(len(self.other.shape))))

    def moved(self, chunk: Chunk) -> Chunk | None:
        """What of a chunk of the other tensor lies in this share, in this tensor's coordinates; None where nothing does."""
        part = chunk.box.intersect(self.other)
        if part is None:
            return None
        narrow = chunk.narrow(part)
        return Chunk(self.own(part), narrow.record, narrow.start, self.strides(narrow.strides))

    def own(self, part: Box) -> Box:
        """A part of ``other`` in the coordinates of the tensor that has this share."""
        if self.box.step is not None or self.other.step is not None:
            return self._stepped(part)
        if self.axes is None:
            return part.shift(
                tuple(there - here for there, here in zip(self.other.offset, self.box.offset, strict=True))
            )
        offset = tuple(
            here if axis == ABSENT else here + part.offset[axis] - self.other.offset[axis]
            for here, axis in zip(self.box.offset, self.axes, strict=True)
        )
        return Box(offset, tuple(1 if axis == ABSENT else part.shape[axis] for axis in self.axes))

    def _stepped(self, part: Box) -> Box:
        """The same, where elements next to each other here are some steps apart there, or the other way round."""
        offset, shape = [], []
        for dim, axis in enumerate(range(len(self.box.shape)) if self.axes is None else self.axes):
            way = 0 if axis == ABSENT else (part.offset[axis] - self.other.offset[axis]) // self.other.steps[axis]
            offset.append(self.box.offset[dim] + way * self.box.steps[dim])
            shape.append(1 if axis == ABSENT else part.shape[axis])
        return Box(tuple(offset), tuple(shape), self.box.step)

    def strides(self, others: Shape) -> Shape:
        """Strides in the dimensions of the tensor that has this share, given those of the other one."""
        if self.axes is None:
            return others
        return tuple(1 if axis == ABSENT else others[axis] for axis in self.axes)


Shares = Mapping[str, tuple[Share, ...]]
"""For every tensor, the parts of others that it is made of."""


@dataclass(frozen=True, slots=True)
class Recut(View):
    """Tensors that are made of boxes of others, in every state that the first of those has.

    Args:
        role: Role of all tensors.
        shares: For every parameter, which parts of those below it is made of.
        shapes: Its shape.
    """

    role: str
    shares: Shares
    shapes: Mapping[str, Shape]
    _names: list[TensorName] = field(default_factory=list, init=False, repr=False, compare=False)

    def __iter__(self) -> Iterator[TensorName]:
        if not self._names:
            first = ((param, shares[0].name) for param, shares in self.shares.items())
            self._names.extend(_with_states(self.catalog, self.role, first))
        return iter(self._names)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name, or None. Parts that are not below are missing in it, which a plan notices."""
        shares = self.shares.get(name.param) if name.role == self.role else None
        if shares is None:
            return None
        below = {
            part: self.catalog.get(TensorName(self.role, part, name.state)) for part in {s.name: None for s in shares}
        }
        chunks: list[Chunk] = []
        for share in shares:
            entry = below[share.name]
            chunks.extend(filter(None, map(share.moved, entry.chunks if entry is not None else ())))
        return TensorEntry(name, self.shapes[name.param], chunks[0].record.dtype, tuple(chunks)) if chunks else None


@dataclass(frozen=True, slots=True)
class StateOrder(View):
    """States that stand for one another.

    Args:
        order: For a state, those that are taken for it: the first one that there is. All others stand for themselves.
    """

    order: Mapping[str, tuple[str, ...]]

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name, or None."""
        for state in self.order.get(name.state, (name.state,)):
            found = self.catalog.get(TensorName(name.role, name.param, state))
            if found is not None:
                return _named(found, name)
        return None


@dataclass(frozen=True, slots=True)
class Cast(View):
    """Parameters of which another type is wanted: what is stored in that one, otherwise its fp32 copy, otherwise what there is.

    Args:
        dtype: The wanted type; None for what is stored.
    """

    dtype: DType | None

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name, or None."""
        own = self.catalog.get(name)
        if name.state != PARAM or (own is not None and self.dtype in (None, own.dtype)):
            return own
        return _named(self.catalog.get(TensorName(name.role, name.param, MASTER)), name) or own


@dataclass(frozen=True, slots=True)
class Joined:
    """Several catalogues as one; where more than one has a name, the first one's counts.

    Args:
        catalogs: All of them.
    """

    catalogs: tuple[Catalog, ...]

    def __iter__(self) -> Iterator[TensorName]:
        return iter(dict.fromkeys(name for catalog in self.catalogs for name in catalog))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name, or None."""
        return next((entry for catalog in self.catalogs if (entry := catalog.get(name)) is not None), None)


@dataclass(frozen=True, slots=True)
class Below(View):
    """Files that are named from a folder further up.

    Args:
        folder: What is put in front of every file's name, with a ``/`` at the end; may be empty.
    """

    folder: str

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name, or None."""
        entry = self.catalog.get(name)
        if entry is None or not self.folder:
            return entry
        chunks = (replace(c, record=replace(c.record, file=self.folder + c.record.file)) for c in entry.chunks)
        return replace(entry, chunks=tuple(chunks))


@dataclass(frozen=True, slots=True)
class OfStates(View):
    """Some states only.

    Args:
        states: Those.
    """

    states: Collection[str]

    def __iter__(self) -> Iterator[TensorName]:
        return (name for name in self.catalog if name.state in self.states)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name, or None."""
        return self.catalog.get(name) if name.state in self.states else None


@dataclass(frozen=True, slots=True)
class Remembered(View):
    """Entries that every rank's file asks for its part of: looked up once, forgotten when they become many.

    Args:
        most_chunks: Of all remembered entries; the default is about 100 MB.
    """

    most_chunks: int = 200_000
    _known: dict[TensorName, TensorEntry | None] = field(default_factory=dict, init=False, repr=False, compare=False)
    _chunks: list[int] = field(default_factory=lambda: [0], init=False, repr=False, compare=False)

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name, or None."""
        try:
            return self._known[name]
        except KeyError:
            entry = self.catalog.get(name)
        if self._chunks[0] > self.most_chunks:
            self._known.clear()
            self._chunks[0] = 0
        self._known[name] = entry
        self._chunks[0] += len(entry.chunks) if entry is not None else 0
        return entry


def with_rows(entry: TensorEntry, rows: int) -> TensorEntry:
    """A tensor with another number of rows: those that both sizes have are the same.

    New rows repeat the last one, which is a trained padding row where there is any: zeros would give words that do not exist a
    larger share of the softmax. Megatron's own converter does the same.

    Args:
        entry: A tensor whose dimension 0 counts words.
        rows: Wanted length of dimension 0.
    """
    have, chunks = entry.global_shape[0], entry.chunks
    if rows > have:
        chunks = (*chunks, *(_repeated(chunk, have, rows) for chunk in chunks if chunk.box.stop[0] == have))
    return TensorEntry(entry.name, (rows, *entry.global_shape[1:]), entry.dtype, chunks)


def _repeated(chunk: Chunk, have: int, rows: int) -> Chunk:
    """The last row of a chunk, repeated with stride 0 over rows ``[have, rows)``."""
    box = chunk.box
    last = chunk.narrow(Box((have - 1, *box.offset[1:]), (1, *box.shape[1:])))
    new = Box((have, *box.offset[1:]), (rows - have, *box.shape[1:]))
    return Chunk(new, last.record, last.start, (0, *last.strides[1:]))


def _named(entry: TensorEntry | None, name: TensorName) -> TensorEntry | None:
    """An entry under another name. Made for every tensor, so without ``dataclasses.replace``."""
    if entry is None or entry.name == name:
        return entry
    return TensorEntry(name, entry.global_shape, entry.dtype, entry.chunks)


def _with_states(catalog: Catalog, role: str, pairs: Iterable[tuple[str, str]]) -> Iterator[TensorName]:
    """New names, each in every state of its old one."""
    states: dict[str, list[str]] = {}
    for name in catalog:
        states.setdefault(name.param, []).append(name.state)
    return (TensorName(role, new, state) for new, old in pairs for state in states.get(old, ()))
