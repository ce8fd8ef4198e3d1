"""Hugging Face's names and shapes, and how they relate to Megatron-core's: one table per architecture."""

from __future__ import annotations

from .llama import LLAMA
from .qwen2 import QWEN2
from .qwen3 import QWEN3
from .table import Architecture

ARCHITECTURES: tuple[Architecture, ...] = (QWEN2, QWEN3, LLAMA)
"""Those that are known; the most particular first, since Llama's rows are all but a subset of the others'."""
