"""The catalogue of a native DeepSpeed checkpoint: chunks are computed from flat groups and cuts when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rlhf.core.box import Box, Shape, dot, flat_boxes, row_major
from mcore_rlhf.core.catalog import Chunk, TensorEntry
from mcore_rlhf.core.dtype import DType
from mcore_rlhf.core.names import MASTER, PARAM, TensorName
from mcore_rlhf.layouts.tensor import LocalLayout
from mcore_rlhf.layouts.zero import BorderGroup, Group
from mcore_rlhf.models.spec import ModelSpec
from mcore_rlhf.storage.ptfile import StoredTensor


@dataclass(frozen=True, slots=True)
class Cut:
    """A local tensor whose flattened elements lie in the parts of data-parallel ranks.

    Args:
        group: Where they lie.
        index: The tensor's number in the group.
        parts: Each rank's part.
    """

    group: Group | BorderGroup
    index: int
    parts: Mapping[int, StoredTensor]


Place = StoredTensor | Cut
"""Where a local tensor lies: in one piece, or cut."""


@dataclass(slots=True)
class Holder:
    """A model-parallel rank that holds a tensor, or its part of it.

    Args:
        layout: Which boxes of the whole tensor the local one has.
        places: For every state, where it lies.
    """

    layout: LocalLayout
    places: dict[str, Place] = field(default_factory=dict)


@dataclass(slots=True)
class DeepSpeedCatalog:
    """Lazy mapping from tensor names to where their elements lie.

    Args:
        role: Role of all its tensors.
        model: Shapes.
        holders: For each parameter, the ranks that hold a part of it.
        states: Names of the optimizer's tensor states.
        param_from_master: Whether a parameter that is not stored is given as its master: where the optimizer was not asked
            for, but stage 3 keeps its weights there.
    """

    role: str
    model: ModelSpec
    holders: Mapping[str, Sequence[Holder]]
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
        holders = self.holders[name.param]
        state = MASTER if name.state == PARAM and self._only_master(name.param) else name.state
        having = [holder for holder in holders if state in holder.places]
        by_region: dict[tuple[Box, ...], list[list[Chunk]]] = {}
        for holder in having:
            region = tuple(piece.box for piece in holder.layout.pieces)
            by_region.setdefault(region, []).append(list(place_chunks(holder.places[state], holder.layout)))
        chunks = [chunk for found in by_region.values() for part in agreed(found) for chunk in part]
        return TensorEntry(name, spec.global_shape, place_dtype(having[0].places[state]), tuple(chunks))

    def _states_of(self, name: str) -> list[str]:
        found = {state for holder in self.holders[name] for state in holder.places}
        states = [state for state in (PARAM, *self.states) if state in found]
        return [PARAM, *states] if self._only_master(name) else states

    def _only_master(self, name: str) -> bool:
        places = [holder.places for holder in self.holders[name]]
        return self.param_from_master and not any(PARAM in p for p in places) and any(MASTER in p for p in places)


def place_dtype(place: Place) -> DType:
    """The element type as stored."""
    stored = place if isinstance(place, StoredTensor) else next(iter(place.parts.values()))
    return stored.record.dtype


def place_chunks(place: Place, layout: LocalLayout) -> Iterator[Chunk]:
    """The chunks of the whole tensor that a local tensor contributes: the relation, for reading and for writing."""
    if isinstance(place, Cut):
        yield from _cut_chunks(place, layout)
        return
    for piece in layout.pieces:
        start = place.start + dot(piece.offset, place.strides)
        yield Chunk(piece.box, place.record, start, place.strides)


def _cut_chunks(cut: Cut, layout: LocalLayout) -> Iterator[Chunk]:
    strides = row_major(layout.shape)
    for rank, part in cut.parts.items():
        run = cut.group.run(cut.index, rank)
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


def agreed(holders: list[list[Chunk]]) -> list[list[Chunk]]:
    """Chunks of holders of the same elements, cut so that copies have equal boxes.

    A tied parameter lies elsewhere in the flat group of another pipeline stage, and is cut elsewhere.
    """
    if len({frozenset(chunk.box for chunk in found) for found in holders}) <= 1:
        return holders
    boxes = [chunk.box for chunk in holders[0]]
    for found in holders[1:]:
        boxes = [both for box in boxes for chunk in found if (both := box.intersect(chunk.box)) is not None]
    return [[chunk.narrow(box) for box in boxes for chunk in found if chunk.box.contains(box)] for found in holders]
