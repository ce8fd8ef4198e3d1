"""Mistral: Llama's tensors under another class, and a sliding window over all layers."""

from __future__ import annotations

from dataclasses import replace

from . import dense
from .attention_fields import Window
from .fields import Always
from .llama import LLAMA

MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    class_name="MistralForCausalLM",
    fields=(*dense.FIELDS, Window(), Always("qk_layernorm", False)),
)
