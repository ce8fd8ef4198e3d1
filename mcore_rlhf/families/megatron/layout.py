"""What each rank of a Megatron checkpoint holds: its optimizers' flat buffers, its keys, its tensors and the records they lie in.

Reading and writing both build their view of a rank as a list of :class:`LocalParam` and ask :func:`buffers` where each lies; a
:class:`Blueprint` is the whole of a new checkpoint, every key in registration order, and a :class:`RankLayout` one rank of it.

Sources: megatron-core 0.16.1, ``optimizer/__init__.py`` (``get_megatron_optimizer``), ``distributed/distributed_data_parallel.py``
(``_allocate_buffers_for_parameters``), ``models/common/language_module/language_module.py``
(``setup_embeddings_and_output_layer``); Megatron-LM core_v0.16.1, ``megatron/training/training.py`` (``get_model``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from mcore_rlhf.core.catalog import (
    FLOAT32,
    MASTER,
    PARAM,
    Chunk,
    DType,
    Record,
    Shape,
    TensorEntry,
    TensorName,
    dot,
)
from mcore_rlhf.errors import CheckpointError, Problems
from mcore_rlhf.layouts.flat import BufferParam, BufferRules, FlatBuffer, bucket_rules, flat_buffer
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.pipeline import ModelChunk
from mcore_rlhf.layouts.tensor import LocalLayout, local_layout
from mcore_rlhf.models.megatron import EMBEDDING, OUTPUT, expert_of, is_buffer, is_routed_expert, layer_of, renumbered
from mcore_rlhf.models.spec import ModelSpec, ParamSpec
from mcore_rlhf.storage.pt import StoredTensor

from .arguments import DISTRIBUTED, PLAIN, Arguments
from .folders import FileRank
from .groups import ChainedOptimizer, LocalParam, members
from .new_layout import NewLayout


@dataclass(frozen=True, slots=True)
class LocalBuffer:
    """One flat buffer of a member.

    Args:
        vpp_rank: Its model chunk.
        dtype: Element type of its parameters.
        flat: Where every parameter lies.
    """

    vpp_rank: int
    dtype: DType
    flat: FlatBuffer


def buffers(
    params: Sequence[LocalParam],
    member: ChainedOptimizer,
    args: Arguments,
    parallel: ParallelConfig,
    at: FileRank,
    rank_numel: int,
) -> list[LocalBuffer]:
    """The flat buffers of one member on one rank: chunk by chunk, one for every dtype in order of first appearance.

    Args:
        params: The member's trainable parameters, in registration order.
        member: The member.
        args: The run's arguments.
        parallel: The degrees.
        at: The rank.
        rank_numel: Elements of all parameters of the rank, of which ``ddp_num_buckets`` makes the size of a bucket.
    """
    found: dict[tuple[int, str], list[LocalParam]] = {}
    apart = args.experts_apart(parallel)
    for vpp_rank in member.vpp_ranks:
        for param in params:
            if param.vpp_rank == vpp_rank and member.owns(param, apart):
                found.setdefault((vpp_rank, param.dtype.name), []).append(param)
    result = []
    for (vpp_rank, _), inside in found.items():
        rules = _rules(args, parallel, bool(member.expert), rank_numel, bucketed=at.pp_rank == 0 and vpp_rank == 0)
        flat = flat_buffer([BufferParam(p.name, p.numel, p.shared_embedding) for p in inside], rules)
        result.append(LocalBuffer(vpp_rank, inside[0].dtype, flat))
    return result


def sharing_ranks(args: Arguments, parallel: ParallelConfig, expert: bool) -> int:
    """How many data-parallel ranks a buffer is cut for."""
    instances = args.integer("num_distributed_optimizer_instances", 1) or 1
    return max(1, (parallel.expert_dp if expert else parallel.dp * parallel.cp) // instances)


def grad_dtype(args: Arguments, param_dtype: DType) -> DType:
    """Gradients are reduced in fp32 where ``--accumulate-allreduce-grads-in-fp32`` says so."""
    return FLOAT32 if args.flag("accumulate_allreduce_grads_in_fp32", default=True) else param_dtype


def _rules(args: Arguments, parallel: ParallelConfig, expert: bool, numel: int, bucketed: bool) -> BufferRules:
    overlapped = args.flag("overlap_grad_reduce") and not args.flag("overlap_param_gather_with_optimizer_step")
    return bucket_rules(
        data_parallel=sharing_ranks(args, parallel, expert),
        high_nccl_busbw=args.flag("ddp_pad_buckets_for_high_nccl_busbw"),
        bucketed=bucketed and overlapped,
        bucket_size=args.optional("ddp_bucket_size"),
        num_buckets=args.optional("ddp_num_buckets"),
        numel=numel,
        default_dp=parallel.dp * parallel.cp,
    )


def is_shared_embedding(name: str, chunk: ModelChunk, pp: int, tied: bool, has_mtp: bool) -> bool:
    """Whether a parameter is a word embedding of which another pipeline stage has a copy."""
    if pp == 1 or not (tied or has_mtp):
        return False
    if chunk.embedding:
        return name == EMBEDDING and not chunk.loss
    if chunk.mtp:
        return name == EMBEDDING
    return chunk.loss and tied and name == OUTPUT


_FINAL_NORM = ("final_layernorm.", "final_norm.")


@dataclass(frozen=True, slots=True)
class ModelKey:
    """One key of the model, with global numbers.

    Args:
        name: The key.
        stored_as: The parameter that the catalogue has for it: the embedding, for a tied output layer.
        spec: The parameter with the target's shape and dtype, or None for an opaque value.
        expert: The number of its expert, where it is one that is dealt over ranks and has a key of its own.
    """

    name: str
    stored_as: str
    spec: ParamSpec | None
    expert: int | None = None


@dataclass(slots=True)
class Blueprint:
    """A new Megatron checkpoint.

    Args:
        role: Role of its tensors.
        model: The model, as the source has it.
        args: The arguments of the new layout.
        choices: The new layout.
        chunks: Its model chunks.
        order: All keys of the model in registration order, opaque ones included.
        moments: Names of the optimizer's states, without the masters.
        state_dtypes: Their element types.
        own: Those of each parameter, where not all have the same.
    """

    role: str
    model: ModelSpec
    args: Arguments
    choices: NewLayout
    chunks: Sequence[ModelChunk]
    order: Sequence[str]
    moments: tuple[str, ...]
    state_dtypes: Mapping[str, DType]
    own: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    _sections: dict[object, list[ModelKey]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seen_layers = False
        for name in self._keys():
            seen_layers = seen_layers or layer_of(name) is not None
            self._sections.setdefault(_section(name, seen_layers), []).append(self._item(name))

    def moments_of(self, param: str) -> tuple[str, ...]:
        """The optimizer's states of a parameter, without the master."""
        return self.own.get(param, self.moments)

    @property
    def has_mtp(self) -> bool:
        """Whether the model has multi-token-prediction layers."""
        return any(chunk.mtp for chunk in self.chunks)

    def items_of(self, chunk: ModelChunk, experts: range) -> Iterator[ModelKey]:
        """The keys of one model chunk in registration order; of experts with keys of their own, those of some numbers.

        Sources: megatron-core 0.16.1, ``models/gpt/gpt_model.py``, ``transformer/transformer_block.py``
        (``has_final_layernorm_in_this_stage``); 0.19.2, ``models/hybrid/hybrid_block.py``.
        """
        wanted: list[object] = []
        wanted += ["embedding"] if chunk.embedding or chunk.mtp else []
        wanted += ["first"] if chunk.embedding else []
        wanted += range(chunk.first_layer, chunk.first_layer + chunk.num_layers)
        behind_last = self.has_mtp and self.args.pattern is None  # a hybrid model's is where the output layer is
        wanted += ["final_norm"] if (chunk.holds_last_layer if behind_last else chunk.loss) else []
        wanted += ["mtp"] if chunk.mtp else []
        wanted += ["last"] if chunk.loss else []
        for section in wanted:
            for item in self._sections.get(section, []):
                if item.expert is not None and item.expert not in experts:
                    continue
                if not self._is_tied_copy(item):
                    yield item
                elif not chunk.embedding:
                    yield item if chunk.mtp else self._copy_of_embedding

    def _is_tied_copy(self, item: ModelKey) -> bool:
        """Whether a key is the output layer's copy of the embedding, and not a value head in its place."""
        return self.model.tied and item.name == OUTPUT and item.spec is not None and item.spec.partition.vocabulary

    @property
    def _copy_of_embedding(self) -> ModelKey:
        """The output layer of a last stage without MTP, which uses a copy of the embedding."""
        spec = self.model.get(EMBEDDING)
        return ModelKey(OUTPUT, EMBEDDING, None if spec is None else self._new_spec(spec))

    def _keys(self) -> Iterator[str]:
        """The source's keys, with the output layer that a tied model has only on a stage of its own."""
        has_output = any(name.startswith("output_layer.") for name in self.order)
        has_other_head = any(_section(name, True) == "last" for name in self.order)
        missing = self.model.tied and OUTPUT not in self.order and (has_output or not has_other_head)
        missing = missing and self.model.get(EMBEDDING) is not None
        for name in self.order:
            if missing and name.startswith("output_layer."):
                yield OUTPUT
                missing = False
            yield name
        if missing:
            yield OUTPUT

    def _item(self, name: str) -> ModelKey:
        stored_as = name
        if name == OUTPUT and self.model.tied and self.model.get(OUTPUT) is None:
            stored_as = EMBEDDING
        spec = self.model.get(stored_as)
        expert = expert_of(name) if is_routed_expert(name) else None
        return ModelKey(name, stored_as, None if spec is None else self._new_spec(spec), expert)

    def _new_spec(self, spec: ParamSpec) -> ParamSpec:
        rows, dtype = self.choices.padded_vocab_size, self.choices.dtype
        if spec.partition.vocabulary and rows is not None:
            spec = replace(spec, global_shape=(rows, *spec.global_shape[1:]))
        if dtype is not None and spec.trainable:
            spec = replace(spec, dtype=dtype)
        return spec


