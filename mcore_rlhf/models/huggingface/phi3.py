"""Phi-3 and Phi-4: Llama's layers, with queries, keys and values in one tensor, and gate and up in another.

Their queries come first, then all keys, then all values; Megatron has them group by group. Of scaled positions the class knows
``longrope`` alone, which Megatron does not have; what it calls ``yarn`` is the same.
Sources: transformers 5.23.0, ``models/phi3/{modeling,configuration}_phi3.py``; megatron-core 0.19.2, ``transformer/{attention,mlp}.py``.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_rlhf.models.meaning.kinds import Field

from . import dense
from .attention_fields import GROUPED_HEADS, window
from .fields import always
from .rotary_fields import rotary
from .table import Architecture, Arrangement, HfTensor

_HF = "model.layers.{i}."
FUSED_QKV = replace(
    dense.QKV,
    huggingface=(HfTensor(f"{_HF}self_attn.qkv_proj.weight", ("qkv_rows", "hidden")),),
    arrangement=Arrangement.FUSED,
)
FUSED_FC1 = replace(
    dense.FC1,
    huggingface=(HfTensor(f"{_HF}mlp.gate_up_proj.weight", ("gate_up_rows", "hidden")),),
    arrangement=Arrangement.SAME,
)
MLP_ORDER = tuple(f"{_HF}mlp.{part}_proj.weight" for part in ("gate_up", "down"))

PHI3 = Architecture(
    "phi3",
    "Phi3ForCausalLM",
    (
        dense.EMBEDDING,
        dense.INPUT_NORM,
        dense.PROJ,
        dense.FUSED_INPUT_NORM,
        FUSED_QKV,
        dense.MLP_NORM,
        dense.FUSED_MLP_NORM,
        FUSED_FC1,
        dense.FC2,
        dense.FINAL_NORM,
        *dense.HEADS,
    ),
    dense.in_order(*(f"{_HF}self_attn.{part}_proj.weight" for part in ("o", "qkv")), *MLP_ORDER),
    (
        *dense.COMMON,
        GROUPED_HEADS,
        rotary(partial=True, scalable=False),
        Field(("original_max_position_embeddings",)),  # longrope alone looks at it
        window(),
        always("qk_layernorm", False),
    ),
)
