"""The catalogue: for every logical tensor, which stored elements hold which part of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from .box import Box, Shape, dot
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

    def narrow(self, box: Box) -> Chunk:
        """The part of this chunk that holds ``box``, which must lie inside it."""
        step = dot(tuple(b - a for a, b in zip(self.box.offset, box.offset, strict=True)), self.strides)
        return Chunk(box, self.record, self.start + step, self.strides)


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
