"""The catalogue: for every logical tensor, which stored elements hold which part of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

from .box import Box, Shape, dot, row_major
from .dtype import DType
from .names import TensorName


@dataclass(frozen=True, slots=True)
class Record:
    """One run of stored elements: a storage inside a ``.pt``, an entry of a safetensors file, a range of a blob.

    Args:
        file: Path relative to the checkpoint's root, with ``/``.
        key: What the container calls the record, for messages and for its stored checksum; ``data/0`` in a ``.pt``.
        dtype: Element type.
        numel: Number of elements.
        byte_offset: Where the first element lies in the file, in bytes.
        computed: Whether its elements are stored nowhere, but computed when they are looked at; see :mod:`.lowrank`.
    """

    file: str
    key: str
    dtype: DType
    numel: int
    byte_offset: int
    computed: bool = False

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Chunk:
    """Says that ``box`` of a logical tensor lies in ``record``, at element ``start``, with ``strides`` elements.

    A stride of 0 repeats one stored element along that dimension (new padding rows of a vocabulary).
    """

    box: Box
    record: Record
    start: int
    strides: Shape

    @classmethod
    def whole(cls, record: Record, shape: Shape) -> Chunk:
        """A tensor that lies in a record whole, row by row from its start."""
        return cls(Box.whole(shape), record, 0, row_major(shape))

    def narrow(self, box: Box) -> Chunk:
        """The part of this chunk that holds ``box``, which must lie inside it."""
        if self.box.step is not None or box.step is not None:
            return self._stepped(box)
        step = dot(tuple(b - a for a, b in zip(self.box.offset, box.offset, strict=True)), self.strides)
        return Chunk(box, self.record, self.start + step, self.strides)

    def _stepped(self, box: Box) -> Chunk:
        """The same, where one of the boxes has steps; strides are from one of the box's elements to the next."""
        if not self.box.contains(box):
            raise ValueError(f"{box} does not lie in {self.box}")
        way = tuple((b - a) // by for a, b, by in zip(self.box.offset, box.offset, self.box.steps, strict=True))
        each = zip(self.strides, box.steps, self.box.steps, strict=True)
        strides = tuple(stride * wanted // own for stride, wanted, own in each)
        return Chunk(box, self.record, self.start + dot(way, self.strides), strides)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A logical tensor and where it lies.

    Args:
        name: Its identity.
        global_shape: Shape of the whole tensor, before any sharding.
        dtype: Element type as stored.
        chunks: Where its elements lie. Replicas appear as chunks of equal boxes, the preferred one first.
    """

    name: TensorName
    global_shape: Shape
    dtype: DType
    chunks: tuple[Chunk, ...]

    def primary(self) -> tuple[Chunk, ...]:
        """One chunk for every distinct box: the first replica of each."""
        first: dict[Box, Chunk] = {}
        for chunk in self.chunks:
            first.setdefault(chunk.box, chunk)
        return tuple(first.values())

    def replicas(self) -> Iterator[tuple[Chunk, Chunk]]:
        """Pairs of chunks that must hold equal elements: (first replica, another replica of the same box)."""
        first: dict[Box, Chunk] = {}
        for chunk in self.chunks:
            kept = first.setdefault(chunk.box, chunk)
            if kept is not chunk:
                yield kept, chunk


class Catalog(Protocol):
    """A lazy mapping from names to entries: iterating costs no chunks, looking up computes those of one tensor."""

    def __iter__(self) -> Iterator[TensorName]: ...

    def __len__(self) -> int: ...

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name, or None."""
        ...


@dataclass(frozen=True, slots=True)
class FixedCatalog:
    """A catalogue whose entries are already there."""

    entries: Mapping[TensorName, TensorEntry]

    def __iter__(self) -> Iterator[TensorName]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name, or None."""
        return self.entries.get(name)


@dataclass(slots=True)
class Traced:
    """An opened source's catalogue, which remembers what was planned of it: all views of it end here.

    The last entry is kept, since parts of one stored tensor (experts that are packed in it) are asked for in turn.

    Args:
        catalog: The format's own.
    """

    catalog: Catalog
    _planned: dict[str, int] = field(default_factory=dict)
    _states: dict[str, int] = field(default_factory=dict)
    _wanted: set[str] = field(default_factory=set)
    _missing: int = 0
    _planning: bool = False
    _last: TensorEntry | None = None

    def __iter__(self) -> Iterator[TensorName]:
        return iter(self.catalog)

    def __len__(self) -> int:
        return len(self.catalog)

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name, or None."""
        found = self._last
        if found is None or found.name != name:
            found = self._last = self.catalog.get(name)
        if self._planning and found is not None:
            bit = self._states.setdefault(name.state, 1 << len(self._states))
            known = self._planned.get(name.param, 0)
            self._planned[name.param] = known | bit
            self._missing += 0 if known else prod(found.global_shape)
        return found

    def plan(self, holds: Iterable[TensorEntry]) -> None:
        """Note the tensors that a target file holds parts of, under the target's names."""
        for want in holds:
            if want.name.param not in self._wanted:
                self._wanted.add(want.name.param)
                self._missing -= prod(want.global_shape)

    @property
    def complete(self) -> bool:
        """Whether the tensors that are written have as many elements as those that they are made of, or more.

        A state has the shape of its parameter, and is cut and padded with it: each parameter counts once.
        """
        return self._missing <= 0

    def __enter__(self) -> None:
        self._planning = True

    def __exit__(self, *_: object) -> None:
        self._planning = False

    def unplanned(self) -> dict[str, list[str]]:
        """By state the parameters of which no plan was made; every state is there."""
        found: dict[str, list[str]] = {}
        for name in self.catalog:
            missing = found.setdefault(name.state, [])
            if not self._planned.get(name.param, 0) & self._states.get(name.state, 0):
                missing.append(name.param)
        return found
