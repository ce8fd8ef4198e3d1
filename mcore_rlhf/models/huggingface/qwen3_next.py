"""Qwen3-Next: gated delta nets, every few layers gated attention, mixtures with a gated shared expert; norms that count from 0.

The gated delta net's own norm counts from 1 in transformers, and from 0 in Megatron, where one argument is for all norms: 1 is taken off.
On disk and in memory the parts of a delta net's input lie together for every key head; in Megatron they lie one behind the other.
Layers of multi-token prediction, which transformers passes over, are refused.

Sources: transformers 5.23.0, ``models/qwen3_next/modeling_qwen3_next.py`` (``fix_query_key_value_ordering``, ``Qwen3NextRMSNorm``,
``Qwen3NextRMSNormGated``); megatron-core 0.19.2, ``ssm/gated_delta_net/{common,gdn}.py``, ``transformer/attention.py``
(``get_query_key_value_tensors``), ``models/gpt/experimental_attention_variant_module_specs.py``.
"""

from __future__ import annotations

from dataclasses import replace

from . import dense, moe
from .attention_fields import DeltaLayers, Heads, NoWindow
from .expert_fields import DenseList, SoftmaxWeights
from .fields import Always, Same
from .rotary_fields import Rotary
from .table import FULL, LINEAR, TRANSFORMER_ENGINE, Architecture, Arrangement, HfTensor, Row

_ATTENTION, _HF = "decoder.layers.{i}.self_attention.", "model.layers.{i}.linear_attn."


def _row(megatron: str, huggingface: str, *shape: str) -> Row:
    return Row(f"{_ATTENTION}{megatron}", (HfTensor(f"{_HF}{huggingface}", shape),), needs=(LINEAR,))


_IN = (
    HfTensor(f"{_HF}in_proj_qkvz.weight", ("delta_qkvz_rows", "hidden")),
    HfTensor(f"{_HF}in_proj_ba.weight", ("delta_ba_rows", "hidden")),
)
DELTA_NET = (
    _row("dt_bias", "dt_bias", "delta_values"),
    _row("A_log", "A_log", "delta_values"),
    replace(dense.FUSED_INPUT_NORM, megatron=f"{_ATTENTION}in_proj.layer_norm_weight", needs=(LINEAR, TRANSFORMER_ENGINE)),
    Row(
        f"{_ATTENTION}in_proj.weight", _IN, Arrangement.DELTA, needs=(LINEAR,),
        parts=(("key", "key", "value", "value"), ("one", "one")),
    ),
    _row("conv1d.weight", "conv1d.weight", "delta_qkv_rows", "one", "kernel"),
    replace(_row("out_norm.weight", "norm.weight", "delta_value"), shift=-1.0),
    _row("out_proj.weight", "out_proj.weight", "hidden", "delta_v_rows"),
)  # fmt: skip
_QUERY = replace(dense.QKV.huggingface[0], shape=("gated_q_rows", "hidden"))
GATED_ATTENTION = tuple(
    replace(row, needs=(*row.needs, FULL))
    for row in (
        dense.PROJ,
        dense.FUSED_INPUT_NORM,
        replace(dense.QKV, huggingface=(_QUERY, *dense.QKV.huggingface[1:]), arrangement=Arrangement.GATED),
        dense.Q_NORM,
        dense.K_NORM,
    )
)

QWEN3_NEXT = Architecture(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    (
        dense.EMBEDDING,
        *DELTA_NET,
        *GATED_ATTENTION,
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
        *(f"{_HF}{name}" for name in ("dt_bias", "A_log", "conv1d.weight")),
        *(f"{_HF}{name}.weight" for name in ("in_proj_qkvz", "in_proj_ba", "norm", "out_proj")),
        *dense.SELF_ATTENTION,
        *dense.QK_NORMS,
        *dense.MLP,
        *moe.ROUTER_ORDER,
        *moe.EXPERT_ORDER,
        *moe.shared_order("mlp.shared_expert"),
        "model.layers.{i}.mlp.shared_expert_gate.weight",
    ),
    (
        *dense.OF_ANY,
        Always("swiglu", True),
        Always("layernorm_zero_centered_gamma", True),
        Heads(),
        Rotary(partial=True),
        NoWindow(),
        DeltaLayers(),
        *(Same(name, name) for name in (
            "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
        )),
        Always("attention_output_gate", True),
        Always("qk_layernorm", True),
        *moe.fields("num_experts", "num_local_experts"),
        SoftmaxWeights("norm_topk_prob"),
        Always("moe_router_score_function", "softmax"),
        DenseList(),
        Same("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        Always("moe_shared_expert_gate", True),
    ),
    moe.PACKED,
    moe.NEEDS,
    TRANSFORMER_ENGINE,
)  # fmt: skip
