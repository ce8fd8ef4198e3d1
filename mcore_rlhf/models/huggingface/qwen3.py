"""Qwen3, dense: every query and key head is normalised; heads need not add up to the hidden size."""

from __future__ import annotations

from dataclasses import replace

from . import dense
from .fields import Always
from .table import Architecture

QWEN3 = Architecture(
    "qwen3",
    "Qwen3ForCausalLM",
    (
        dense.EMBEDDING,
        dense.INPUT_NORM,
        dense.PROJ,
        dense.PROJ_BIAS,
        dense.FUSED_INPUT_NORM,
        dense.QKV,
        replace(dense.QKV_BIAS, optional=True),
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
    (*dense.FIELDS, Always("qk_layernorm", True)),
)
