"""Llama 2 and 3: no biases by default, no norms of queries and keys."""

from __future__ import annotations

from . import dense
from .attention_fields import NO_WINDOW
from .fields import always
from .table import Architecture

LLAMA = Architecture(
    "llama",
    "LlamaForCausalLM",
    (
        dense.EMBEDDING,
        *dense.ATTENTION,
        dense.MLP_NORM,
        dense.FUSED_MLP_NORM,
        dense.FC1,
        dense.FC1_BIAS,
        dense.FC2,
        dense.FC2_BIAS,
        dense.FINAL_NORM,
        *dense.HEADS,
    ),
    dense.ORDER,
    (*dense.FIELDS, NO_WINDOW, always("qk_layernorm", False)),
)
