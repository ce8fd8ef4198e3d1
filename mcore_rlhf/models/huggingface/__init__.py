"""Hugging Face's names and shapes, and how they relate to Megatron-core's: one table per architecture."""

from __future__ import annotations

from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from .glm4_moe import GLM4_MOE
from .llama import LLAMA
from .mistral import MISTRAL
from .mixtral import MIXTRAL
from .qwen2 import QWEN2
from .qwen3 import QWEN3
from .qwen_moe import QWEN2_MOE, QWEN3_MOE
from .table import Architecture

ARCHITECTURES: tuple[Architecture, ...] = (
    QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, DEEPSEEK_V3, DEEPSEEK_V2, GLM4_MOE, MIXTRAL, LLAMA, MISTRAL,
)  # fmt: skip
"""Those that are known. Where nothing but the tensors tells, the first one that fits counts: the most particular ones
come first, since Llama's rows are all but a subset of the others', and Mistral's are Llama's."""
