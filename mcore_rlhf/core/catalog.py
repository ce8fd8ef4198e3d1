"""The words of the one idea, as pure values: boxes, element types, records, chunks and entries; :mod:`.chunks` is the table of them.

A box is a half-open rectangle of a tensor, counted in elements; a plan needs no more of an element type than how wide it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from mcore_rlhf.suggestions import did_you_mean

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Box:
    """The half-open region ``[offset, offset + shape)`` of a tensor, or every so-many-th element from ``offset`` on.

    Args:
        offset: First element in every dimension.
        shape: Number of elements in every dimension; as long as ``offset``.
        step: From one element to the next in every dimension: 2 for gate and up that lie in turn. None where all of them
            are 1. Boxes with steps meet boxes without, or with the same steps.
    """

    offset: Shape
    shape: Shape
    step: Shape | None = None

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        """The box that covers a tensor of that shape."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return prod(self.shape)

    @property
    def stop(self) -> Shape:
        """One past the last element in every dimension."""
        if self.step is not None:
            each = zip(self.offset, self.shape, self.step, strict=True)
            return tuple(start + (count - 1) * step + 1 if count else start for start, count, step in each)
        return tuple(start + count for start, count in zip(self.offset, self.shape, strict=True))

    @property
    def steps(self) -> Shape:
        """From one element to the next in every dimension."""
        return (1,) * len(self.shape) if self.step is None else self.step

    def intersect(self, other: Box) -> Box | None:
        """The region that both boxes cover, or None where they do not meet. Empty boxes meet nothing."""
        if self is other or self == other:
            return self if all(self.shape) else None
        if self.step is not None or other.step is not None:
            return self._meet(other)
        start = tuple(map(max, self.offset, other.offset))
        shape = tuple(
            min(a + n, b + m) - s
            for a, n, b, m, s in zip(self.offset, self.shape, other.offset, other.shape, start, strict=True)
        )
        return Box(start, shape) if all(count > 0 for count in shape) else None

    def _meet(self, other: Box) -> Box | None:
        """The same, where one of them has steps, or both have the same."""
        step = tuple(map(max, self.steps, other.steps))
        if any({a, b} != {1, most} and a != b for a, b, most in zip(self.steps, other.steps, step, strict=True)):
            raise ValueError(f"{self} and {other}: their steps are neither equal nor 1")
        start, shape = [], []
        for dim, by in enumerate(step):
            stepped = self if self.steps[dim] == by else other
            first = stepped.offset[dim]
            if by == self.steps[dim] == other.steps[dim] and (self.offset[dim] - other.offset[dim]) % by:
                return None
            begin = max(self.offset[dim], other.offset[dim])
            begin += (first - begin) % by
            start.append(begin)
            shape.append(-(-(min(self.stop[dim], other.stop[dim]) - begin) // by))
        return Box(tuple(start), tuple(shape), step) if all(count > 0 for count in shape) else None

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` lies in this box."""
        if self.step is not None or other.step is not None:
            met = self._meet(other)
            return not other.numel or (met is not None and met.numel == other.numel)
        return all(
            a <= b and b + m <= a + n
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )

    def shift(self, origin: Shape) -> Box:
        """The same region in coordinates whose zero is at ``origin``."""
        return Box(tuple(a - o for a, o in zip(self.offset, origin, strict=True)), self.shape, self.step)

    def __str__(self) -> str:
        each = zip(self.offset, self.stop, self.steps, strict=True)
        return "[" + ", ".join(f"{a}:{b}" if by == 1 else f"{a}:{b}:{by}" for a, b, by in each) + "]"


def row_major(shape: Shape) -> Shape:
    """Strides in elements of a contiguous tensor of that shape."""
    strides, step = [], 1
    for count in reversed(shape):
        strides.append(step)
        step *= count
    return tuple(reversed(strides))


def dot(index: Shape, strides: Shape) -> int:
    """Element offset of ``index`` in a view with those strides."""
    return sum([i * s for i, s in zip(index, strides, strict=True)])


def flat_boxes(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Cover elements ``[start, stop)`` of a row-major tensor, in order, with at most ``2 * ndim - 1`` boxes.

    A ZeRO partition or a distributed-optimizer shard is such a flat range of a parameter.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield Box((start,) * len(shape), (stop - start,) * len(shape))
        return
    inner = prod(shape[1:])
    first_whole, end_whole = -(-start // inner), stop // inner
    if first_whole > end_whole:  # the range lies inside one row
        yield from _in_row(shape, start // inner, start % inner, stop - start // inner * inner)
        return
    if start < first_whole * inner:
        yield from _in_row(shape, first_whole - 1, start - (first_whole - 1) * inner, inner)
    if first_whole < end_whole:
        yield Box((first_whole, *(0,) * (len(shape) - 1)), (end_whole - first_whole, *shape[1:]))
    if end_whole * inner < stop:
        yield from _in_row(shape, end_whole, 0, stop - end_whole * inner)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[Box]:
    for box in flat_boxes(shape[1:], start, stop):
        yield Box((row, *box.offset), (1, *box.shape))


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Args:
        name: torch's name without the ``torch.`` prefix, for example ``bfloat16``.
        itemsize: Bytes per element.
    """

    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


_ITEMSIZES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip
_BY_NAME = {name: DType(name, itemsize) for name, itemsize in _ITEMSIZES.items()}
_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
}

BFLOAT16 = _BY_NAME["bfloat16"]
FLOAT16 = _BY_NAME["float16"]
FLOAT32 = _BY_NAME["float32"]
UINT8 = _BY_NAME["uint8"]
FLOATING = frozenset(dtype for dtype in _BY_NAME.values() if "float" in dtype.name)


def dtype_of(name: object) -> DType:
    """The element type of that name; ``torch.bfloat16``, ``"torch.bfloat16"``, ``"bfloat16"``, ``"BF16"`` and ``"bf16"`` are one.

    Raises:
        ValueError: The name is not known.
    """
    text = str(name).lower().removeprefix("torch.")
    try:
        return _BY_NAME[_ALIASES.get(text, text)]
    except KeyError:
        known = sorted(_BY_NAME)
        hint = did_you_mean(text, [*known, *_ALIASES]) or f"; known: {', '.join(known)}"
        raise ValueError(f"unknown dtype {str(name)!r}{hint}") from None


PARAM = "param"
MASTER = "master"
EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"
ADAMS = (MASTER, EXP_AVG, EXP_AVG_SQ)
"""What Adam keeps of each parameter in mixed precision, in the usual order."""


class TensorName(NamedTuple):
    """The identity of a logical tensor, equal in every format that keeps the same names.

    Args:
        role: Whose model it is: ``actor``, ``critic``, ``reward``, ``reference``.
        param: The parameter's global name; layer and expert numbers are global.
        state: ``param`` (the weight as the model computes with it), ``master`` (its fp32 copy), or the name of an
            optimizer state such as ``exp_avg``.
    """

    role: str
    param: str
    state: str = PARAM

    def __str__(self) -> str:
        return f"{self.role}/{self.param} ({self.state})"


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
        if box is self.box or box == self.box:
            return self
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
