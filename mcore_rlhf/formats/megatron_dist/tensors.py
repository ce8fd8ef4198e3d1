"""Where the elements of every tensor of a ``torch_dist`` checkpoint lie: slices of stacked tensors, computed when asked for; and the
cells in which old releases have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

from mcore_rlhf.core.catalog import PARAM, Box, Chunk, Shape, TensorName, dot, flat_boxes, row_major
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.rows import Tensor
from mcore_rlhf.families.megatron.state import MegatronTensors
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage.dcp.folder import DcpTensor

from .buckets import FlatStates
from .names import Home


@dataclass(slots=True)
class Slices:
    """The chunks of one stacked tensor by layer and expert.

    Args:
        tensor: The stored tensor.
        shape: Whole shape of the parameters' stack: the tensor's own, but for reformulated states (see :func:`_cells`).
        axes: How many leading dimensions count layers and experts.
    """

    tensor: DcpTensor
    shape: Shape
    axes: int
    _by_index: dict[Shape, list[Box]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for box in self.tensor.boxes:
            spans = zip(box.offset[: self.axes], box.shape[: self.axes], strict=True)
            for index in product(*(range(start, start + count) for start, count in spans)):
                self._by_index.setdefault(index, []).append(box)

    def holds(self, index: Shape) -> bool:
        """Whether anything of the parameter at an index is stored."""
        return index in self._by_index

    def at(self, index: Shape) -> Iterator[Chunk]:
        """Where the parameter at an index lies, in its own coordinates."""
        for box in self._by_index.get(index, ()):
            chunk = self.tensor.folder.chunk(self.tensor, box)
            if len(box.shape) > len(self.shape):
                yield from _cells(chunk, self.tensor.global_shape, self.shape, self.axes)
                continue
            inner = Box((*index, *box.offset[self.axes :]), ((1,) * self.axes + box.shape[self.axes :]))
            yield _without_axes(chunk.narrow(inner), self.axes)


def _without_axes(chunk: Chunk, axes: int) -> Chunk:
    box = Box(chunk.box.offset[axes:], chunk.box.shape[axes:])
    return replace(chunk, box=box, strides=chunk.strides[axes:])


def _cells(chunk: Chunk, grid: Shape, shape: Shape, axes: int) -> Iterator[Chunk]:
    """Flattened ranges of local tensors: a state of shape (X, Y) that is cut into local parts (x, y) is stored as
    (X / x, Y / y, x · y), and each chunk is a range of the last dimension.

    Source: megatron-core 0.13, ``dist_checkpointing/strategies/torch.py`` (``sharded_tensor_to_torch_sharded_tensor``).
    """
    cell = tuple(whole // count for whole, count in zip(shape, grid[:-1], strict=True))
    origin = tuple(-at * n for at, n in zip(chunk.box.offset[:-1], cell, strict=True))
    first, strides = chunk.box.offset[-1], row_major(cell)
    for part in flat_boxes(cell, first, first + chunk.box.shape[-1]):
        start = chunk.start + dot(part.offset, strides) - first
        yield _without_axes(Chunk(part.shift(origin), chunk.record, start, strides), axes)


def placed(chunk: Chunk, home: Home, first: int) -> Chunk:
    """A chunk in the coordinates of the parameter, given those of what lies at its home.

    Args:
        chunk: The chunk.
        home: The parameter's home.
        first: The parameter's row at which it begins.
    """
    offset = home.turned(chunk.box.offset)
    if first:
        offset = (offset[0] + first, *offset[1:])
    return Chunk(Box(offset, home.turned(chunk.box.shape)), chunk.record, chunk.start, home.turned(chunk.strides))


@dataclass(slots=True)
class DistTensors(MegatronTensors):
    """Where the elements of every tensor lie.

    Args:
        homes: For each parameter, where it lies.
        tensors: By state and key.
        axes: For each key, how many dimensions count layers and experts.
        flat: Finds states in flat buckets; None where each has a tensor like its parameter's.
        weights: Where the weights lie, if that is elsewhere.
    """

    homes: Mapping[str, tuple[Home, ...]]
    tensors: Mapping[str, Mapping[str, DcpTensor]]
    axes: Mapping[str, int]
    flat: FlatStates | None = None
    weights: Chunks | None = None
    _slices: dict[tuple[str, str], Slices] = field(default_factory=dict)

    def tensor(self, spec: ParamSpec, name: TensorName) -> Tensor | None:
        """One of them; the ends of its items are read when somebody asks where it lies."""
        if self.weights is not None and name.state == PARAM:
            return self.weights.tensor(name)
        if self.flat is not None and name.state != PARAM:
            dtype = self.flat.dtype(name.param, name.state)
            if dtype is not None:
                return Tensor(spec.global_shape, dtype, lambda rows: rows.strips(self.flat_chunks(name)))
        for home in self.homes[name.param]:
            slices = self._slices_of(name.state, home.key)
            if slices is not None and slices.holds(home.index):
                return Tensor(spec.global_shape, slices.tensor.dtype, lambda rows: rows.strips(self._chunks(name)))
        return None

    def flat_chunks(self, name: TensorName) -> Iterator[Chunk]:
        """Where a state lies in flat buckets."""
        assert self.flat is not None
        return self.flat.chunks(name.param, name.state)

    def _chunks(self, name: TensorName) -> Iterator[Chunk]:
        first = 0
        for home in self.homes[name.param]:
            slices = self._slices_of(name.state, home.key)
            for chunk in slices.at(home.index) if slices is not None else ():
                yield placed(chunk, home, first)
            if home.part is not None:
                first += self.tensors[PARAM][home.key].global_shape[len(home.index)]

    def _slices_of(self, state: str, key: str) -> Slices | None:
        tensor = self.tensors.get(state, {}).get(key)
        if tensor is None:
            return None
        if (state, key) not in self._slices:
            whole = self.tensors[PARAM][key].global_shape
            self._slices[state, key] = Slices(tensor, whole, self.axes[key])
        return self._slices[state, key]


def even_cells(boxes: Sequence[Box], first: int, shape: Shape) -> tuple[Box, ...]:
    """The boxes that lie within some rows of a parameter, if a grid of equal cells is what they are; else the rows as a whole.

    Args:
        boxes: All of the parameter's.
        first: The first of the rows.
        shape: Of the rows.
    """
    inside = tuple(box for box in boxes if first <= box.offset[0] < first + shape[0])
    whole = Box((first, *(0,) * (len(shape) - 1)), shape)
    cell = inside[0].shape if inside else shape
    starts = (zip((box.offset[0] - first, *box.offset[1:]), cell, strict=True) for box in inside)
    even = (
        all(cell) and {box.shape for box in inside} == {cell} and not any(at % n for pairs in starts for at, n in pairs)
    )
    return inside if even and sum(box.numel for box in inside) == prod(shape) else (whole,)


def gridded(shape: Shape, cell: Shape) -> Shape:
    """The shape in which megatron-core before 0.16 stores flattened cells: how many there are along each axis, and their elements.

    Source: megatron-core 0.13.1, ``dist_checkpointing/strategies/torch.py`` (``sharded_tensor_to_torch_sharded_tensor``).

    Args:
        shape: The whole, with the axes of layers and experts before a parameter's own.
        cell: A cell of a parameter.
    """
    axes = len(shape) - len(cell)
    return (*shape[:axes], *(whole // n if n else 1 for whole, n in zip(shape[axes:], cell, strict=True)), prod(cell))
