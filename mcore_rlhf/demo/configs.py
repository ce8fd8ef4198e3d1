"""What the demonstration trains, on which layout and how: plain values without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

GPT_OSS: dict[str, Any] = {
    "softmax_type": "learnable", "window_size": (7, 0), "window_attn_skip_freq": 2, "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 7.0,
}  # fmt: skip
"""What Megatron's configuration and its arguments call what makes a model GPT-OSS, besides its activation."""


@dataclass(frozen=True, slots=True)
class TinyGPT:
    """A GPT small enough for a test, with the switches that change what a checkpoint looks like.

    Args:
        num_layers: Decoder layers.
        hidden_size: Width.
        num_attention_heads: Query heads.
        num_query_groups: Key/value heads; ``None`` for one per query head.
        kv_channels: Size of a head.
        ffn_hidden_size: Width of the MLP (before doubling for a gated activation).
        seq_length: Tokens per sample.
        vocab_size: Tokens of the tokenizer, before padding.
        make_vocab_size_divisible_by: The padded vocabulary is a multiple of this times TP.
        gated: SwiGLU if true, plain GELU otherwise.
        gpt_oss: GPT-OSS's clamped feed-forward in the place of SwiGLU, sinks, and a window in every other layer.
        normalization: Kind of norm.
        add_bias_linear: Biases on all linear layers.
        add_qkv_bias: Bias on the query/key/value layer only.
        qk_layernorm: Norms on queries and keys.
        position_embedding_type: Rotary or learned positions.
        untie_embeddings_and_output_weights: Whether the output layer has a weight of its own.
        num_experts: Experts per MoE layer; ``None`` for a dense model.
        moe_router_topk: Experts per token.
        moe_router_pre_softmax: Take the softmax of all scores, and then the best, whose weights do not add up to 1.
        moe_ffn_hidden_size: Width of an expert.
        moe_shared_expert_intermediate_size: Width of the shared expert; ``None`` for none.
        moe_layer_freq: One MoE layer every so many, or a pattern of 0 and 1 per layer.
        moe_grouped_gemm: Pack the experts of a layer in two tensors (GroupedMLP) instead of one module each.
        moe_router_enable_expert_bias: Balance by a bias (sigmoid scores) instead of a loss.
        multi_latent_attention: DeepSeek's attention.
        q_lora_rank: Rank of its query projection; ``None`` for a full one.
        kv_lora_rank: Rank of its key/value projection.
        mtp_num_layers: Multi-token-prediction layers; ``None`` for none.
        value_head: One value per token in the place of the output layer, as critics have it.
        dtype: Type of the parameters; ``fp64`` is for looking at a model, not for training it.
        dropout: Hidden and attention dropout.
    """

    num_layers: int = 4
    hidden_size: int = 64
    num_attention_heads: int = 4
    num_query_groups: int | None = 2
    kv_channels: int = 16
    ffn_hidden_size: int = 96
    seq_length: int = 32
    vocab_size: int = 132
    make_vocab_size_divisible_by: int = 16
    gated: bool = True
    gpt_oss: bool = False
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    add_bias_linear: bool = False
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    position_embedding_type: Literal["rope", "learned_absolute"] = "rope"
    untie_embeddings_and_output_weights: bool = True
    num_experts: int | None = None
    moe_router_topk: int = 2
    moe_router_pre_softmax: bool = False
    moe_ffn_hidden_size: int = 48
    moe_shared_expert_intermediate_size: int | None = None
    moe_layer_freq: int | tuple[int, ...] = 1
    moe_grouped_gemm: bool = False
    moe_router_enable_expert_bias: bool = False
    multi_latent_attention: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int = 32
    mtp_num_layers: int | None = None
    value_head: bool = False
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    dropout: float = 0.1

    def padded_vocab_size(self, tp: int) -> int:
        """The number of rows of the embedding on ``tp`` tensor-parallel ranks together."""
        multiple = self.make_vocab_size_divisible_by * tp
        return -(-self.vocab_size // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Parallel:
    """Degrees of parallelism, in Megatron's order tp-cp-ep-dp-pp.

    Args:
        tp: Tensor-parallel ranks.
        pp: Pipeline stages.
        vpp: Model chunks per pipeline stage; ``None`` for one, without the interleaved schedule.
        ep: Expert-parallel ranks.
        etp: Tensor-parallel ranks of the experts; ``None`` for ``tp``.
        cp: Context-parallel ranks.
        dp: Data-parallel ranks.
        first_stage_layers: Layers of the first stage, where it differs from the others.
        last_stage_layers: Layers of the last stage, where it differs from the others.
        pipeline_layout: Megatron's string, such as ``Et|ttt|tL``; it fixes the number of chunks, and so ``vpp``.
        sequence_parallel: Split activations along the sequence; required with experts and ``tp`` > 1.
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    dp: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    pipeline_layout: str | None = None
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True, slots=True)
class Training:
    """How to train.

    Args:
        optimizer: Megatron's distributed optimizer, the plain one, or none (losses only).
        micro_batch_size: Samples per forward pass.
        global_batch_size: Samples per step, over all ranks.
        overlap_grad_reduce: Reduce gradients during the backward pass; only then are there several buckets.
        ddp_bucket_size: Elements per bucket; ``None`` for Megatron's default.
        ddp_pad_buckets_for_high_nccl_busbw: Pad buckets to a multiple of 65536.
        accumulate_allreduce_grads_in_fp32: Keep gradients in fp32; ``None`` for Megatron-LM's default (with bf16 only).
        lr: Highest learning rate.
        min_lr: Lowest learning rate.
        decoupled_lr: Learning rate of embedding and output layer, where it differs.
        lr_warmup_iters: Steps of linear warm-up.
        train_iters: Steps of the cosine.
        weight_decay: Weight decay of matrices.
        clip_grad: Largest gradient norm.
        initial_loss_scale: First loss scale, for fp16.
        seed: Of everything random.
    """

    optimizer: Literal["distributed", "plain", "none"] = "distributed"
    micro_batch_size: int = 2
    global_batch_size: int = 4
    overlap_grad_reduce: bool = False
    ddp_bucket_size: int | None = None
    ddp_pad_buckets_for_high_nccl_busbw: bool = False
    accumulate_allreduce_grads_in_fp32: bool | None = None
    lr: float = 1e-3
    min_lr: float = 1e-4
    decoupled_lr: float | None = None
    lr_warmup_iters: int = 2
    train_iters: int = 100
    weight_decay: float = 0.1
    clip_grad: float = 1.0
    initial_loss_scale: float = 2.0**12
    seed: int = 1234

    def grads_in_fp32(self, dtype: str) -> bool:
        """Whether gradients are fp32 whatever the type of the parameters."""
        wanted = self.accumulate_allreduce_grads_in_fp32
        return dtype == "bf16" if wanted is None else wanted

    def num_microbatches(self, dp: int) -> int:
        """Forward passes of one rank per step.

        Raises:
            ValueError: If the global batch cannot be divided.
        """
        count, rest = divmod(self.global_batch_size, self.micro_batch_size * dp)
        if rest:
            raise ValueError(
                f"{self.global_batch_size} samples cannot be split into micro-batches of {self.micro_batch_size} on {dp} ranks"
            )
        return count
