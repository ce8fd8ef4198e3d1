"""Qwen3, dense: every query and key head is normalised; heads need not add up to the hidden size."""

from __future__ import annotations

from . import dense
from .attention_fields import last_layers, window
from .fields import always
from .table import Architecture

QWEN3 = Architecture(
    "qwen3",
    "Qwen3ForCausalLM",
    (
        dense.EMBEDDING,
        *dense.ATTENTION,
        dense.Q_NORM,
        dense.K_NORM,
        dense.MLP_NORM,
        dense.FUSED_MLP_NORM,
        dense.FC1,
        dense.FC2,
        dense.FINAL_NORM,
        *dense.HEADS,
    ),
    dense.ORDER,
    (*dense.FIELDS, window(switch=True, rule=last_layers), always("qk_layernorm", True)),
)
