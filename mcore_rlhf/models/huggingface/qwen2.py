"""Qwen2 and Qwen2.5, dense: biases of queries, keys and values, and of nothing else."""

from __future__ import annotations

from . import dense
from .attention_fields import last_layers, window
from .fields import always
from .table import Architecture

QWEN2 = Architecture(
    "qwen2",
    "Qwen2ForCausalLM",
    (
        dense.EMBEDDING,
        *dense.BIASED_ATTENTION,
        dense.MLP_NORM,
        dense.FUSED_MLP_NORM,
        dense.FC1,
        dense.FC2,
        dense.FINAL_NORM,
        *dense.HEADS,
    ),
    dense.ORDER,
    (*dense.FIELDS, window(switch=True, rule=last_layers), always("qk_layernorm", False)),
)
