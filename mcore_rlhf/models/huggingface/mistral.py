"""Mistral: Llama's tensors under another class, and a sliding window over all layers."""

from __future__ import annotations

from dataclasses import replace

from . import dense
from .attention_fields import window
from .fields import always
from .llama import LLAMA

MISTRAL = replace(
    LLAMA,
    model_type="mistral",
    class_name="MistralForCausalLM",
    fields=(*dense.FIELDS, window(), always("qk_layernorm", False)),
)
