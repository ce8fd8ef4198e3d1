"""GLM-4: Llama's layers with biases of queries, keys and values, gate and up in one tensor, and half of a head rotated, in pairs.

Sources: transformers 5.23.0, ``models/glm/modeling_glm.py``; megatron-core 0.19.2, ``models/common/embeddings/rope_utils.py``
(``_rotate_half``: ``--rotary-interleaved``).
"""

from __future__ import annotations

from dataclasses import replace

from . import dense
from .attention_fields import GROUPED_HEADS, NO_WINDOW
from .fields import always
from .phi3 import FUSED_FC1, MLP_ORDER
from .rotary_fields import rotary
from .table import Architecture

GLM = Architecture(
    "glm",
    "GlmForCausalLM",
    (
        dense.EMBEDDING,
        dense.INPUT_NORM,
        dense.PROJ,
        dense.FUSED_INPUT_NORM,
        dense.QKV,
        replace(dense.QKV_BIAS, optional=True),
        dense.MLP_NORM,
        dense.FUSED_MLP_NORM,
        FUSED_FC1,
        dense.FC2,
        dense.FINAL_NORM,
        *dense.HEADS,
    ),
    dense.in_order(*dense.SELF_ATTENTION, *MLP_ORDER),
    (*dense.in_pairs(dense.COMMON), GROUPED_HEADS, rotary(partial=True), NO_WINDOW, always("qk_layernorm", False)),
)
