"""The catalogue of a native DeepSpeed checkpoint: chunks are computed from flat groups and cuts when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rlhf.core.catalog import (
    MASTER,
    PARAM,
    Box,
    Chunk,
    DType,
    Shape,
    TensorEntry,
    TensorName,
    dot,
    flat_boxes,
    row_major,
)
from mcore_rlhf.layouts.tensor import LocalLayout
from mcore_rlhf.layouts.zero import BorderGroup, Group
from mcore_rlhf.models.spec import ModelSpec
from mcore_rlhf.storage.pt import StoredTensor


@dataclass(frozen=True, slots=True)
class Partitioned:
    """A local tensor whose flattened elements lie in the parts of data-parallel ranks.

    Args:
        group: Where they lie.
        index: The tensor's number in the group.
        parts: Each rank's part.
    """

    group: Group | BorderGroup
    index: int
    parts: Mapping[int, StoredTensor]


@dataclass(slots=True)
class MpShard:
    """A model-parallel rank's tensor, or its part of one.

    Args:
        layout: Which boxes of the whole tensor the local one has.
        stored: For every state, where it lies: in one piece, or in partitions.
    """

    layout: LocalLayout
    stored: dict[str, StoredTensor | Partitioned] = field(default_factory=dict)


@dataclass(slots=True)
class DeepSpeedCatalog:
    """Lazy mapping from tensor names to where their elements lie.

    Args:
        role: Role of all its tensors.
        model: Shapes.
        shards: For each parameter, those of the ranks that have a part of it.
        states: Names of the optimizer's tensor states.
        param_from_master: Whether a parameter that is not stored is given as its master: where the optimizer was not asked
            for, but stage 3 keeps its weights there.
    """

    role: str
    model: ModelSpec
    shards: Mapping[str, Sequence[MpShard]]
    states: tuple[str, ...]
    param_from_master: bool = False

    def __iter__(self) -> Iterator[TensorName]:
        for spec in self.model.params:
            for state in self._states_of(spec.name):
                yield TensorName(self.role, spec.name, state)

    def __len__(self) -> int:
        return sum(len(self._states_of(spec.name)) for spec in self.model.params)

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """Compute one entry, or None where the checkpoint does not have it."""
        spec = self.model.get(name.param)
        if spec is None or name.role != self.role or name.state not in self._states_of(name.param):
            return None
        state = MASTER if name.state == PARAM and self._only_master(name.param) else name.state
        having = [shard for shard in self.shards[name.param] if state in shard.stored]
        by_region: dict[tuple[Box, ...], list[list[Chunk]]] = {}
        for shard in having:
            region = tuple(piece.box for piece in shard.layout.pieces)
            by_region.setdefault(region, []).append(list(chunks_of(shard.stored[state], shard.layout)))
        chunks = [chunk for found in by_region.values() for part in agreed(found) for chunk in part]
        return TensorEntry(name, spec.global_shape, _dtype_of(having[0].stored[state]), tuple(chunks))

    def _states_of(self, name: str) -> list[str]:
        found = {state for shard in self.shards[name] for state in shard.stored}
        states = [state for state in (PARAM, *self.states) if state in found]
        return [PARAM, *states] if self._only_master(name) else states

    def _only_master(self, name: str) -> bool:
        found = {state for shard in self.shards[name] for state in shard.stored} if self.param_from_master else set()
        return MASTER in found and PARAM not in found


def _dtype_of(stored: StoredTensor | Partitioned) -> DType:
    """The element type as stored."""
    first = stored if isinstance(stored, StoredTensor) else next(iter(stored.parts.values()))
    return first.record.dtype


def chunks_of(stored: StoredTensor | Partitioned, layout: LocalLayout) -> Iterator[Chunk]:
    """The chunks of the whole tensor that a local tensor contributes: the relation, for reading and for writing."""
    if isinstance(stored, Partitioned):
        yield from _partition_chunks(stored, layout)
        return
    for piece in layout.pieces:
        start = stored.start + dot(piece.offset, stored.strides)
        yield Chunk(piece.box, stored.record, start, stored.strides)


def _partition_chunks(stored: Partitioned, layout: LocalLayout) -> Iterator[Chunk]:
    strides = row_major(layout.shape)
    for rank, part in stored.parts.items():
        run = stored.group.run(stored.index, rank)
        if run is None:
            continue
        origin = part.start + run.at - run.start
        for local in flat_boxes(layout.shape, run.start, run.start + run.numel):
            for box, offset in _in_pieces(layout, local):
                yield Chunk(box, part.record, origin + dot(offset, strides), strides)


def _in_pieces(layout: LocalLayout, local: Box) -> Iterator[tuple[Box, Shape]]:
    """What a local box covers of the whole tensor, each with its offset in the local one."""
    if len(layout.pieces) == 1 and layout.pieces[0].box.shape == layout.shape and not any(layout.pieces[0].box.offset):
        yield local, local.offset  # the whole tensor
        return
    for piece in layout.pieces:
        common = local.intersect(Box(piece.offset, piece.box.shape)) if local.shape else local
        if common is not None:
            origin = tuple(a + c - b for a, b, c in zip(piece.box.offset, piece.offset, common.offset, strict=True))
            yield Box(origin, common.shape), common.offset


def agreed(copies: list[list[Chunk]]) -> list[list[Chunk]]:
    """Chunks of ranks that have the same elements, cut so that copies have equal boxes.

    A tied parameter lies elsewhere in the flat group of another pipeline stage, and is cut elsewhere.
    """
    if len({frozenset(chunk.box for chunk in found) for found in copies}) <= 1:
        return copies
    boxes = [chunk.box for chunk in copies[0]]
    for found in copies[1:]:
        boxes = [both for box in boxes for chunk in found if (both := box.intersect(chunk.box)) is not None]
    return [[chunk.narrow(box) for box in boxes for chunk in found if chunk.box.contains(box)] for found in copies]
