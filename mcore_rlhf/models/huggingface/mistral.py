"""Mistral: Llama's tensors under another class, and a sliding window over all layers."""

from __future__ import annotations

from dataclasses import replace

from . import dense
from .fields import Always
from .llama import LLAMA
from .window_fields import Window

MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    class_name="MistralForCausalLM",
    fields=(*dense.FIELDS, Window(), Always("qk_layernorm", False)),
)
