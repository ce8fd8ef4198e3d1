"""Mistral: Llama's tensors under another class."""

from __future__ import annotations

from dataclasses import replace

from .llama import LLAMA

MISTRAL = replace(LLAMA, model_type="mistral", class_name="MistralForCausalLM")
