"""The catalogue of a ``torch_dist`` checkpoint: slices of stacked tensors, computed when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from mcore_rlhf.core.box import Box, Shape, dot, flat_boxes, row_major
from mcore_rlhf.core.catalog import Chunk, TensorEntry
from mcore_rlhf.core.names import PARAM, TensorName
from mcore_rlhf.models.spec import ModelSpec
from mcore_rlhf.storage.dcp import DcpTensor

from .names import Home

FlatChunks = Callable[[str, str], Iterable[Chunk]]
"""Parameter and state → where it lies in the buckets of a distributed optimizer."""


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


def placed(chunk: Chunk, home: Home, rows: int) -> Chunk:
    """A chunk in the coordinates of the parameter, given those of what lies at its home.

    Args:
        chunk: The chunk.
        home: The parameter's home.
        rows: Rows of the parameter, for a half of it.
    """
    offset = home.turned(chunk.box.offset)
    if home.half:
        offset = (offset[0] + rows // 2, *offset[1:])
    return Chunk(Box(offset, home.turned(chunk.box.shape)), chunk.record, chunk.start, home.turned(chunk.strides))


@dataclass(slots=True)
class DistCatalog:
    """Lazy mapping from tensor names to where their elements lie.

    Args:
        role: Role of all its tensors.
        model: Shapes and partitions.
        homes: For each parameter, where it lies.
        tensors: By state and key.
        axes: For each key, how many dimensions count layers and experts.
        states: Names of the optimizer's tensor states.
        flat: Finds states in flat buckets; None where each has a tensor like its parameter's.
    """

    role: str
    model: ModelSpec
    homes: Mapping[str, tuple[Home, ...]]
    tensors: Mapping[str, Mapping[str, DcpTensor]]
    axes: Mapping[str, int]
    states: tuple[str, ...]
    flat: FlatChunks | None = None
    _slices: dict[tuple[str, str], Slices] = field(default_factory=dict)

    def __iter__(self) -> Iterator[TensorName]:
        for param in self.model.params:
            yield TensorName(self.role, param.name, PARAM)
            if param.trainable:
                for state in self.states:
                    yield TensorName(self.role, param.name, state)

    def __len__(self) -> int:
        return sum(1 + (len(self.states) if param.trainable else 0) for param in self.model.params)

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """Compute one entry, or None where the checkpoint does not have it."""
        spec = self.model.get(name.param)
        if spec is None or name.role != self.role or name.state not in (PARAM, *self.states):
            return None
        if self.flat is not None and name.state != PARAM:
            chunks = tuple(self.flat(name.param, name.state)) if spec.trainable else ()
        else:
            chunks = tuple(self._chunks(name, spec.global_shape))
        return TensorEntry(name, spec.global_shape, chunks[0].record.dtype, chunks) if chunks else None

    def _chunks(self, name: TensorName, shape: Shape) -> Iterator[Chunk]:
        for home in self.homes[name.param]:
            slices = self._slices_of(name.state, home.key)
            for chunk in slices.at(home.index) if slices is not None else ():
                yield placed(chunk, home, shape[0] if shape else 0)

    def _slices_of(self, state: str, key: str) -> Slices | None:
        tensor = self.tensors.get(state, {}).get(key)
        if tensor is None:
            return None
        if (state, key) not in self._slices:
            whole = self.tensors[PARAM][key].global_shape
            self._slices[state, key] = Slices(tensor, whole, self.axes[key])
        return self._slices[state, key]
