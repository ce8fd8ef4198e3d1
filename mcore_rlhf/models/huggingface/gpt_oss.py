"""GPT-OSS: attention with sinks and, in every other layer, a window; experts with biases and a clamped feed-forward.

All experts of a layer lie in one tensor, on disk as in memory, transposed and with gate and up in turn. Released folders have
them in MXFP4, which is another form of the same. Sources: transformers 5.23.0, ``models/gpt_oss/modeling_gpt_oss.py``;
megatron-core 0.16.1 and 0.19.2, ``transformer/dot_product_attention.py``, ``transformer/moe/{router,experts}.py``;
NVIDIA-NeMo/Megatron-Bridge, ``src/megatron/bridge/models/gpt_oss``. Transformer Engine's names were read, not run.
"""

from __future__ import annotations

from dataclasses import replace

from . import dense, moe
from .attention_fields import GROUPED_HEADS, every_other, window
from .expert_fields import CLAMPED_GATE, softmax_weights
from .fields import always
from .rotary_fields import rotary
from .table import GROUPED, MIXTURE, SEQUENTIAL, Architecture, Arrangement, HfTensor, Row

_LAYER, _HF = "decoder.layers.{i}.", "model.layers.{i}."
_GATE_UP, _DOWN = ("experts", "hidden", "twice_ffn"), ("experts", "expert_ffn", "hidden")

_SINKS = Row(f"{_LAYER}self_attention.core_attention.softmax_offset", (HfTensor(f"{_HF}self_attn.sinks", ("heads",)),))
_ROUTER_BIAS = Row(f"{_LAYER}mlp.router.bias", (HfTensor(f"{_HF}mlp.router.bias", ("experts",)),), needs=(MIXTURE,))


def _expert(first: str, second: str, weight: str, bias: str, spelling: str) -> tuple[Row, ...]:
    """An expert's rows, given what Megatron calls its matrices, and what a matrix and a bias are called in them."""

    def row(name: str, tensor: str, shape: tuple[str, ...], arrangement: Arrangement) -> Row:
        return Row(
            f"{_LAYER}mlp.experts.{name}", (HfTensor(f"{_HF}mlp.experts.{tensor}", shape),), arrangement,
            needs=(MIXTURE, spelling),
        )  # fmt: skip

    return (
        row(f"{first}.{weight}", "gate_up_proj", _GATE_UP, Arrangement.IN_TURN),
        row(f"{first}.{bias}", "gate_up_proj_bias", (_GATE_UP[0], _GATE_UP[2]), Arrangement.IN_TURN),
        row(f"{second}.{weight}", "down_proj", _DOWN, Arrangement.SLICE),
        row(f"{second}.{bias}", "down_proj_bias", (_DOWN[0], _DOWN[2]), Arrangement.SLICE),
    )


_ONE = "local_experts.{e}."

GPT_OSS = Architecture(
    "gpt_oss",
    "GptOssForCausalLM",
    (
        dense.EMBEDDING,
        dense.INPUT_NORM,
        _SINKS,
        dense.PROJ,
        replace(dense.PROJ_BIAS, optional=False),
        dense.FUSED_INPUT_NORM,
        dense.QKV,
        dense.QKV_BIAS,
        moe.NORM,
        moe.router("mlp.router"),
        _ROUTER_BIAS,
        *_expert(f"{_ONE}linear_fc1", f"{_ONE}linear_fc2", "weight", "bias", SEQUENTIAL),
        *_expert("linear_fc1", "linear_fc2", "weight{e}", "bias{e}", GROUPED),
        dense.FINAL_NORM,
        *dense.HEADS,
    ),
    dense.in_order(
        f"{_HF}self_attn.sinks",
        *dense.SELF_ATTENTION,
        *(f"{_HF}mlp.router.{part}" for part in ("weight", "bias")),
        *(f"{_HF}mlp.experts.{part}_proj{kind}" for part in ("gate_up", "down") for kind in ("", "_bias")),
    ),
    (
        *dense.OF_ANY,
        dense.SILU,
        GROUPED_HEADS,
        rotary(scaled=True),
        window(rule=every_other),
        *moe.fields("num_local_experts", "num_experts", ffn="intermediate_size"),
        CLAMPED_GATE,
        softmax_weights(),
        always("layernorm_zero_centered_gamma", False),
        always("moe_router_score_function", "softmax"),
        always("qk_layernorm", False),
        always("softmax_type", "learnable"),
    ),
    needs=moe.NEEDS,
)
