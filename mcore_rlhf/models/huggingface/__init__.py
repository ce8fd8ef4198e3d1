"""Hugging Face's names and shapes, and how they relate to Megatron-core's: one table per architecture."""

from __future__ import annotations

from .deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from .glm4_moe import GLM4_MOE
from .gpt_oss import GPT_OSS
from .llama import LLAMA
from .mistral import MISTRAL
from .mixtral import MIXTRAL
from .qwen2 import QWEN2
from .qwen3 import QWEN3
from .qwen3_next import QWEN3_NEXT
from .qwen_moe import QWEN2_MOE, QWEN3_MOE
from .table import Architecture

ARCHITECTURES: tuple[Architecture, ...] = (
    QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, QWEN3_NEXT, DEEPSEEK_V3, DEEPSEEK_V2, GLM4_MOE, MIXTRAL, GPT_OSS, LLAMA, MISTRAL,
)  # fmt: skip
"""Those that are known. Where nothing but the tensors tells, the first one that fits counts: the most particular ones
come first, since Llama's rows are all but a subset of the others', and Mistral's are Llama's."""

_ZERO_CENTRED = "its norms multiply by 1 + weight, and its embeddings by the root of the hidden size"
_FOUR_NORMS = "its layers have four norms, after attention and feed-forward as well, for which Megatron has no place"

_DELTA_NETS = "its gated delta nets have their input in four tensors, and its text lies below a model of images, which no table has"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _DELTA_NETS),
    "gemma": f"{_ZERO_CENTRED}, which Megatron's GPT does with options of its own that were not tried",
    "gemma2": _FOUR_NORMS,
    "gemma3": _FOUR_NORMS,
    "gemma3_text": _FOUR_NORMS,
    "olmo2": "it has no norm before attention and feed-forward, and norms all query and key heads together",
    "olmo3": "it has no norm before attention and feed-forward, and norms all query and key heads together",
    "phi3": "its matrices of queries, keys, values and of gate and up are fused in an order that no table has",
    "glm": "its rotary positions are interleaved, and gate and up are fused",
    "glm4": f"{_FOUR_NORMS}; its rotary positions are interleaved, and gate and up are fused",
}
"""Architectures that Megatron-core's plain GPT cannot express, by ``model_type``, with the reason. Between formats under Hugging
Face's names they convert as any other model does.

Sources: transformers 5.23.0, ``models/*/modeling_*.py``; megatron-core 0.16.1, ``models/gpt``, ``ssm/gated_delta_net.py``;
NVIDIA-NeMo/Megatron-Bridge ``src/megatron/bridge/models``; THUDM/slime ``slime/backends/megatron_utils/megatron_to_hf/glm4.py``.
"""
