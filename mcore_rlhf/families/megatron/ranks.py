"""What each rank of a Megatron checkpoint holds: its keys, its tensors, and the records they lie in.

Ranks of a pipeline stage with the same experts have everything in common but which part of a tensor is theirs: names, sizes, the order
in flat buffers. That is a :class:`Stage`, worked out once for all of them; a :class:`RankLayout` adds the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from mcore_rlhf.core.catalog import FLOAT32, MASTER, PARAM, DType, Record, Shape, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.rows import Rows, Strip
from mcore_rlhf.errors import CheckpointError, Problems
from mcore_rlhf.layouts.tensor import LocalLayout, local_layout
from mcore_rlhf.models.megatron import is_buffer, is_routed_expert, renumbered
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage.pt import StoredTensor

from .arguments import DISTRIBUTED, PLAIN
from .folders import FileRank
from .groups import ChainedOptimizer, LocalParam, members
from .layout import Blueprint, LocalBuffer, ModelKey, buffers, is_shared_embedding


class LocalItem(NamedTuple):
    """One key of a rank's state dict.

    Args:
        key: Name with local layer and expert numbers.
        item: What it is globally.
        vpp_rank: Its model chunk.
        spec: Its parameter with the target's shape and dtype, or None for an opaque value.
        layout: The part that the rank holds.
    """

    key: str
    item: ModelKey
    vpp_rank: int
    spec: ParamSpec | None = None
    layout: LocalLayout | None = None


@dataclass(slots=True)
class Records:
    """The records of one file, and the parts of tensors that lie in them."""

    file: str
    records: list[Record] = field(default_factory=list)
    _placed: list[tuple[Sequence[TensorName], Sequence[LocalItem], Record, Sequence[int]]] = field(default_factory=list)

    def new(self, dtype: DType, numel: int) -> Record:
        """A further record."""
        record = Record(self.file, f"data/{len(self.records)}", dtype, numel, 0)
        self.records.append(record)
        return record

    def place(
        self, names: Sequence[TensorName], items: Sequence[LocalItem], record: Record, starts: Sequence[int]
    ) -> None:
        """Say that contiguous local tensors lie in a record.

        Args:
            names: Those of the tensors that they are parts of.
            items: The parameters of which they are the values, or states.
            record: The record.
            starts: Where each begins in it.
        """
        self._placed.append((names, items, record, starts))

    def holds(self) -> Chunks:
        """All that was placed, as a table."""
        found = Chunks()
        for names, items, record, starts in self._placed:
            shapes = [item.spec.global_shape for item in items if item.spec is not None]
            cuts = [item.layout.cut for item in items if item.layout is not None]
            found.place(names, shapes, cuts, record, starts)
        return found


@dataclass(slots=True)
class StageBuffer:
    """One flat buffer, as it is on all ranks of a stage.

    Args:
        buffer: The buffer.
        items: Numbers of the stage's keys that lie in it, in its order.
        starts: Where each begins in memory.
        file_starts: The same in ``distrib_optim.pt``.
        names: By state, what is there.
    """

    buffer: LocalBuffer
    items: Sequence[int]
    starts: Sequence[int]
    file_starts: Sequence[int]
    names: Mapping[str, Sequence[TensorName]]


class _Key(NamedTuple):
    """A key of a stage: see :class:`LocalItem`; with the number of its kind, which says how it is cut."""

    key: str
    item: ModelKey
    vpp_rank: int
    kind: int = -1


class _CutKind(NamedTuple):
    """How a parameter is cut: layers and experts have theirs in common."""

    spec: ParamSpec
    expert: bool


class Stage:
    """What ranks of a pipeline stage with the same experts have in common.

    Args:
        blueprint: The whole new checkpoint.
        at: One of those ranks.
    """

    def __init__(self, blueprint: Blueprint, at: FileRank) -> None:
        self.blueprint, self.at = blueprint, at
        self.kinds: list[_CutKind] = []
        self.keys = list(self._keys())
        self.chained: tuple[ChainedOptimizer, ...] = members(blueprint.args, blueprint.choices.parallel)
        shapes = [layout.shape for layout in self.layouts(at)]
        self.shapes: Sequence[Shape | None] = [None if key.kind < 0 else shapes[key.kind] for key in self.keys]
        self.trained = list(self._trained())
        flat = blueprint.choices.optimizer == DISTRIBUTED
        self.buffers = [list(self._buffers(member)) for member in self.chained] if flat else []

    def _keys(self) -> Iterator[_Key]:
        blueprint, numbers = self.blueprint, dict[tuple[int, Shape, bool], int]()
        per_rank = blueprint.model.num_experts // blueprint.choices.parallel.ep
        experts = range(self.at.ep_rank * per_rank, (self.at.ep_rank + 1) * per_rank)
        for chunk in blueprint.chunks:
            for item in blueprint.items_of(chunk, experts) if chunk.pp_rank == self.at.pp_rank else ():
                key = renumbered(item.name, -chunk.first_layer, 0 if item.expert is None else -experts.start)
                kind = -1
                if item.spec is not None:
                    expert = is_routed_expert(item.name)
                    how = id(item.spec.partition), item.spec.global_shape, expert
                    kind = numbers.setdefault(how, len(numbers))
                    self.kinds += [_CutKind(item.spec, expert)] if kind == len(self.kinds) else []
                yield _Key(key, item, chunk.vpp_rank, kind)

    def layouts(self, at: FileRank) -> list[LocalLayout]:
        """For every kind of parameter the part that a rank has.

        Raises:
            LayoutMismatch: Some cannot be cut so; all problems together.
        """
        found, problems, parallel = list[LocalLayout](), Problems(), self.blueprint.choices.parallel
        for number, (spec, expert) in enumerate(self.kinds):
            try:
                found.append(
                    local_layout(spec.partition, spec.global_shape, at.split(parallel, expert), at.stack(parallel))
                )
            except CheckpointError as error:
                for key in self.keys:
                    if key.kind == number:
                        problems.add(type(error), f"{key.item.name}: {error}")
        problems.raise_if_any()
        return found

    def _trained(self) -> Iterator[LocalParam]:
        blueprint, parallel = self.blueprint, self.blueprint.choices.parallel
        chunks = {(chunk.pp_rank, chunk.vpp_rank): chunk for chunk in blueprint.chunks}
        for (_, item, vpp_rank, _), shape in zip(self.keys, self.shapes, strict=True):
            if item.spec is not None and shape is not None and item.spec.trainable:
                chunk = chunks[self.at.pp_rank, vpp_rank]
                shared = is_shared_embedding(
                    item.name, chunk, parallel.pp, blueprint.model.tied, has_mtp=blueprint.has_mtp
                )
                yield LocalParam(item.name, vpp_rank, shape, item.spec.dtype, shared)

    def _buffers(self, member: ChainedOptimizer) -> Iterator[StageBuffer]:
        blueprint = self.blueprint
        numbers = {(key.vpp_rank, key.item.name): number for number, key in enumerate(self.keys)}
        numel = sum(
            prod(shape)
            for key, shape in zip(self.keys, self.shapes, strict=True)
            if shape is not None and not is_buffer(key.item.name)
        )
        for buffer in buffers(self.trained, member, blueprint.args, blueprint.choices.parallel, self.at, numel):
            places = buffer.flat.places
            inside = [numbers[buffer.vpp_rank, place.name] for place in places]
            names = {
                state: [TensorName(blueprint.role, self.keys[number].item.stored_as, state) for number in inside]
                for state in (PARAM, MASTER, *blueprint.moments)
            }
            starts, file_starts = [place.buffer_start for place in places], [place.file_start for place in places]
            yield StageBuffer(buffer, inside, starts, file_starts, names)


_KEPT_STAGES = 4
"""As many as threads write at a time, about: files are laid out stage after stage."""


def stage_of(blueprint: Blueprint, at: FileRank) -> Stage:
    """The stage of a rank, which its other ranks ask for as well."""
    kept, place = blueprint.stages, (at.pp_rank, at.ep_rank)
    found = kept.get(place)
    if not isinstance(found, Stage):
        if len(kept) >= _KEPT_STAGES:
            kept.clear()
        found = kept[place] = Stage(blueprint, at)
    return found


@dataclass(slots=True)
class RankLayout:
    """Lays out the files of one rank.

    Args:
        blueprint: The whole new checkpoint.
        at: The rank.
        folder: Folder of the iteration, relative to the root.
    """

    blueprint: Blueprint
    at: FileRank
    folder: str
    items: list[LocalItem] = field(default_factory=list)
    model: Records = field(init=False)
    distrib: Records = field(init=False)
    params: dict[tuple[int, str], StoredTensor] = field(default_factory=dict)
    states: dict[tuple[int, str], dict[str, StoredTensor]] = field(default_factory=dict)
    buffer_states: dict[tuple[int, int], dict[str, StoredTensor]] = field(default_factory=dict)
    local_buffers: dict[int, list[LocalBuffer]] = field(default_factory=dict)
    stage: Stage = field(init=False)

    def __post_init__(self) -> None:
        self.stage = stage_of(self.blueprint, self.at)
        self.model = Records(f"{self.folder}/{self.at.folder}/model_optim_rng.pt")
        self.distrib = Records(f"{self.folder}/{self.at.folder}/distrib_optim.pt")
        layouts = self.stage.layouts(self.at)
        self.items = [
            LocalItem(key, item, vpp_rank, item.spec, None if kind < 0 else layouts[kind])
            for key, item, vpp_rank, kind in self.stage.keys
        ]
        for number, inside in enumerate(self.stage.buffers):
            self.local_buffers[number] = [one.buffer for one in inside]
            for index, buffer in enumerate(inside):
                self._place_buffer(number, index, buffer)
        self._place_alone()
        if self.blueprint.choices.optimizer == PLAIN:
            self.place_whole_states(self.model, self.trained())

    @property
    def chained(self) -> tuple[ChainedOptimizer, ...]:
        """The chained optimizers of every rank."""
        return self.stage.chained

    def trained(self) -> list[LocalParam]:
        """The rank's trainable parameters in registration order."""
        return self.stage.trained

    def holds_member(self, member: ChainedOptimizer) -> bool:
        """Whether this rank's ``distrib_optim.pt`` has the state of a chained optimizer."""
        return self.at.holds_expert_optimizer if member.expert else self.at.holds_dense_optimizer

    def _place_buffer(self, member: int, index: int, placed: StageBuffer) -> None:
        """Parameters of a distributed optimizer are views of one flat storage per buffer, as Megatron writes them."""
        items, flat = [self.items[number] for number in placed.items], placed.buffer.flat
        record = self.model.new(placed.buffer.dtype, flat.numel)
        self._place_params(placed.names[PARAM], items, record, placed.starts)
        for state in (MASTER, *self.blueprint.moments) if self.holds_member(self.chained[member]) else ():
            numel = flat.numel_unpadded
            record = self.distrib.new(self.blueprint.state_dtypes.get(state, FLOAT32), numel)
            self.buffer_states.setdefault((member, index), {})[state] = StoredTensor(record, 0, (numel,), (1,))
            self.distrib.place(placed.names[state], items, record, placed.file_starts)

    def _place_params(
        self, names: Sequence[TensorName], items: Sequence[LocalItem], record: Record, starts: Sequence[int]
    ) -> None:
        self.model.place(names, items, record, starts)
        for item, start in zip(items, starts, strict=True):
            self.params[item.vpp_rank, item.key] = _stored(item, record, start)

    def _place_alone(self) -> None:
        """Everything that is in no buffer has a storage of its own."""
        for item in self.items:
            if item.spec is not None and item.layout is not None and (item.vpp_rank, item.key) not in self.params:
                record = self.model.new(item.spec.dtype, prod(item.layout.shape))
                self._place_params([self._name(item, PARAM)], [item], record, [0])

    def place_whole_states(self, records: Records, params: Iterable[LocalParam]) -> None:
        """Give parameters their states, each of them whole, in one of the rank's files."""
        by_key = {(item.vpp_rank, item.item.name): item for item in self.items}
        for param in params:
            item = by_key[param.vpp_rank, param.name]
            masters = [MASTER] if param.dtype != FLOAT32 else []
            for state in (*masters, *self.blueprint.moments_of(item.item.stored_as)):
                record = records.new(self.blueprint.state_dtypes.get(state, FLOAT32), param.numel)
                records.place([self._name(item, state)], [item], record, [0])
                self.states.setdefault((param.vpp_rank, param.name), {})[state] = _stored(item, record, 0)

    def _name(self, item: LocalItem, state: str) -> TensorName:
        return TensorName(self.blueprint.role, item.item.stored_as, state)


def _stored(item: LocalItem, record: Record, start: int) -> StoredTensor:
    assert item.layout is not None  # it is a parameter
    return StoredTensor(record, start, item.layout.shape, item.layout.strides)


def local_run(stored: StoredTensor, layout: LocalLayout, rows: Rows) -> Strip:
    """The chunks that a rank's local tensor contributes.

    Args:
        stored: Where it lies.
        layout: What it is of the whole one.
        rows: Where they are laid.
    """
    cut = layout.cut
    if layout.view == stored.shape and stored.strides != cut.strides:
        cut = layout.cut_of(stored.strides)
    return Strip(rows.forms_of(cut), stored.record, [stored.start + at for at in cut.starts])