def _section(name: str, seen_layers: bool) -> object:
    """Which part of the model a key belongs to; keys that nobody knows go by where they are registered."""
    layer = layer_of(name)
    if layer is not None:
        return layer
    if name.startswith("mtp."):
        return "mtp"
    if name.startswith("embedding."):
        return "embedding"
    if any(norm in name for norm in _FINAL_NORM):
        return "final_norm"
    return "last" if seen_layers else "first"


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
    item: ModelKey
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
        stored = StoredTensor(record, start, layout.shape, layout.strides)
        self.entries.append(TensorEntry(name, spec.global_shape, record.dtype, tuple(local_chunks(stored, layout))))
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
    _layouts: dict[tuple[int, Shape, bool], LocalLayout] = field(default_factory=dict)

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
            self.place_whole_states(self.model, trained)

    @property
    def chained(self) -> tuple[ChainedOptimizer, ...]:
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

    def holds_member(self, member: ChainedOptimizer) -> bool:
        """Whether this rank's ``distrib_optim.pt`` has the state of a chained optimizer."""
        return self.at.holds_expert_optimizer if member.expert else self.at.holds_dense_optimizer

    def _items(self) -> Iterator[LocalItem]:
        problems = Problems()
        per_rank = self.blueprint.model.num_experts // self.blueprint.choices.parallel.ep
        experts = range(self.at.ep_rank * per_rank, (self.at.ep_rank + 1) * per_rank)
        for chunk in self.blueprint.chunks:
            if chunk.pp_rank == self.at.pp_rank:
                for item in self.blueprint.items_of(chunk, experts):
                    try:
                        yield self._local(item, chunk, experts.start)
                    except CheckpointError as error:
                        problems.add(type(error), f"{item.name}: {error}")
        problems.raise_if_any()

    def _local(self, item: ModelKey, chunk: ModelChunk, first_expert: int) -> LocalItem:
        key = renumbered(item.name, -chunk.first_layer, 0 if item.expert is None else -first_expert)
        if item.spec is None:
            return LocalItem(key, item, chunk.vpp_rank)
        spec, expert = item.spec, is_routed_expert(item.name)
        how = id(spec.partition), spec.global_shape, expert  # layers and experts share theirs
        layout = self._layouts.get(how)
        if layout is None:
            parallel = self.blueprint.choices.parallel
            split, stack = self.at.split(parallel, expert), self.at.stack(parallel)
            layout = self._layouts[how] = local_layout(spec.partition, spec.global_shape, split, stack)
        return LocalItem(key, item, chunk.vpp_rank, spec, layout)

    def _place_in_buffers(self, trained: Sequence[LocalParam]) -> None:
        """Parameters of a distributed optimizer are views of one flat storage per buffer, as Megatron writes them."""
        by_key = {(item.vpp_rank, item.item.name): item for item in self.items}
        parallel, numel = self.blueprint.choices.parallel, self._numel()
        for number, member in enumerate(self.chained):
            self.local_buffers[number] = buffers(trained, member, self.blueprint.args, parallel, self.at, numel)
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

    def place_whole_states(self, records: Records, params: Iterable[LocalParam]) -> None:
        """Give parameters their states, each of them whole, in one of the rank's files."""
        by_key = {(item.vpp_rank, item.item.name): item for item in self.items}
        for param in params:
            item = by_key[param.vpp_rank, param.name]
            assert item.spec is not None
            assert item.layout is not None
            masters = [MASTER] if param.dtype != FLOAT32 else []
            for state in (*masters, *self.blueprint.moments_of(item.item.stored_as)):
                record = records.new(self.blueprint.state_dtypes.get(state, FLOAT32), param.numel)
                stored = records.place(self._name(item, state), item.spec, item.layout, record, 0)
                self.states.setdefault((param.vpp_rank, param.name), {})[state] = stored

    def _place_param(self, item: LocalItem, record: Record, start: int) -> None:
        assert item.spec is not None
        assert item.layout is not None
        stored = self.model.place(self._name(item, PARAM), item.spec, item.layout, record, start)
        self.params[item.vpp_rank, item.key] = stored

    def _name(self, item: LocalItem, state: str) -> TensorName:
        return TensorName(self.blueprint.role, item.item.stored_as, state)


def local_chunks(stored: StoredTensor, layout: LocalLayout) -> Sequence[Chunk]:
    """The chunks that a rank's local tensor contributes."""
    record, start, strides = stored.record, stored.start, layout.view_strides
    if layout.view == stored.shape and stored.strides != strides:
        strides = stored.strides
        return [Chunk(piece.box, record, start + dot(piece.offset, strides), strides) for piece in layout.pieces]
    return [
        Chunk(piece.box, record, start + at, strides) for piece, at in zip(layout.pieces, layout.starts, strict=True)
    ]
