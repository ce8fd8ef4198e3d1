"""What each rank of a Megatron checkpoint holds: its keys, its tensors, and the records they lie in.

Ranks of a pipeline stage have nearly everything in common: local names, sizes, the order in flat buffers. That is a :class:`RankPattern`,
worked out once for all of them, whichever experts they have; a :class:`Stage` says which experts those are, and a :class:`RankLayout`
which part of every tensor is the rank's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

from mcore_rlhf.core.catalog import FLOAT32, MASTER, PARAM, DType, Record, Shape, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.rows import Cut, RowBlock
from mcore_rlhf.errors import CheckpointError, Problems
from mcore_rlhf.layouts.tensor import LocalLayout, local_layout
from mcore_rlhf.models.megatron import is_buffer, is_routed_expert, renumbered
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage.stored import StoredTensor

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
    _placed: list[tuple[Sequence[TensorName], RowBlock, Record]] = field(default_factory=list)

    def new(self, dtype: DType, numel: int) -> Record:
        """A further record."""
        record = Record(self.file, f"data/{len(self.records)}", dtype, numel, 0)
        self.records.append(record)
        return record

    def place(self, names: Sequence[TensorName], block: RowBlock, record: Record) -> None:
        """Say that contiguous local tensors lie in a record; see :meth:`.chunks.Chunks.place`."""
        self._placed.append((names, block, record))

    def holds(self) -> Chunks:
        """All that was placed, as a table."""
        found = Chunks()
        for placed in self._placed:
            found.place(*placed)
        return found


class LocalKey(NamedTuple):
    """A key of a rank, as ranks with other experts have it too.

    Args:
        key: See :class:`LocalItem`.
        vpp_rank: Its model chunk.
        kind: The number of its kind; -1 of an opaque value.
    """

    key: str
    vpp_rank: int
    kind: int


class _CutKind(NamedTuple):
    """What parameters have in common that are cut and trained alike, as those of layers and experts are."""

    spec: ParamSpec
    expert: bool


@dataclass(slots=True)
class StageBuffer:
    """One flat buffer, as it is on all ranks of a stage with the same experts.

    Args:
        pattern: The buffer; experts in it may have the names of others.
        role: Role of its tensors.
        numbers: Of the stage's keys, those that lie in it, in its order.
        items: What they are.
        shapes: Of the whole tensors.
    """

    pattern: LocalBuffer
    role: str
    numbers: Sequence[int]
    items: Sequence[ModelKey]
    shapes: Sequence[Shape]
    _names: dict[str, Sequence[TensorName]] = field(default_factory=dict)

    def of(self, keys: Sequence[ModelKey]) -> StageBuffer:
        """The same buffer on ranks whose keys are others, all of them."""
        if all(item.expert is None for item in self.items):
            return self
        return replace(self, items=[keys[number] for number in self.numbers], _names={})

    def names(self, state: str) -> Sequence[TensorName]:
        """What lies there of a state."""
        found = self._names.get(state)
        if found is None:
            found = self._names[state] = [TensorName(self.role, item.stored_as, state) for item in self.items]
        return found

    def local(self) -> LocalBuffer:
        """The buffer."""
        flat, names = self.pattern.flat, (item.name for item in self.items)
        places = tuple(replace(place, name=name) for place, name in zip(flat.places, names, strict=True))
        return replace(self.pattern, flat=replace(flat, places=places))


class RankCut(NamedTuple):
    """What ranks have that are at the same place on the axes that cut tensors.

    Args:
        layouts: By kind of parameter, the part that each rank has.
        blocks: By chained optimizer and buffer, what lies in it: in memory, and in ``distrib_optim.pt``.
    """

    layouts: Mapping[int, LocalLayout]
    blocks: Sequence[Sequence[tuple[RowBlock, RowBlock]]]


class RankPattern:
    """How ranks of a pipeline stage are laid out, whichever experts they have.

    Args:
        blueprint: The whole new checkpoint.
        at: One of those ranks.
        keys: Its keys.
        items: What they are; on other ranks those of experts are of others.
        kinds: The kinds of parameters of the stage.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        at: FileRank,
        keys: Sequence[LocalKey],
        items: Sequence[ModelKey],
        kinds: Sequence[_CutKind],
    ) -> None:
        self.blueprint, self.at, self.keys, self.items = blueprint, at, keys, items
        self.chained: tuple[ChainedOptimizer, ...] = members(
            blueprint.args, blueprint.choices.parallel, blueprint.model.params
        )
        self.kinds = {kind: kinds[kind] for _, _, kind in keys if kind >= 0}
        self._stacked = any(kind.spec.partition.stacked is not None for kind in self.kinds.values())
        layouts = self._layouts(at, items)
        self.shapes = {number: layouts[key.kind].shape for number, key in enumerate(keys) if key.kind >= 0}
        self.trained = dict(self._trained())
        flat = blueprint.choices.optimizer == DISTRIBUTED
        self.buffers = [list(self._buffers(member)) for member in self.chained] if flat else []
        buffered = {number for inside in self.buffers for buffer in inside for number in buffer.numbers}
        self.alone = [number for number in self.shapes if number not in buffered]
        self._parts: dict[tuple[int, int, int], RankCut] = {}

    def part(self, at: FileRank, items: Sequence[ModelKey]) -> RankCut:
        """What a rank has.

        Raises:
            LayoutMismatch: Some parameters cannot be cut so; all problems together.
        """
        place = at.tp_rank, at.etp_rank, at.ep_rank if self._stacked else 0
        if place not in self._parts:
            layouts = self._layouts(at, items)
            cuts = [
                [[layouts[self.keys[n].kind].cut for n in one.numbers] for one in inside] for inside in self.buffers
            ]
            self._parts[place] = RankCut(
                layouts, [[*map(_blocks, *both)] for both in zip(self.buffers, cuts, strict=True)]
            )
        return self._parts[place]

    def _layouts(self, at: FileRank, items: Sequence[ModelKey]) -> dict[int, LocalLayout]:
        found, problems, parallel = dict[int, LocalLayout](), Problems(), self.blueprint.choices.parallel
        for kind, (spec, expert) in self.kinds.items():
            split, stack = at.split(parallel, expert), at.stack(parallel)
            try:
                found[kind] = local_layout(spec.partition, spec.global_shape, split, stack)
            except CheckpointError as error:
                for key, item in zip(self.keys, items, strict=True):
                    if key.kind == kind:
                        problems.add(type(error), f"{item.name}: {error}")
        problems.raise_if_any()
        return found

    def _trained(self) -> Iterator[tuple[int, LocalParam]]:
        blueprint, pp, tied = self.blueprint, self.blueprint.choices.parallel.pp, self.blueprint.model.tied
        chunks, has_mtp = {(chunk.pp_rank, chunk.vpp_rank): chunk for chunk in blueprint.chunks}, blueprint.has_mtp
        for number, shape in self.shapes.items():
            (_, vpp_rank, kind), name = self.keys[number], self.items[number].name
            spec = self.kinds[kind].spec
            if spec.trainable:
                shared = is_shared_embedding(name, chunks[self.at.pp_rank, vpp_rank], pp, tied, has_mtp=has_mtp)
                yield number, LocalParam(name, vpp_rank, shape, spec.dtype, shared)

    def _buffers(self, member: ChainedOptimizer) -> Iterator[StageBuffer]:
        blueprint = self.blueprint
        numbers = {(param.vpp_rank, param.name): number for number, param in self.trained.items()}
        numel = sum(prod(shape) for number, shape in self.shapes.items() if not is_buffer(self.items[number].name))
        params = [*self.trained.values()]
        for buffer in buffers(params, member, blueprint.args, blueprint.choices.parallel, self.at, numel):
            inside = [numbers[buffer.vpp_rank, place.name] for place in buffer.flat.places]
            shapes = [self.kinds[self.keys[number].kind].spec.global_shape for number in inside]
            yield StageBuffer(buffer, blueprint.role, inside, [self.items[number] for number in inside], shapes)


