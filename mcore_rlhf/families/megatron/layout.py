"""A Megatron checkpoint as a whole: every key in registration order, and the flat buffers of its optimizers.

Reading and writing both build their view of a rank as a list of :class:`LocalParam` and ask :func:`buffers` where each lies; a
:class:`Blueprint` is the whole of a new checkpoint, of which :mod:`.ranks` has the parts.

Sources: megatron-core 0.16.1, ``optimizer/__init__.py`` (``get_megatron_optimizer``), ``distributed/distributed_data_parallel.py``
(``_allocate_buffers_for_parameters``), ``models/common/language_module/language_module.py``
(``setup_embeddings_and_output_layer``); Megatron-LM core_v0.16.1, ``megatron/training/training.py`` (``get_model``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mcore_rlhf.core.catalog import FLOAT32, DType
from mcore_rlhf.layouts.flat import BufferParam, BufferRules, FlatBuffer, bucket_rules, flat_buffer
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.pipeline import ModelChunk
from mcore_rlhf.models.megatron import EMBEDDING, OUTPUT, expert_of, is_routed_expert, layer_of
from mcore_rlhf.models.spec import ModelSpec, ParamSpec

from .arguments import Arguments
from .folders import FileRank
from .groups import ChainedOptimizer, LocalParam
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
        rules = rules_of(args, parallel, bool(member.expert), rank_numel, bucketed=at.pp_rank == 0 and vpp_rank == 0)
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


def rules_of(args: Arguments, parallel: ParallelConfig, expert: bool, numel: int, bucketed: bool) -> BufferRules:
    """Where the buckets of a buffer end.

    Args:
        args: The run's arguments.
        parallel: The degrees.
        expert: Whether it is one of experts.
        numel: Elements of all parameters of the rank.
        bucketed: Whether it is of the first model chunk of the first stage, which alone has several.
    """
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
    stages: dict[int, object] = field(default_factory=dict)
    """What :func:`.ranks.stage_of` keeps."""
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
