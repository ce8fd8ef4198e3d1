"""SmolLM3: Llama's layers, of which every fourth has no positions.

Sources: transformers 5.23.0, ``models/smollm3/{modeling,configuration}_smollm3.py``; megatron-core 0.19.2,
``transformer/transformer_config.py`` (``no_rope_freq``), ``transformer/attention.py``.
"""

from __future__ import annotations

from dataclasses import replace

from . import dense
from .attention_fields import NO_POSITIONS, window, without_positions
from .fields import always
from .llama import LLAMA

SMOLLM3 = replace(
    LLAMA,
    model_type="smollm3",
    class_name="SmolLM3ForCausalLM",
    fields=(
        *dense.FIELDS,
        NO_POSITIONS,
        window(switch=True, rule=without_positions),
        always("qk_layernorm", False),
    ),
)
