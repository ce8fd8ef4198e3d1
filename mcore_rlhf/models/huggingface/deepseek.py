"""DeepSeek-V2 and V3: latent attention, first layers dense, shared experts; V3 also predicts further tokens.

In multi-latent attention every projection is copied as it is, no row is moved. Sources: transformers 5.23.0,
``models/deepseek_v3/modeling_deepseek_v3.py``; megatron-core 0.16.1, ``transformer/multi_latent_attention.py``,
``models/gpt/gpt_layer_specs.py``. Transformer Engine's names were read, not run.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_rlhf.models.meaning.kinds import Field

from . import dense, moe, mtp
from .attention_fields import LATENT_HEADS, NO_WINDOW
from .expert_fields import FIRST_DENSE, SIGMOID_WEIGHTS, groups
from .fields import always, none_as, only, same, times
from .rotary_fields import latent_rotary
from .table import LOCAL, TRANSFORMER_ENGINE, Architecture, HfTensor, Row

_LAYER = "decoder.layers.{i}.self_attention."
_HF = "model.layers.{i}.self_attn."


def _row(megatron: str, huggingface: str, shape: tuple[str, ...], *needs: str) -> Row:
    return Row(f"{_LAYER}{megatron}", (HfTensor(f"{_HF}{huggingface}", shape),), needs=needs)


ATTENTION = (
    replace(dense.INPUT_NORM, needs=()),  # Transformer Engine keeps it apart here
    _row("linear_proj.weight", "o_proj.weight", ("hidden", "v_rows")),
    _row("linear_q_proj.weight", "q_proj.weight", ("latent_q_rows", "hidden"), "full_q"),
    _row("linear_q_down_proj.weight", "q_a_proj.weight", ("q_lora", "hidden"), "q_lora"),
    _row("linear_q_up_proj.layer_norm_weight", "q_a_layernorm.weight", ("q_lora",), "q_lora", TRANSFORMER_ENGINE),
    _row("linear_q_up_proj.weight", "q_b_proj.weight", ("latent_q_rows", "q_lora"), "q_lora"),
    _row("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight", ("kv_down_rows", "hidden")),
    _row("linear_kv_up_proj.layer_norm_weight", "kv_a_layernorm.weight", ("kv_lora",), TRANSFORMER_ENGINE),
    _row("linear_kv_up_proj.weight", "kv_b_proj.weight", ("kv_up_rows", "kv_lora")),
    _row("q_layernorm.weight", "q_a_layernorm.weight", ("q_lora",), "q_lora", LOCAL),
    _row("kv_layernorm.weight", "kv_a_layernorm.weight", ("kv_lora",), LOCAL),
)

ATTENTION_ORDER = tuple(
    f"{_HF}{name}.weight"
    for name in (
        "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj",
    )
)  # fmt: skip

ATTENTION_FIELDS: tuple[Field, ...] = (
    *dense.COMMON,
    same("q_lora_rank", "q_lora_rank", says_none=True),
    same("kv_lora_rank", "kv_lora_rank"),
    same("qk_nope_head_dim", "qk_head_dim"),
    same("qk_rope_head_dim", "qk_pos_emb_head_dim"),
    same("v_head_dim", "v_head_dim"),
    always("multi_latent_attention", True),
    always("qk_layernorm", True),
    always("position_embedding_type", "rope"),
    LATENT_HEADS,
    NO_WINDOW,
)
"""What the descriptions have in common."""

_ROUTING: tuple[Field, ...] = (
    *moe.fields("n_routed_experts", "num_experts", "num_local_experts"),
    FIRST_DENSE,
    times("n_shared_experts", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "moe_ffn_hidden_size"),
    none_as("routed_scaling_factor", "moe_router_topk_scaling_factor", none=1.0),
    only("moe_layer_freq", 1, "only first_k_dense_replace says which layers are mixtures", written=False),
)

SIGMOID_ROUTING: tuple[Field, ...] = (
    *_ROUTING,
    groups(),
    none_as("num_nextn_predict_layers", "mtp_num_layers", ("num_mtp_layers",)),
    only("scoring_func", "sigmoid", "the architecture scores experts by a sigmoid", written=False),
    SIGMOID_WEIGHTS,
    always("moe_router_score_function", "sigmoid"),
    always("moe_router_enable_expert_bias", True),
    always("moe_router_pre_softmax", False),
)
"""What the descriptions of sigmoid routers with a correction bias have in common."""

_SOFTMAX_ROUTING: tuple[Field, ...] = (
    *_ROUTING,
    groups(grouped="group_limited_greedy", alone="greedy"),
    only("norm_topk_prob", False, "DeepSeek-V2 does not normalise the weights of experts"),
    only("scoring_func", "softmax", "the architecture scores experts by a softmax", written=False),
    always("moe_router_pre_softmax", True),
    always("moe_router_score_function", "softmax"),
    always("moe_router_enable_expert_bias", False),
)


def _order(*gate: str) -> tuple[str, ...]:
    return dense.in_order(
        *mtp.ORDER, *ATTENTION_ORDER, *dense.MLP, *moe.EXPERT_ORDER, *gate, *moe.shared_order("mlp.shared_experts")
    )


_V2_LAYER = (
    *ATTENTION,
    *moe.DENSE_MLP,
    moe.NORM,
    moe.ROUTER,
    *moe.EXPERTS,
    *moe.SHARED,
)
_V3_LAYER = (
    *ATTENTION,
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
    (*ATTENTION_FIELDS, latent_rotary(), *_SOFTMAX_ROUTING),
    moe.PACKED,
    moe.NEEDS,
)

DEEPSEEK_V3 = Architecture(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    (dense.EMBEDDING, *_V3_LAYER, dense.FINAL_NORM, *mtp.rows(_V3_LAYER), *dense.HEADS),
    _order(*moe.ROUTER_ORDER),
    (*ATTENTION_FIELDS, latent_rotary(interleaved=True), *SIGMOID_ROUTING),
    moe.PACKED,
    moe.NEEDS,
)
