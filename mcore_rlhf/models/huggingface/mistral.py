"""Mistral: Llama's tensors under another class, and a sliding window over all layers; in Ministral over those that are listed."""

from __future__ import annotations

from dataclasses import replace

from . import dense, moe
from .attention_fields import every, window
from .fields import always
from .llama import LLAMA

MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    class_name="MistralForCausalLM",
    fields=(*dense.FIELDS, window(), always("qk_layernorm", False)),
)

MINISTRAL = replace(
    LLAMA,
    model_type="ministral",
    class_name="MinistralForCausalLM",
    rows=(
        dense.EMBEDDING,
        dense.INPUT_NORM,
        dense.PROJ,
        dense.FUSED_INPUT_NORM,
        dense.QKV,
        *moe.DENSE_MLP,
        dense.FINAL_NORM,
        *dense.HEADS,
    ),
    fields=(*dense.FIELDS, window(rule=every), always("qk_layernorm", False)),
)
