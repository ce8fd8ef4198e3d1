"""Flags of Megatron-LM with which public models are trained, as a trainer has them in its scripts, and what Megatron makes of them.

Source: THUDM/slime 624b824, ``scripts/models/*.sh``; what is about kernels alone is left out.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

_DENSE = (
    "--swiglu --num-layers {} --hidden-size {} --ffn-hidden-size {} --num-attention-heads {} --group-query-attention --num-query-groups {} "
    "--use-rotary-position-embeddings --disable-bias-linear --normalization RMSNorm --vocab-size {} "
)
_LLAMA31 = (
    "--norm-epsilon 1e-5 --rotary-base 500000 --kv-channels 128 --use-rope-scaling --rotary-percent 1.0 "
    "--untie-embeddings-and-output-weights"
)
_QWEN3_MOE = (
    "--disable-bias-linear --qk-layernorm --group-query-attention --num-attention-heads 32 --num-query-groups 4 --kv-channels 128 "
    "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --normalization RMSNorm --position-embedding-type rope --norm-epsilon 1e-6 "
    "--rotary-percent 1.0 --swiglu --untie-embeddings-and-output-weights --vocab-size 151936 --rotary-base 1000000 --moe-layer-freq [1]*48 "
    "--moe-ffn-hidden-size 768 --moe-router-score-function softmax --moe-router-topk 8 --num-experts 128 --moe-token-drop-policy probs"
)
_SIGMOID = (
    "--moe-router-pre-softmax --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0 --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall "
    "--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
)
_LATENT = "--multi-latent-attention --kv-lora-rank 512 --qk-head-dim {} --qk-pos-emb-head-dim 64 --v-head-dim {} --qk-layernorm "
_DEEPSEEK = (
    "--hidden-size 7168 --ffn-hidden-size 18432 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --num-layers 61 "
    "--norm-epsilon 1e-6 --q-lora-rank 1536 --mscale 1.0 --mscale-all-dim 1.0 --attention-softmax-in-fp32 --moe-router-topk 8 "
)
_GLM45 = (
    "--group-query-attention --num-attention-heads 96 --num-query-groups 8 --kv-channels 128 --add-qkv-bias --rotary-percent 0.5 "
    "--vocab-size 151552 --rotary-base 1000000 --moe-router-topk 8 "
)
PUBLIC: dict[str, str] = {
    "meta-llama/Llama-3.1-8B-Instruct": _DENSE.format(32, 4096, 14336, 32, 8, 128256) + _LLAMA31,
    "Qwen/Qwen2.5-0.5B": _DENSE.format(24, 896, 4864, 14, 2, 151936) + "--add-qkv-bias --norm-epsilon 1e-6 --rotary-base 1000000",
    "Qwen/Qwen3-4B": _DENSE.format(36, 2560, 9728, 32, 8, 151936)
    + "--norm-epsilon 1e-6 --rotary-base 1000000 --kv-channels 128 --qk-layernorm",
    "Qwen/Qwen3-30B-A3B": _QWEN3_MOE,
    "deepseek-ai/DeepSeek-V3": _SIGMOID + _LATENT.format(128, 128) + _DEEPSEEK
    + "--num-attention-heads 128 --vocab-size 129280 --rotary-base 10000 --num-experts 256 --moe-layer-freq [0]*3+[1]*58 "
    "--rotary-scaling-factor 40 --moe-router-topk-scaling-factor 2.5 --moe-router-group-topk 4 --moe-router-num-groups 8",
    "moonshotai/Kimi-K2-Instruct": _SIGMOID + _LATENT.format(128, 128) + _DEEPSEEK
    + "--num-attention-heads 64 --vocab-size 163840 --rotary-base 50000 --num-experts 384 --moe-layer-freq [0]*1+[1]*60 "
    "--rotary-scaling-factor 32.0 --moe-router-topk-scaling-factor 2.827 --moe-router-group-topk 1 --moe-router-num-groups 1",
    "zai-org/GLM-4.5-Air": _SIGMOID + _GLM45
    + "--num-layers 46 --hidden-size 4096 --ffn-hidden-size 10944 --moe-layer-freq [0]*1+[1]*45 --num-experts 128 "
    "--moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 1408",
    "zai-org/GLM-4.7-Flash": _SIGMOID + _LATENT.format(192, 256)
    + "--moe-layer-freq [0]*1+[1]*46 --num-experts 64 --moe-shared-expert-intermediate-size 1536 --moe-router-topk 4 "
    "--moe-ffn-hidden-size 1536 --moe-router-topk-scaling-factor 1.8 --make-vocab-size-divisible-by 64 --num-layers 47 --hidden-size 2048 "
    "--ffn-hidden-size 10240 --num-attention-heads 20 --add-qkv-bias --no-position-embedding --q-lora-rank 768 --kv-channels 192 "
    "--vocab-size 154880 --rotary-base 1000000",
}  # fmt: skip
"""By the name under which the model is published."""


def arguments_of(flags: str) -> dict[str, Any]:
    """What Megatron's own parser makes of flags, and its own validation of that."""
    import mcore_rlhf.demo.with_megatron  # noqa: F401

    # isort: split
    from megatron.training.arguments import parse_args, validate_args

    run = (
        "--bf16 --micro-batch-size 1 --max-position-embeddings 4096 --seq-length 4096 --transformer-impl local --lr 1e-5 --train-iters 1 "
        "--attention-dropout 0.0 --hidden-dropout 0.0"
    )
    with mock.patch.object(sys, "argv", ["pretrain", *flags.split(), *run.split()]):
        args = parse_args()
    validate_args(args)
    return {name: value for name, value in vars(args).items() if isinstance(value, str | int | float | list | None)}
