"""dots.llm1: Qwen3's attention, DeepSeek-V3's mixtures. Source: transformers 5.23.0, ``models/dots1/modeling_dots1.py``."""

from __future__ import annotations

from . import dense, moe
from .attention_fields import last_layers, window
from .deepseek import SIGMOID_ROUTING
from .fields import always
from .table import Architecture

DOTS1 = Architecture(
    "dots1",
    "Dots1ForCausalLM",
    (
        dense.EMBEDDING,
        dense.INPUT_NORM,
        dense.PROJ,
        dense.FUSED_INPUT_NORM,
        dense.QKV,
        dense.Q_NORM,
        dense.K_NORM,
        *moe.DENSE_MLP,
        moe.NORM,
        moe.ROUTER,
        moe.EXPERT_BIAS,
        *moe.EXPERTS,
        *moe.SHARED,
        dense.FINAL_NORM,
        *dense.HEADS,
    ),
    dense.in_order(
        *dense.SELF_ATTENTION,
        *dense.QK_NORMS,
        *dense.MLP,
        *moe.EXPERT_ORDER,
        *moe.ROUTER_ORDER,
        *moe.shared_order("mlp.shared_experts"),
    ),
    (*dense.FIELDS, window(rule=last_layers), *SIGMOID_ROUTING, always("qk_layernorm", True)),
    moe.PACKED,
    moe.NEEDS,
)
