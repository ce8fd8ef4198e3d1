"""Arcee's AFM: Llama's layers, whose feed-forward has no gate, and a squared ReLU.

Sources: transformers 5.23.0, ``models/arcee/modeling_arcee.py``; megatron-core 0.16.1, ``activations.py`` (``squared_relu``).
"""

from __future__ import annotations

from dataclasses import replace

from . import dense
from .attention_fields import GROUPED_HEADS, NO_WINDOW
from .fields import always, only
from .rotary_fields import rotary
from .table import Architecture, Arrangement

_FC1, _FC1_BIAS = (
    replace(row, huggingface=row.huggingface[1:], arrangement=Arrangement.SAME) for row in (dense.FC1, dense.FC1_BIAS)
)
"""``up_proj`` alone."""

ARCEE = Architecture(
    "arcee",
    "ArceeForCausalLM",
    (
        dense.EMBEDDING,
        *dense.ATTENTION,
        dense.MLP_NORM,
        dense.FUSED_MLP_NORM,
        _FC1,
        _FC1_BIAS,
        dense.FC2,
        dense.FC2_BIAS,
        dense.FINAL_NORM,
        *dense.HEADS,
    ),
    dense.ORDER,
    (
        *dense.OF_ANY,
        only("hidden_act", "relu2", "Megatron's --squared-relu is relu2"),
        always("squared_relu", True),
        always("swiglu", False),
        always("layernorm_zero_centered_gamma", False),
        GROUPED_HEADS,
        rotary(),
        NO_WINDOW,
        always("qk_layernorm", False),
    ),
)
