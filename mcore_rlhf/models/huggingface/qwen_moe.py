"""Qwen2-MoE (with a gated shared expert) and Qwen3-MoE (without): layers are mixtures unless the config lists them."""

from __future__ import annotations

from . import dense, moe
from .attention_fields import every_other_layer, window
from .expert_fields import DENSE_LIST, softmax_weights
from .fields import always, same
from .table import Architecture

_ROUTING = (
    softmax_weights("norm_topk_prob"),
    always("moe_router_score_function", "softmax"),
    DENSE_LIST,
)

QWEN2_MOE = Architecture(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    (
        dense.EMBEDDING,
        *dense.BIASED_ATTENTION,
        *moe.DENSE_MLP,
        moe.NORM,
        moe.ROUTER,
        *moe.EXPERTS,
        moe.SHARED_GATE,
        *moe.shared("mlp.shared_expert"),
        dense.FINAL_NORM,
        *dense.HEADS,
    ),
    dense.in_order(
        *dense.SELF_ATTENTION,
        *dense.MLP,
        *moe.ROUTER_ORDER,
        *moe.EXPERT_ORDER,
        *moe.shared_order("mlp.shared_expert"),
        "model.layers.{i}.mlp.shared_expert_gate.weight",
    ),
    (
        *dense.FIELDS,
        window(switch=True, rule=every_other_layer),
        *moe.fields("num_experts", "num_local_experts"),
        *_ROUTING,
        same("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        always("moe_shared_expert_gate", True),
        always("qk_layernorm", False),
    ),
    moe.PACKED,
    moe.NEEDS,
)

QWEN3_MOE = Architecture(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (
        dense.EMBEDDING,
        *dense.ATTENTION,
        dense.Q_NORM,
        dense.K_NORM,
        *moe.DENSE_MLP,
        moe.NORM,
        moe.ROUTER,
        *moe.EXPERTS,
        dense.FINAL_NORM,
        *dense.HEADS,
    ),
    dense.in_order(*dense.SELF_ATTENTION, *dense.QK_NORMS, *dense.MLP, *moe.EXPERT_ORDER, *moe.ROUTER_ORDER),
    (
        *dense.FIELDS,
        window(switch=True),
        *moe.fields("num_experts", "num_local_experts"),
        *_ROUTING,
        always("qk_layernorm", True),
    ),
    moe.PACKED,
    moe.NEEDS,
    order4=dense.in_order(*dense.SELF_ATTENTION, *dense.QK_NORMS, *dense.MLP, *moe.ROUTER_ORDER, *moe.EXPERT_ORDER),
)
