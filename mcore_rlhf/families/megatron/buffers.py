"""The optimizers of one rank and their flat buffers: which parameters each holds, in which order, and where.

Reading and writing both build their view of a rank as a list of :class:`LocalParam` and ask here.

Sources: megatron-core 0.16.1, ``optimizer/__init__.py`` (``get_megatron_optimizer``),
``distributed/distributed_data_parallel.py`` (``_allocate_buffers_for_parameters``),
``models/common/language_module/language_module.py`` (``setup_embeddings_and_output_layer``); Megatron-LM core_v0.16.1,
``megatron/training/training.py`` (``get_model``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from mcore_rlhf.core.box import Shape
from mcore_rlhf.core.dtype import DType
from mcore_rlhf.layouts.flat import BufferParam, BufferRules, FlatBuffer, bucket_rules, flat_buffer
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.pipeline import ModelChunk

from .arguments import Arguments
from .folders import FileRank
from .groups import in_expert_optimizer

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"


@dataclass(frozen=True, slots=True)
class LocalParam:
    """A trainable parameter of one rank.

    Args:
        name: Global name, as it stands in this rank's state dict (a tied copy keeps its own).
        vpp_rank: Its model chunk.
        shape: Local shape.
        dtype: Element type in the model.
        shared_embedding: Whether pipeline stages share it.
    """

    name: str
    vpp_rank: int
    shape: Shape
    dtype: DType
    shared_embedding: bool

    @property
    def numel(self) -> int:
        """Number of local elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Member:
    """One of the chained optimizers.

    Args:
        vpp_ranks: The model chunks whose parameters it holds.
        expert: Whether it holds the experts that are dealt over ranks, or everything else.
    """

    vpp_ranks: tuple[int, ...]
    expert: bool

    def owns(self, param: LocalParam, ep: int) -> bool:
        """Whether it holds a parameter."""
        return param.vpp_rank in self.vpp_ranks and in_expert_optimizer(param.name, ep) == self.expert


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


def members(args: Arguments, parallel: ParallelConfig) -> tuple[Member, ...]:
    """The chained optimizers of every rank, in the order in which they are saved."""
    chunks = tuple(range(parallel.vpp))
    dense = [Member(chunks, expert=False)]
    if args.flag("overlap_param_gather_with_optimizer_step") and parallel.vpp > 1:
        dense = [Member(chunks[:1], expert=False), Member(chunks[1:], expert=False)]
    experts = [Member(chunks, expert=True)] if args.num_experts and parallel.ep > 1 else []
    return (*dense, *experts)


def buffers(
    params: Sequence[LocalParam],
    member: Member,
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
    for vpp_rank in member.vpp_ranks:
        for param in params:
            if param.vpp_rank == vpp_rank and member.owns(param, parallel.ep):
                found.setdefault((vpp_rank, param.dtype.name), []).append(param)
    result = []
    for (vpp_rank, _), inside in found.items():
        rules = _rules(args, parallel, member.expert, rank_numel, bucketed=at.pp_rank == 0 and vpp_rank == 0)
        flat = flat_buffer([BufferParam(p.name, p.numel, p.shared_embedding) for p in inside], rules)
        result.append(LocalBuffer(vpp_rank, inside[0].dtype, flat))
    return result


def _rules(args: Arguments, parallel: ParallelConfig, expert: bool, numel: int, bucketed: bool) -> BufferRules:
    instances = args.integer("num_distributed_optimizer_instances", 1) or 1
    overlapped = args.flag("overlap_grad_reduce") and not args.flag("overlap_param_gather_with_optimizer_step")
    return bucket_rules(
        data_parallel=max(1, (parallel.expert_dp if expert else parallel.dp * parallel.cp) // instances),
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
