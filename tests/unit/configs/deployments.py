"""The models and the runs that ``configs/`` converts, as numbers: a test holds every job against them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mcore_rlhf.layouts.parallel import ParallelConfig


@dataclass(frozen=True)
class Model:
    """What a model's own ``config.json`` says.

    Args:
        layers, hidden, heads, groups, ffn, vocab: As published.
        experts: Routed experts; 0 for a dense model.
        expert_ffn: Width of one expert.
        mtp: Multi-token-prediction layers.
        tied: Whether embeddings are tied.
        mla: Whether attention is multi-latent; then ``groups`` does not count.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    ffn: int
    vocab: int
    experts: int = 0
    expert_ffn: int = 0
    mtp: int = 0
    tied: bool = False
    mla: bool = False

    def args(self, padded: int) -> dict[str, Any]:
        """What Megatron would store in ``args`` of it."""
        return {
            "num_layers": self.layers, "num_attention_heads": self.heads, "num_query_groups": self.groups,
            "group_query_attention": not self.mla, "num_experts": self.experts or None, "mtp_num_layers": self.mtp or None,
            "padded_vocab_size": padded, "make_vocab_size_divisible_by": 128, "swiglu": True,
            "untie_embeddings_and_output_weights": not self.tied, "micro_batch_size": 1, "global_batch_size": 1024,
        }  # fmt: skip


MODELS = {
    "qwen2.5-1.5b": Model(28, 1536, 12, 2, 8960, 151936, tied=True),
    "qwen2.5-7b": Model(28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-32b": Model(64, 5120, 40, 8, 27648, 152064),
    "llama-3-8b": Model(32, 4096, 32, 8, 14336, 128256),
    "llama-3-70b": Model(80, 8192, 64, 8, 28672, 128256),
    "qwen3-30b-a3b": Model(48, 2048, 32, 4, 6144, 151936, experts=128, expert_ffn=768),
    "qwen3-235b-a22b": Model(94, 4096, 64, 4, 12288, 151936, experts=128, expert_ffn=1536),
    "mixtral-8x7b": Model(32, 4096, 32, 8, 14336, 32000, experts=8, expert_ffn=14336),
    "deepseek-v2-lite": Model(27, 2048, 16, 16, 10944, 102400, experts=64, expert_ffn=1408, mla=True),
    "deepseek-v3": Model(61, 7168, 128, 128, 18432, 129280, experts=256, expert_ffn=2048, mtp=1, mla=True),
}


@dataclass(frozen=True)
class Run:
    """The run that a job converts, and what its comments say of the target.

    Args:
        model: Key of ``MODELS``.
        source: The degrees it was trained with.
        gpus: How many GPUs the source and the target have.
        rows: Rows of the embedding before and after.
        split: How the source dealt its layers, as Megatron's ``args``.
    """

    model: str
    source: ParallelConfig
    gpus: tuple[int, int]
    rows: tuple[int, int]
    split: dict[str, Any] = field(default_factory=dict)


_QWEN3_30B = ParallelConfig(tp=4, pp=4, ep=4, etp=1, dp=8)
_LLAMA_70B = ParallelConfig(tp=8, pp=4, etp=8, dp=8)
_QWEN_32B = ParallelConfig(tp=8, pp=8, etp=8, dp=8)

RUNS = {
    "qwen2.5-1.5b-grpo-8-to-4-gpus": Run("qwen2.5-1.5b", ParallelConfig(tp=2, etp=2, dp=4), (8, 4), (152064, 151936)),
    "qwen2.5-1.5b-eval-tp1": Run("qwen2.5-1.5b", ParallelConfig(tp=2, etp=2, dp=4), (8, 1), (152064, 151936)),
    "qwen2.5-7b-grpo-16-to-8-gpus": Run("qwen2.5-7b", ParallelConfig(tp=4, etp=4, dp=4), (16, 8), (152064, 152064)),
    "qwen2.5-7b-eval-tp1": Run("qwen2.5-7b", ParallelConfig(tp=4, etp=4, dp=4), (16, 1), (152064, 152064)),
    "qwen2.5-32b-grpo-512-to-448-gpus": Run("qwen2.5-32b", _QWEN_32B, (512, 448), (152576, 152576)),
    "qwen2.5-32b-eval-tp1": Run("qwen2.5-32b", _QWEN_32B, (512, 1), (152576, 152064)),
    "llama-3-8b-eval-tp1": Run("llama-3-8b", ParallelConfig(tp=2, pp=2, etp=2, dp=8), (32, 1), (128256, 128256)),
    "llama-3-8b-grpo-tp2pp2-to-tp4": Run(
        "llama-3-8b", ParallelConfig(tp=2, pp=2, etp=2, dp=8), (32, 32), (128256, 128512)
    ),
    "llama-3-70b-grpo-256-to-128-gpus": Run("llama-3-70b", _LLAMA_70B, (256, 128), (129024, 129024)),
    "llama-3-70b-grpo-4-gpu-nodes": Run("llama-3-70b", _LLAMA_70B, (256, 256), (129024, 128512)),
    "qwen3-30b-a3b-grpo-128-to-64-gpus": Run("qwen3-30b-a3b", _QWEN3_30B, (128, 64), (152064, 152064)),
    "qwen3-30b-a3b-eval-ep1": Run("qwen3-30b-a3b", _QWEN3_30B, (128, 1), (152064, 151936)),
    "qwen3-235b-a22b-grpo-256-to-128-gpus": Run(
        "qwen3-235b-a22b", ParallelConfig(tp=4, pp=8, ep=16, etp=1, dp=8), (256, 128), (152064, 152064),
        {"decoder_last_pipeline_num_layers": 10},
    ),
    "mixtral-8x7b-grpo-32-to-16-gpus": Run(
        "mixtral-8x7b", ParallelConfig(tp=2, pp=4, ep=4, etp=2, dp=4), (32, 16), (32000, 32000)
    ),
    "deepseek-v2-lite-grpo-8-to-4-gpus": Run("deepseek-v2-lite", ParallelConfig(ep=8, dp=8), (8, 4), (102400, 102400)),
    "deepseek-v3-grpo-1024-to-512-gpus": Run(
        "deepseek-v3",
        ParallelConfig(pp=16, vpp=2, ep=64, dp=64, pipeline_layout="Et*3|(tt|)*29m|L"), (1024, 512), (129280, 129280),
        {"pipeline_model_parallel_layout": "Et*3|(tt|)*29m|L"},
    ),
}  # fmt: skip
