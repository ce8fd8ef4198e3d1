"""The model whose checkpoint is measured: a Llama-like GPT with the layers of Qwen3-0.6B, as many as a size asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

HIDDEN, HEADS, GROUPS, CHANNELS, FFN, VOCABULARY = 1024, 16, 8, 128, 3072, 32768
BYTES_PER_PARAM = 2 + 3 * 4
"""A bf16 parameter, its fp32 master and Adam's two moments."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Local:
    """One parameter of one rank: its name, its local shape, and whether all ranks hold the same."""

    name: str
    shape: Shape
    replicated: bool

    @property
    def numel(self) -> int:
        return prod(self.shape)


def local_params(num_layers: int, tp: int) -> Iterator[Local]:
    """The parameters of one tensor-parallel rank, in registration order."""
    yield Local("embedding.word_embeddings.weight", (VOCABULARY // tp, HIDDEN), False)
    for layer in range(num_layers):
        for name, shape, replicated in _layer(tp):
            yield Local(f"decoder.layers.{layer}.{name}", shape, replicated)
    yield Local("decoder.final_layernorm.weight", (HIDDEN,), True)
    yield Local("output_layer.weight", (VOCABULARY // tp, HIDDEN), False)


def _layer(tp: int) -> Iterator[tuple[str, Shape, bool]]:
    yield "input_layernorm.weight", (HIDDEN,), True
    yield "self_attention.linear_proj.weight", (HIDDEN, HEADS * CHANNELS // tp), False
    yield "self_attention.linear_qkv.weight", ((HEADS + 2 * GROUPS) * CHANNELS // tp, HIDDEN), False
    yield "pre_mlp_layernorm.weight", (HIDDEN,), True
    yield "mlp.linear_fc1.weight", (2 * FFN // tp, HIDDEN), False
    yield "mlp.linear_fc2.weight", (HIDDEN, FFN // tp), False


def layers_for(gigabytes: float) -> int:
    """How many layers make a checkpoint of about that size (10^9 bytes)."""
    outside = 2 * VOCABULARY * HIDDEN + HIDDEN
    per_layer = sum(prod(shape) for _, shape, _ in _layer(1))
    return max(1, round((gigabytes * 1e9 / BYTES_PER_PARAM - outside) / per_layer))


def arguments(num_layers: int, tp: int) -> dict[str, object]:
    """What Megatron's ``args`` say of the model and of the run."""
    return {
        "num_layers": num_layers, "hidden_size": HIDDEN, "ffn_hidden_size": FFN, "num_attention_heads": HEADS,
        "num_query_groups": GROUPS, "group_query_attention": True, "kv_channels": CHANNELS, "swiglu": True,
        "normalization": "RMSNorm", "add_bias_linear": False, "add_qkv_bias": False, "num_experts": None,
        "untie_embeddings_and_output_weights": True, "position_embedding_type": "rope", "transformer_impl": "local",
        "padded_vocab_size": VOCABULARY, "vocab_size": VOCABULARY, "make_vocab_size_divisible_by": 128,
        "bf16": True, "fp16": False, "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1, "data_parallel_size": 1, "world_size": tp, "rank": 0, "sequence_parallel": False,
        "virtual_pipeline_model_parallel_size": None, "use_distributed_optimizer": True, "overlap_grad_reduce": False,
        "ddp_bucket_size": None, "accumulate_allreduce_grads_in_fp32": True, "seed": 1234, "iteration": 100,
        "consumed_train_samples": 6400, "micro_batch_size": 1, "global_batch_size": 64,
    }  # fmt: skip
