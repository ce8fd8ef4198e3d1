"""Qwen3-Next and Qwen3.5: gated delta nets, every few layers gated attention; norms that count from 0. Mixtures have a gated shared expert.

The gated delta net's own norm counts from 1 in transformers, and from 0 in Megatron, where one argument is for all norms: 1 is taken off.
Qwen3-Next's two tensors of a delta net's input have the parts of every key head together; in Megatron they lie one behind the other,
and so do Qwen3.5's four. Of Qwen3.5 these are the text models; positions of images (``mrope_section``) are those of text there.
Of multi-token prediction there is one layer, with attention as in the last one; transformers passes over it.

Sources: transformers 5.23.0, ``models/qwen3_next/modeling_qwen3_next.py`` (``fix_query_key_value_ordering``, ``Qwen3NextRMSNorm``,
``Qwen3NextRMSNormGated``), ``models/{qwen3_5,qwen3_5_moe}/modeling_*.py``; megatron-core 0.19.2,
``ssm/gated_delta_net/{common,gdn}.py``, ``transformer/attention.py`` (``get_query_key_value_tensors``),
``models/gpt/experimental_attention_variant_module_specs.py``.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_rlhf.models.meaning.kinds import Field

from . import dense, moe, mtp
from .attention_fields import DELTA_LAYERS, GROUPED_HEADS, NO_WINDOW
from .expert_fields import DENSE_LIST, ONE_NEXT_LAYER, softmax_weights
from .fields import always, same
from .rotary_fields import rotary
from .table import FULL, LINEAR, TRANSFORMER_ENGINE, Architecture, Arrangement, HfTensor, Row

_ATTENTION, _HF = "decoder.layers.{i}.self_attention.", "model.layers.{i}.linear_attn."


def _row(megatron: str, huggingface: str, *shape: str) -> Row:
    return Row(f"{_ATTENTION}{megatron}", (HfTensor(f"{_HF}{huggingface}", shape),), needs=(LINEAR,))


_IN = f"{_ATTENTION}in_proj.weight"
_IN_TWO = Row(
    _IN,
    (
        HfTensor(f"{_HF}in_proj_qkvz.weight", ("delta_qkvz_rows", "hidden")),
        HfTensor(f"{_HF}in_proj_ba.weight", ("delta_ba_rows", "hidden")),
    ),
    Arrangement.DELTA,
    needs=(LINEAR,),
    parts=(("key", "key", "value", "value"), ("one", "one")),
)
_IN_FOUR = Row(
    _IN,
    tuple(
        HfTensor(f"{_HF}in_proj_{part}.weight", (rows, "hidden"))
        for part, rows in (
            ("qkv", "delta_qkv_rows"),
            ("z", "delta_v_rows"),
            ("b", "delta_values"),
            ("a", "delta_values"),
        )
    ),
    Arrangement.STACKED,
    needs=(LINEAR,),
)


def _delta_net(in_proj: Row) -> tuple[Row, ...]:
    norm = replace(
        dense.FUSED_INPUT_NORM, megatron=f"{_ATTENTION}in_proj.layer_norm_weight", needs=(LINEAR, TRANSFORMER_ENGINE)
    )
    return (
        _row("dt_bias", "dt_bias", "delta_values"),
        _row("A_log", "A_log", "delta_values"),
        norm,
        in_proj,
        _row("conv1d.weight", "conv1d.weight", "delta_qkv_rows", "one", "kernel"),
        replace(_row("out_norm.weight", "norm.weight", "delta_value"), shift=-1.0),
        _row("out_proj.weight", "out_proj.weight", "hidden", "delta_v_rows"),
    )


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

_FEED_FORWARD = (moe.NORM, moe.ROUTER, *moe.EXPERTS, moe.SHARED_GATE, *moe.shared("mlp.shared_expert"))
_EXPERTS_ORDER = (
    *moe.ROUTER_ORDER,
    *moe.EXPERT_ORDER,
    *moe.shared_order("mlp.shared_expert"),
    "model.layers.{i}.mlp.shared_expert_gate.weight",
)


def _rows(in_proj: Row, *feed_forward: Row) -> tuple[Row, ...]:
    layer = (*_delta_net(in_proj), *GATED_ATTENTION, *feed_forward)
    return (dense.EMBEDDING, *layer, dense.FINAL_NORM, *mtp.rows_beside(layer), *dense.HEADS)


def _order(delta_net: tuple[str, ...], *feed_forward: str) -> tuple[str, ...]:
    inside = (*dense.SELF_ATTENTION, *dense.QK_NORMS, *feed_forward)
    first = (f"{_HF}{name}" for name in ("dt_bias", "A_log", "conv1d.weight"))
    return mtp.order_beside(dense.in_order(*first, *(f"{_HF}{name}.weight" for name in delta_net), *inside))


def _fields(*more: Field) -> tuple[Field, ...]:
    return (
        *more,
        dense.SILU,
        always("swiglu", True),
        always("layernorm_zero_centered_gamma", True),
        GROUPED_HEADS,
        rotary(partial=True),
        NO_WINDOW,
        DELTA_LAYERS,
        *(same(name, name) for name in (
            "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
        )),
        always("attention_output_gate", True),
        always("qk_layernorm", True),
        ONE_NEXT_LAYER,
    )  # fmt: skip


def _experts(*more: Field) -> tuple[Field, ...]:
    return (
        *moe.fields("num_experts", "num_local_experts"),
        *more,
        always("moe_router_score_function", "softmax"),
        same("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        always("moe_shared_expert_gate", True),
    )


QWEN3_NEXT = Architecture(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _rows(_IN_TWO, *moe.DENSE_MLP, *_FEED_FORWARD),
    _order(("in_proj_qkvz", "in_proj_ba", "norm", "out_proj"), *dense.MLP, *_EXPERTS_ORDER),
    _fields(*dense.OF_ANY, *_experts(softmax_weights("norm_topk_prob"), DENSE_LIST)),
    mtp.packed_beside(moe.PACKED),
    moe.NEEDS,
    TRANSFORMER_ENGINE,
)
_QWEN3_5_ORDER = ("norm", "out_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
QWEN3_5 = Architecture(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    _rows(_IN_FOUR, *moe.DENSE_MLP),
    _order(_QWEN3_5_ORDER, *dense.MLP),
    _fields(*dense.OF_ANY),
    implementation=TRANSFORMER_ENGINE,
)
QWEN3_5_MOE = Architecture(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    _rows(_IN_FOUR, *_FEED_FORWARD),
    _order(_QWEN3_5_ORDER, *_EXPERTS_ORDER),
    _fields(*dense.MIXTURES_ALONE, *_experts(softmax_weights())),
    mtp.packed_beside(moe.PACKED),
    moe.NEEDS,
    TRANSFORMER_ENGINE,
)
