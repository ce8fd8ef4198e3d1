"""DeepSeek-V2 and V3: latent attention, first layers dense, shared experts; V3 also predicts further tokens."""

from __future__ import annotations

from . import dense, latent, moe, mtp
from .expert_fields import FirstDense, Groups, SigmoidWeights
from .fields import Always, Field, NoneAs, Only, Times
from .rotary_fields import LatentRotary
from .table import Architecture

_ROUTING: tuple[Field, ...] = (
    *moe.fields("n_routed_experts", "num_experts", "num_local_experts"),
    FirstDense(),
    Times("n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_ffn_hidden_size"),
    NoneAs("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0),
    Only("moe_layer_freq", 1, "only first_k_dense_replace says which layers are mixtures", written=False),
)

SIGMOID_ROUTING: tuple[Field, ...] = (
    *_ROUTING,
    Groups(),
    NoneAs("num_nextn_predict_layers", "mtp_num_layers", 0, ("num_mtp_layers",)),
    Only("scoring_func", "sigmoid", "the architecture scores experts by a sigmoid", written=False),
    SigmoidWeights(),
    Always("moe_router_score_function", "sigmoid"),
    Always("moe_router_enable_expert_bias", True),
    Always("moe_router_pre_softmax", False),
)
"""What the descriptions of sigmoid routers with a correction bias have in common."""

_SOFTMAX_ROUTING: tuple[Field, ...] = (
    *_ROUTING,
    Groups(grouped="group_limited_greedy", alone="greedy"),
    Only("norm_topk_prob", False, "DeepSeek-V2 does not normalise the weights of experts"),
    Only("scoring_func", "softmax", "the architecture scores experts by a softmax", written=False),
    Always("moe_router_pre_softmax", True),
    Always("moe_router_score_function", "softmax"),
    Always("moe_router_enable_expert_bias", False),
)


def _order(*gate: str) -> tuple[str, ...]:
    return dense.in_order(
        *mtp.ORDER, *latent.ORDER, *dense.MLP, *moe.EXPERT_ORDER, *gate, *moe.shared_order("mlp.shared_experts")
    )


_V2_LAYER = (
    latent.INPUT_NORM,
    *latent.ATTENTION,
    *moe.DENSE_MLP,
    moe.NORM,
    moe.ROUTER,
    *moe.EXPERTS,
    *moe.SHARED,
)
_V3_LAYER = (
    latent.INPUT_NORM,
    *latent.ATTENTION,
    *moe.DENSE_MLP,
    moe.NORM,
    moe.ROUTER,
    moe.EXPERT_BIAS,
    *moe.EXPERTS,
    *moe.SHARED,
)

DEEPSEEK_V2 = Architecture(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    (dense.EMBEDDING, *_V2_LAYER, dense.FINAL_NORM, *dense.HEADS),
    _order(*moe.ROUTER_ORDER),
    (*latent.FIELDS, LatentRotary(), *_SOFTMAX_ROUTING),
    moe.PACKED,
    moe.NEEDS,
)

DEEPSEEK_V3 = Architecture(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    (dense.EMBEDDING, *_V3_LAYER, dense.FINAL_NORM, *mtp.rows(_V3_LAYER), *dense.HEADS),
    _order(*moe.ROUTER_ORDER),
    (*latent.FIELDS, LatentRotary(interleaved=True), *SIGMOID_ROUTING),
    moe.PACKED,
    moe.NEEDS,
)
