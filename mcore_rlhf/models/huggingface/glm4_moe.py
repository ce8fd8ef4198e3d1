"""GLM-4.5: the first layers dense, sigmoid routing with a correction bias, shared experts, half of a head rotated.

GLM-4.7-Flash (``glm4_moe_lite``) has DeepSeek-V3's layers. Solar Open has GLM-4.5's, all of them mixtures, without norms of heads.
Source: transformers 5.23.0, ``models/{glm4_moe,glm4_moe_lite,solar_open}``.
"""

from __future__ import annotations

from dataclasses import replace

from . import dense, moe, mtp
from .attention_fields import GROUPED_HEADS, NO_WINDOW
from .deepseek import DEEPSEEK_V3, SIGMOID_ROUTING
from .expert_fields import FIRST_DENSE, SPARSE_LIST
from .fields import always, same
from .rotary_fields import rotary
from .table import Architecture

_LAYER = (
    dense.INPUT_NORM,
    dense.PROJ,
    dense.FUSED_INPUT_NORM,
    dense.QKV,
    replace(dense.QKV_BIAS, optional=True),
    *moe.optional(dense.Q_NORM, dense.K_NORM),
    *moe.DENSE_MLP,
    moe.NORM,
    moe.ROUTER,
    moe.EXPERT_BIAS,
    *moe.EXPERTS,
    *moe.SHARED,
)

GLM4_MOE = Architecture(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    (dense.EMBEDDING, *_LAYER, dense.FINAL_NORM, *mtp.rows(_LAYER), *dense.HEADS),
    dense.in_order(
        *mtp.ORDER,
        *dense.SELF_ATTENTION,
        *dense.QK_NORMS,
        *dense.MLP,
        *moe.EXPERT_ORDER,
        *moe.ROUTER_ORDER,
        *moe.shared_order("mlp.shared_experts"),
    ),
    (
        *dense.COMMON,
        GROUPED_HEADS,
        rotary(partial=True),
        NO_WINDOW,
        *SIGMOID_ROUTING,
        same("use_qk_norm", "qk_layernorm"),
    ),
    moe.PACKED,
    moe.NEEDS,
)

GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    class_name="Glm4MoeLiteForCausalLM",
    fields=tuple(SPARSE_LIST if field is FIRST_DENSE else field for field in DEEPSEEK_V3.fields),
)

_ALL_MIXTURES = [field for field in SIGMOID_ROUTING if field is not FIRST_DENSE]
SOLAR_OPEN = replace(
    GLM4_MOE,
    model_type="solar_open",
    class_name="SolarOpenForCausalLM",
    rows=tuple(
        row for row in GLM4_MOE.rows if row.megatron.startswith(("decoder.", "embedding.", "output_layer."))
        and row.megatron not in (dense.Q_NORM.megatron, dense.K_NORM.megatron) and row not in moe.DENSE_MLP
    ),
    fields=(
        *dense.MIXTURES_ALONE, dense.SILU, always("swiglu", True), always("layernorm_zero_centered_gamma", False), GROUPED_HEADS,
        rotary(partial=True), NO_WINDOW, *_ALL_MIXTURES, always("moe_layer_freq", 1), always("qk_layernorm", False),
    ),
)  # fmt: skip