def _blocks(buffer: StageBuffer, cuts: Sequence[Cut]) -> tuple[RowBlock, RowBlock]:
    places = buffer.pattern.flat.places
    memory, file = ([place.buffer_start for place in places], [place.file_start for place in places])
    return RowBlock.of(buffer.shapes, cuts, memory), RowBlock.of(buffer.shapes, cuts, file)


class Stage:
    """What ranks of a pipeline stage with the same experts have in common.

    Args:
        pattern: How they are laid out.
        items: What their keys are.
    """

    def __init__(self, pattern: RankPattern, items: Sequence[ModelKey]) -> None:
        self.pattern, self.items = pattern, items
        self.buffers = [[buffer.of(items) for buffer in inside] for inside in pattern.buffers]

    @cached_property
    def trained(self) -> list[LocalParam]:
        """The trainable parameters in registration order."""
        return [replace(param, name=self.items[number].name) for number, param in self.pattern.trained.items()]


class PipelineStage:
    """All ranks of a pipeline stage: the experts that each has, and the patterns, of which there is one, but where somebody treats
    experts differently.

    Args:
        blueprint: The whole new checkpoint.
        pp_rank: Which stage.
    """

    def __init__(self, blueprint: Blueprint, pp_rank: int) -> None:
        self.blueprint, self.pp_rank, self.kinds = blueprint, pp_rank, list[_CutKind]()
        parallel = blueprint.choices.parallel
        self._per_rank = blueprint.model.num_experts // parallel.ep
        self._dealt = [(list[LocalKey](), list[ModelKey]()) for _ in range(parallel.ep)]
        self._deal()
        self._patterns: list[RankPattern] = []
        self._last: tuple[int, Stage] | None = None

    def _deal(self) -> None:
        """Every key, to the ranks that have it."""
        ranks, per_rank, numbers = self._dealt, self._per_rank, dict[tuple[int, Shape, bool, DType, bool], int]()
        every = range(per_rank * len(ranks))
        for chunk in self.blueprint.chunks:
            for item in self.blueprint.items_of(chunk, every) if chunk.pp_rank == self.pp_rank else ():
                first = 0 if item.expert is None else item.expert - item.expert % per_rank
                local = renumbered(item.name, -chunk.first_layer, -first)
                key = LocalKey(local, chunk.vpp_rank, self._kind(item, numbers))
                for keys, items in ranks if item.expert is None else (ranks[item.expert // per_rank],):
                    keys.append(key)
                    items.append(item)

    def _kind(self, item: ModelKey, numbers: dict[tuple[int, Shape, bool, DType, bool], int]) -> int:
        spec = item.spec
        if spec is None:
            return -1
        expert = is_routed_expert(item.name)
        number = numbers.setdefault(
            (id(spec.partition), spec.global_shape, expert, spec.dtype, spec.trainable), len(numbers)
        )
        if number == len(self.kinds):
            self.kinds.append(_CutKind(spec, expert))
        return number

    def of(self, at: FileRank) -> Stage:
        """What a rank of it has in common with those that have the same experts, for which one asks next."""
        if self._last is None or self._last[0] != at.ep_rank:
            keys, items = self._dealt[at.ep_rank]
            pattern = next((one for one in self._patterns if one.keys == keys), None)
            if pattern is None:
                pattern = RankPattern(self.blueprint, at, keys, items, self.kinds)
                self._patterns.append(pattern)
            self._last = at.ep_rank, Stage(pattern, items)
        return self._last[1]


def stage_of(blueprint: Blueprint, at: FileRank) -> Stage:
    """The stage of a rank, which its other ranks ask for as well: files are laid out stage after stage."""
    found = blueprint.stages.get(at.pp_rank)
    if not isinstance(found, PipelineStage):
        blueprint.stages.clear()
        found = blueprint.stages[at.pp_rank] = PipelineStage(blueprint, at.pp_rank)
    return found.of(at)


class RankLayout:
    """Lays out the files of one rank.

    Args:
        blueprint: The whole new checkpoint.
        at: The rank.
        folder: Folder of the iteration, relative to the root.
    """

    def __init__(self, blueprint: Blueprint, at: FileRank, folder: str) -> None:
        self.blueprint, self.at = blueprint, at
        self.stage = stage_of(blueprint, at)
        self.model = Records(f"{folder}/{at.folder}/model_optim_rng.pt")
        self.distrib = Records(f"{folder}/{at.folder}/distrib_optim.pt")
        self.states: dict[tuple[int, str], dict[str, StoredTensor]] = {}
        self.buffer_states: dict[tuple[int, int], dict[str, StoredTensor]] = {}
        self._part = self.stage.pattern.part(at, self.stage.items)
        self._placed: list[tuple[Sequence[int], Record, Sequence[int]]] = []
        for number, inside in enumerate(self.stage.buffers):
            for index, buffer in enumerate(inside):
                self._place_buffer(number, index, buffer)
        for number in self.stage.pattern.alone:  # in no buffer, and so with a storage of its own
            dtype = self.stage.pattern.kinds[self.stage.pattern.keys[number].kind].spec.dtype
            self._placed.append(((number,), self._place_whole(self.model, number, PARAM, dtype).record, (0,)))
        if blueprint.choices.optimizer == PLAIN:
            self.place_whole_states(self.model, self.trained())

    @cached_property
    def items(self) -> list[LocalItem]:
        """Its keys, in registration order."""
        layouts = self._part.layouts
        return [
            LocalItem(key, item, vpp_rank, item.spec, layouts.get(kind))
            for (key, vpp_rank, kind), item in zip(self.stage.pattern.keys, self.stage.items, strict=True)
        ]

    @cached_property
    def params(self) -> dict[tuple[int, str], StoredTensor]:
        """Where its parameters lie, by model chunk and key."""
        found: dict[tuple[int, str], StoredTensor] = {}
        for numbers, record, starts in self._placed:
            for number, start in zip(numbers, starts, strict=True):
                key, vpp_rank, kind = self.stage.pattern.keys[number]
                found[vpp_rank, key] = _stored(self._part.layouts[kind], record, start)
        return found

    @cached_property
    def local_buffers(self) -> list[list[LocalBuffer]]:
        """The flat buffers of every chained optimizer."""
        return [[buffer.local() for buffer in inside] for inside in self.stage.buffers]

    @property
    def chained(self) -> tuple[ChainedOptimizer, ...]:
        """The chained optimizers of every rank."""
        return self.stage.pattern.chained

    def trained(self) -> list[LocalParam]:
        """The rank's trainable parameters in registration order."""
        return self.stage.trained

    def holds_member(self, member: ChainedOptimizer) -> bool:
        """Whether this rank's ``distrib_optim.pt`` has the state of a chained optimizer."""
        return self.at.holds_expert_optimizer if member.expert else self.at.holds_dense_optimizer

    def _place_buffer(self, member: int, index: int, buffer: StageBuffer) -> None:
        """Parameters of a distributed optimizer are views of one flat storage per buffer, as Megatron writes them."""
        flat, (memory, file) = buffer.pattern.flat, self._part.blocks[member][index]
        record = self.model.new(buffer.pattern.dtype, flat.numel)
        self.model.place(buffer.names(PARAM), memory, record)
        self._placed.append((buffer.numbers, record, [place.buffer_start for place in flat.places]))
        for state in (MASTER, *self.blueprint.moments) if self.holds_member(self.chained[member]) else ():
            numel = flat.numel_unpadded
            record = self.distrib.new(self.blueprint.state_dtypes.get(state, FLOAT32), numel)
            self.buffer_states.setdefault((member, index), {})[state] = StoredTensor(record, 0, (numel,), (1,))
            self.distrib.place(buffer.names(state), file, record)

    def _place_whole(self, records: Records, number: int, state: str, dtype: DType) -> StoredTensor:
        pattern, item = self.stage.pattern, self.stage.items[number]
        kind = pattern.keys[number].kind
        layout, shape = self._part.layouts[kind], pattern.kinds[kind].spec.global_shape
        record = records.new(dtype, prod(layout.shape))
        name = TensorName(self.blueprint.role, item.stored_as, state)
        records.place([name], RowBlock.of([shape], [layout.cut], [0]), record)
        return _stored(layout, record, 0)

    def place_whole_states(self, records: Records, params: Iterable[LocalParam]) -> None:
        """Give parameters their states, each of them whole, in one of the rank's files."""
        keys, items = self.stage.pattern.keys, self.stage.items
        numbers = {
            (key.vpp_rank, item.name): number for number, (key, item) in enumerate(zip(keys, items, strict=True))
        }
        for param in params:
            number = numbers[param.vpp_rank, param.name]
            masters = [MASTER] if param.dtype != FLOAT32 else []
            for state in (*masters, *self.blueprint.moments_of(items[number].stored_as)):
                dtype = self.blueprint.state_dtypes.get(state, FLOAT32)
                stored = self._place_whole(records, number, state, dtype)
                self.states.setdefault((param.vpp_rank, param.name), {})[state] = stored


def _stored(layout: LocalLayout, record: Record, start: int) -> StoredTensor:
    return StoredTensor(record, start, layout.shape, layout.strides)
