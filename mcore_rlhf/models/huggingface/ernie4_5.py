"""ERNIE 4.5, the dense ones: Llama's layers, with positions rotated in pairs, and biases everywhere or nowhere.

Sources: transformers 5.23.0, ``models/ernie4_5/modeling_ernie4_5.py``; megatron-core 0.19.2, ``models/common/embeddings/rope_utils.py``.
"""

from __future__ import annotations

from dataclasses import replace

from . import dense
from .llama import LLAMA
from .table import Architecture

ERNIE4_5: Architecture = replace(
    LLAMA, model_type="ernie4_5", class_name="Ernie4_5ForCausalLM", fields=dense.in_pairs(LLAMA.fields)
)
