"""The rows of multi-latent attention (DeepSeek): every projection is copied as it is, no row is moved.

Sources: transformers 5.23.0, ``models/deepseek_v3/modeling_deepseek_v3.py``; megatron-core 0.16.1,
``transformer/multi_latent_attention.py``, ``models/gpt/gpt_layer_specs.py``. Transformer Engine's names were read, not run.
"""

from __future__ import annotations

from dataclasses import replace

from . import dense
from .attention_fields import LatentHeads
from .fields import Always, Field, Same
from .kinds import LOCAL, TRANSFORMER_ENGINE
from .table import HfTensor, Row
from .window_fields import NoWindow

_LAYER = "decoder.layers.{i}.self_attention."
_HF = "model.layers.{i}.self_attn."


def _row(megatron: str, huggingface: str, shape: tuple[str, ...], *needs: str) -> Row:
    return Row(f"{_LAYER}{megatron}", (HfTensor(f"{_HF}{huggingface}", shape),), needs=needs)


INPUT_NORM = replace(dense.INPUT_NORM, needs=())
"""Transformer Engine keeps it apart here."""

ATTENTION = (
    _row("linear_proj.weight", "o_proj.weight", ("hidden", "v_rows")),
    _row("linear_q_proj.weight", "q_proj.weight", ("latent_q_rows", "hidden"), "full_q"),
    _row("linear_q_down_proj.weight", "q_a_proj.weight", ("q_lora", "hidden"), "q_lora"),
    _row("linear_q_up_proj.layer_norm_weight", "q_a_layernorm.weight", ("q_lora",), "q_lora", TRANSFORMER_ENGINE),
    _row("linear_q_up_proj.weight", "q_b_proj.weight", ("latent_q_rows", "q_lora"), "q_lora"),
    _row("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight", ("kv_down_rows", "hidden")),
    _row("linear_kv_up_proj.layer_norm_weight", "kv_a_layernorm.weight", ("kv_lora",), TRANSFORMER_ENGINE),
    _row("linear_kv_up_proj.weight", "kv_b_proj.weight", ("kv_up_rows", "kv_lora")),
    _row("q_layernorm.weight", "q_a_layernorm.weight", ("q_lora",), "q_lora", LOCAL),
    _row("kv_layernorm.weight", "kv_a_layernorm.weight", ("kv_lora",), LOCAL),
)

ORDER = tuple(
    f"{_HF}{name}.weight"
    for name in (
        "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj",
    )
)  # fmt: skip

FIELDS: tuple[Field, ...] = (
    *dense.COMMON,
    Same("q_lora_rank", "q_lora_rank", says_none=True),
    Same("kv_lora_rank", "kv_lora_rank"),
    Same("qk_nope_head_dim", "qk_head_dim"),
    Same("qk_rope_head_dim", "qk_pos_emb_head_dim"),
    Same("v_head_dim", "v_head_dim"),
    Always("multi_latent_attention", True),
    Always("qk_layernorm", True),
    Always("position_embedding_type", "rope"),
    LatentHeads(),
    NoWindow(),
)
"""What the descriptions have in common."""
