"""Youtu-LLM: DeepSeek-V3's latent attention, with a feed-forward in every layer. Source: transformers 5.23.0, ``models/youtu``."""

from __future__ import annotations

from . import dense, moe
from .deepseek import ATTENTION, ATTENTION_FIELDS, ATTENTION_ORDER
from .rotary_fields import latent_rotary
from .table import Architecture

YOUTU = Architecture(
    "youtu",
    "YoutuForCausalLM",
    (dense.EMBEDDING, *ATTENTION, *moe.DENSE_MLP, dense.FINAL_NORM, *dense.HEADS),
    dense.in_order(*ATTENTION_ORDER, *dense.MLP),
    (*ATTENTION_FIELDS, latent_rotary(interleaved=True)),
)
