"""What one rank of a new checkpoint holds: its local tensors, and the records in which they and their states lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

from mcore_rlhf.core.box import dot, row_major
from mcore_rlhf.core.catalog import Chunk, Record, TensorEntry
from mcore_rlhf.core.dtype import FLOAT32, DType
from mcore_rlhf.core.names import MASTER, PARAM, TensorName
from mcore_rlhf.errors import CheckpointError, Problems
from mcore_rlhf.layouts.pipeline import ModelChunk
from mcore_rlhf.layouts.tensor import LocalLayout, local_layout
from mcore_rlhf.models.megatron import expert_of, is_buffer, is_routed_expert, renumbered
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage.ptfile import StoredTensor

from .arguments import DISTRIBUTED, PLAIN
from .blueprint import Blueprint, Item
from .buffers import LocalBuffer, LocalParam, Member, buffers, is_shared_embedding, members
from .folders import FileRank


@dataclass(frozen=True, slots=True)
class LocalItem:
    """One key of a rank's state dict.

    Args:
        key: Name with local layer and expert numbers.
        item: What it is globally.
        spec: Its parameter with the target's shape and dtype, or None for an opaque value.
        layout: The part that the rank holds.
    """

    key: str
    item: Item
    vpp_rank: int
    spec: ParamSpec | None = None
    layout: LocalLayout | None = None


@dataclass(slots=True)
class Records:
    """The records of one file, and the entries that lie in them."""

    file: str
    records: list[Record] = field(default_factory=list)
    entries: list[TensorEntry] = field(default_factory=list)

    def new(self, dtype: DType, numel: int) -> Record:
        """A further record."""
        record = Record(self.file, f"data/{len(self.records)}", dtype, numel, 0)
        self.records.append(record)
        return record

    def place(self, name: TensorName, spec: ParamSpec, layout: LocalLayout, record: Record, start: int) -> StoredTensor:
        """Say that a contiguous local tensor lies in a record."""
        stored = StoredTensor(record, start, layout.shape, row_major(layout.shape))
        self.entries.append(
            TensorEntry(name, spec.global_shape, record.dtype, tuple(local_chunks(spec, stored, layout)))
        )
        return stored


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

    def __post_init__(self) -> None:
        self.model = Records(f"{self.folder}/{self.at.folder}/model_optim_rng.pt")
        self.distrib = Records(f"{self.folder}/{self.at.folder}/distrib_optim.pt")
        self.items = list(self._items())
        flat = self.blueprint.choices.optimizer == DISTRIBUTED
        trained = self.trained()
        if flat:
            self._place_in_buffers(trained)
        self._place_alone()
        if self.blueprint.choices.optimizer == PLAIN:
            self._place_plain_states(trained)

    @property
    def chained(self) -> tuple[Member, ...]:
        """The chained optimizers of every rank."""
        return members(self.blueprint.args, self.blueprint.choices.parallel)

    def trained(self) -> list[LocalParam]:
        """The rank's trainable parameters in registration order."""
        blueprint, parallel = self.blueprint, self.blueprint.choices.parallel
        chunks = {(c.pp_rank, c.vpp_rank): c for c in blueprint.chunks}
        return [
            LocalParam(
                item.item.name, item.vpp_rank, item.layout.shape, item.spec.dtype,
                is_shared_embedding(
                    item.item.name, chunks[self.at.pp_rank, item.vpp_rank], parallel.pp, blueprint.model.tied, blueprint.has_mtp
                ),
            )
            for item in self.items
            if item.spec is not None and item.layout is not None and item.spec.trainable
        ]  # fmt: skip

    def holds_member(self, member: Member) -> bool:
        """Whether this rank's ``distrib_optim.pt`` has the state of a chained optimizer."""
        return member.expert or self.at.holds_dense_optimizer

    def _items(self) -> Iterator[LocalItem]:
        problems = Problems()
        for chunk in self.blueprint.chunks:
            if chunk.pp_rank == self.at.pp_rank:
                for item in self.blueprint.items_of(chunk):
                    try:
                        yield from self._local(item, chunk)
                    except CheckpointError as error:
                        problems.add(type(error), f"{item.name}: {error}")
        problems.raise_if_any()

    def _local(self, item: Item, chunk: ModelChunk) -> Iterator[LocalItem]:
        parallel = self.blueprint.choices.parallel
        routed = is_routed_expert(item.name)
        per_rank = self.blueprint.model.num_experts // parallel.ep
        first_expert = self.at.ep_rank * per_rank if routed else 0
        number = expert_of(item.name) if routed else None
        if number is not None and not first_expert <= number < first_expert + per_rank:
            return
        key = renumbered(item.name, -chunk.first_layer, -first_expert if number is not None else 0)
        if item.spec is None:
            yield LocalItem(key, item, chunk.vpp_rank)
            return
        split, stack = self.at.split(parallel, routed), self.at.stack(parallel)
        layout = local_layout(item.spec.partition, item.spec.global_shape, split, stack)
        yield LocalItem(key, item, chunk.vpp_rank, item.spec, layout)

    def _place_in_buffers(self, trained: Sequence[LocalParam]) -> None:
        """Parameters of a distributed optimizer are views of one flat storage per buffer, as Megatron writes them."""
        by_key = {(item.vpp_rank, item.item.name): item for item in self.items}
        parallel = self.blueprint.choices.parallel
        for number, member in enumerate(self.chained):
            owned = [param for param in trained if member.owns(param, parallel.ep)]
            self.local_buffers[number] = buffers(owned, member, self.blueprint.args, parallel, self.at, self._numel())
            for index, buffer in enumerate(self.local_buffers[number]):
                items = [by_key[buffer.vpp_rank, place.name] for place in buffer.flat.places]
                record = self.model.new(buffer.dtype, buffer.flat.numel)
                for item, place in zip(items, buffer.flat.places, strict=True):
                    self._place_param(item, record, place.buffer_start)
                if self.holds_member(member):
                    self._place_flat_states(number, index, buffer, items)

    def _numel(self) -> int:
        """Elements of all parameters of the rank."""
        local = [item for item in self.items if item.layout is not None and not is_buffer(item.item.name)]
        return sum(prod(item.layout.shape) for item in local if item.layout is not None)

    def _place_flat_states(self, member: int, index: int, buffer: LocalBuffer, items: Sequence[LocalItem]) -> None:
        numel = buffer.flat.numel_unpadded
        for state in (MASTER, *self.blueprint.moments):
            record = self.distrib.new(self.blueprint.state_dtypes.get(state, FLOAT32), numel)
            self.buffer_states.setdefault((member, index), {})[state] = StoredTensor(record, 0, (numel,), (1,))
            for item, place in zip(items, buffer.flat.places, strict=True):
                assert item.spec is not None
                assert item.layout is not None
                self.distrib.place(self._name(item, state), item.spec, item.layout, record, place.file_start)

    def _place_alone(self) -> None:
        """Everything that is in no buffer has a storage of its own."""
        for item in self.items:
            if item.spec is not None and item.layout is not None and (item.vpp_rank, item.key) not in self.params:
                self._place_param(item, self.model.new(item.spec.dtype, prod(item.layout.shape)), 0)

    def _place_plain_states(self, trained: Sequence[LocalParam]) -> None:
        by_key = {(item.vpp_rank, item.item.name): item for item in self.items}
        for param in trained:
            item = by_key[param.vpp_rank, param.name]
            assert item.spec is not None
            assert item.layout is not None
            masters = [MASTER] if param.dtype != FLOAT32 else []
            for state in (*masters, *self.blueprint.moments):
                record = self.model.new(self.blueprint.state_dtypes.get(state, FLOAT32), param.numel)
                stored = self.model.place(self._name(item, state), item.spec, item.layout, record, 0)
                self.states.setdefault((param.vpp_rank, param.name), {})[state] = stored

    def _place_param(self, item: LocalItem, record: Record, start: int) -> None:
        assert item.spec is not None
        assert item.layout is not None
        stored = self.model.place(self._name(item, PARAM), item.spec, item.layout, record, start)
        self.params[item.vpp_rank, item.key] = stored

    def _name(self, item: LocalItem, state: str) -> TensorName:
        return TensorName(self.blueprint.role, item.item.stored_as, state)


def local_chunks(spec: ParamSpec, stored: StoredTensor, layout: LocalLayout) -> Sequence[Chunk]:
    """The chunks that a rank's local tensor contributes."""
    strides = stored.strides if layout.view == stored.shape else row_major(layout.view)
    return [Chunk(p.box, stored.record, stored.start + dot(p.offset, strides), strides) for p in layout.pieces]
