"""Megatron's stored ``args``: what they say of the layout, and what they must say for a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_rlhf.core.dtype import DType, dtype_of
from mcore_rlhf.layouts.parallel import ParallelConfig, least_dp
from mcore_rlhf.layouts.pipeline import PipelineSplit

DISTRIBUTED, PLAIN = "distributed", "plain"
"""Kinds of optimizer: one that is cut over data-parallel ranks, and one that every rank has whole."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A typed view of the attributes of ``args``; missing ones read as their default.

    Source of the names: Megatron-LM core_v0.16.1, ``megatron/training/arguments.py``.
    """

    values: Mapping[str, object]

    def integer(self, name: str, default: int = 0) -> int:
        """An integer attribute; None counts as missing."""
        value = self.values.get(name)
        return default if value is None or not isinstance(value, int) else int(value)

    def optional(self, name: str) -> int | None:
        """An integer attribute, or None."""
        value = self.values.get(name)
        return int(value) if isinstance(value, int) and not isinstance(value, bool) else None

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean attribute."""
        value = self.values.get(name)
        return default if value is None else bool(value)

    def number(self, name: str) -> float | None:
        """A numeric attribute, or None."""
        value = self.values.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    @property
    def num_experts(self) -> int:
        """Routed experts per layer; 0 for a dense model."""
        return self.integer("num_experts")

    @property
    def mtp_layers(self) -> int:
        """Multi-token-prediction layers."""
        return self.integer("mtp_num_layers")

    @property
    def tied(self) -> bool:
        """Whether the output layer shares the embedding's weight."""
        return not self.flag("untie_embeddings_and_output_weights", default=True)

    @property
    def gated(self) -> bool:
        """Whether the feed-forward is gated."""
        return self.flag("swiglu") or self.flag("quick_geglu") or self.flag("geglu")

    @property
    def transformer_engine(self) -> bool:
        """Whether the layers are Transformer Engine's."""
        return self.values.get("transformer_impl", "transformer_engine") != "local"

    @property
    def vocab_size(self) -> int | None:
        """True number of words, extra ids included; None where the run did not store it.

        ``NullTokenizer`` adds an end-of-document word to what ``--vocab-size`` says.
        Source: Megatron-LM core_v0.16.1, ``megatron/training/tokenizer/tokenizer.py``.
        """
        size = self.optional("vocab_size")
        if size is None:
            return None
        extra = 1 if self.values.get("tokenizer_type") == "NullTokenizer" else 0
        return size + extra + self.integer("vocab_extra_ids")

    @property
    def params_dtype(self) -> DType | None:
        """Element type of the parameters."""
        value = self.values.get("params_dtype")
        return dtype_of(value) if value is not None else None

    @property
    def pipeline_split(self) -> PipelineSplit:
        """How decoder layers are dealt to stages."""
        layout = self.values.get("pipeline_model_parallel_layout")
        text = layout if isinstance(layout, str) else _layout_text(layout)
        return PipelineSplit(
            first=self.optional("decoder_first_pipeline_num_layers"),
            last=self.optional("decoder_last_pipeline_num_layers"),
            count_embedding=self.flag("account_for_embedding_in_pipeline_split"),
            count_loss=self.flag("account_for_loss_in_pipeline_split"),
            layout=text,
        )

    def parallel(self) -> ParallelConfig:
        """The degrees of the run that wrote the files."""
        tp = self.integer("tensor_model_parallel_size", self.integer("model_parallel_size", 1)) or 1
        pp = self.integer("pipeline_model_parallel_size", 1) or 1
        cp = self.integer("context_parallel_size", 1) or 1
        ep = (self.integer("expert_model_parallel_size", 1) or 1) if self.num_experts else 1
        etp = (self.integer("expert_tensor_parallel_size", tp) or tp) if self.num_experts else tp
        dp = self.integer("data_parallel_size") or max(1, self.integer("world_size", 1) // (tp * pp * cp))
        dp = dp if (tp * cp * dp) % (etp * ep) == 0 else least_dp(tp, cp, ep, etp)
        layout = self.pipeline_split.layout
        return ParallelConfig(tp, pp, self._vpp(pp), cp, ep, etp, dp, layout)

    def _vpp(self, pp: int) -> int:
        if pp == 1:
            return 1
        return self.integer("virtual_pipeline_model_parallel_size", 1) or 1


def stored_arguments(tree: Mapping[str, object]) -> dict[str, object]:
    """The ``args`` of a model file as a dictionary; empty where it has none. Some tools store a dictionary itself."""
    args = tree.get("args")
    if args is None or isinstance(args, dict):
        return dict(args or {})
    return dict(vars(args))


def _layout_text(layout: object) -> str | None:
    """The text of a layout that was stored as Megatron's own object (read as a stub)."""
    state = getattr(layout, "__dict__", {})
    text = state.get("input_data") if isinstance(state, dict) else None
    return text if isinstance(text, str) else None


def arguments_for(
    old: Mapping[str, object],
    parallel: ParallelConfig,
    split: PipelineSplit,
    *,
    rank: int | None,
    padded_vocab_size: int | None,
    params_dtype: DType | None,
    optimizer: str | None,
    ckpt_format: str = "torch",
) -> dict[str, object]:
    """The arguments that a run at the new layout would have stored.

    Only what depends on the layout changes, and only attributes that the source has, or that the layout needs, are set.

    Args:
        old: The source's arguments.
        parallel: The new degrees.
        split: How layers are dealt.
        rank: The rank that writes the file; None where ranks stay what they were.
        padded_vocab_size: Rows of the embedding.
        params_dtype: A torch name for the parameters' element type when it changes, else None.
        optimizer: ``distributed``, ``plain`` or None.
        ckpt_format: Megatron's name of the format that is written: ``torch`` or ``torch_dist``.
    """
    vpp = parallel.vpp if parallel.vpp > 1 else None
    moe = bool(old.get("num_experts"))
    always: dict[str, object] = {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "context_parallel_size": parallel.cp,
        "data_parallel_size": parallel.dp,
        "world_size": parallel.world_size,
        "virtual_pipeline_model_parallel_size": vpp,
    }
    where_present: dict[str, object] = {
        "transformer_pipeline_model_parallel_size": parallel.pp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "decoder_first_pipeline_num_layers": split.first,
        "decoder_last_pipeline_num_layers": split.last,
        "account_for_embedding_in_pipeline_split": split.count_embedding,
        "account_for_loss_in_pipeline_split": split.count_loss,
        "pipeline_model_parallel_layout": split.layout,
        "sequence_parallel": parallel.tp > 1 and (bool(old.get("sequence_parallel")) or moe),
        "padded_vocab_size": padded_vocab_size,
    }
    if parallel.tp == 1:
        where_present["tp_comm_overlap"] = False  # overlaps what sequence parallelism communicates
    if old.get("ckpt_format") not in (None, ckpt_format):
        where_present.update(ckpt_format=ckpt_format, use_dist_ckpt=ckpt_format == "torch_dist")
    if rank is not None:
        where_present.update(rank=rank, local_rank=0)
    if old.get("inprocess_active_world_size") == old.get("world_size"):
        where_present["inprocess_active_world_size"] = parallel.world_size
    new = dict(old)
    new.update(always)
    new.update((name, value) for name, value in where_present.items() if name in old or value not in (None, False))
    new.update(_virtual_stage_arguments(old, parallel, split))
    if optimizer is not None:
        new.update(_optimizer_arguments(old, optimizer))
    if params_dtype is not None:
        bf16 = params_dtype.name == "bfloat16"
        new.update(bf16=bf16, fp16=params_dtype.name == "float16")
        if "accumulate_allreduce_grads_in_fp32" in old:  # Megatron's default follows the parameters' type
            new["accumulate_allreduce_grads_in_fp32"] = bf16 and not old.get("grad_reduce_in_bf16")
    return new


def _virtual_stage_arguments(
    old: Mapping[str, object], parallel: ParallelConfig, split: PipelineSplit
) -> dict[str, object]:
    """How Megatron is told of virtual stages: by their layers where all are equal, by their number, or by a layout."""
    layers = old.get("num_layers")
    virtual = parallel.vpp > 1 and split.layout is None
    per_chunk = layers // (parallel.pp * parallel.vpp) if virtual and split.even and isinstance(layers, int) else None
    new: dict[str, object] = {"num_layers_per_virtual_pipeline_stage": per_chunk}
    if "num_virtual_stages_per_pipeline_rank" in old or (virtual and per_chunk is None):
        new["num_virtual_stages_per_pipeline_rank"] = parallel.vpp if virtual and per_chunk is None else None
    if (parallel.vpp > 1) != bool(old.get("virtual_pipeline_model_parallel_size")):
        dependent = ("overlap_p2p_comm", "align_param_gather")  # Megatron's defaults; only virtual stages can have them
        new.update((name, parallel.vpp > 1) for name in dependent if name in old)
    return new


def _optimizer_arguments(old: Mapping[str, object], optimizer: str) -> dict[str, object]:
    """Megatron overlaps the gathering of parameters with the distributed optimizer only."""
    new: dict[str, object] = {"use_distributed_optimizer": optimizer == "distributed"}
    if optimizer == "plain":
        dependent = ("overlap_param_gather", "align_param_gather", "overlap_param_gather_with_optimizer_step")
        new.update((name, False) for name in dependent if name in old)
    return new
