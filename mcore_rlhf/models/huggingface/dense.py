"""The rows that dense decoders have in common.

Sources: transformers 5.23.0, ``models/{llama,qwen2,qwen3}/modeling_*.py``; megatron-core 0.16.1, ``models/gpt/gpt_model.py``,
``transformer/{attention,mlp,transformer_layer}.py``, ``extensions/transformer_engine.py``. No row is permuted for rotary
embeddings: both sides rotate halves.
"""

from __future__ import annotations

from .table import LOCAL, TRANSFORMER_ENGINE, Arrangement, HfTensor, Row

_LAYER = "decoder.layers.{i}."
_HF = "model.layers.{i}."
_QKV = tuple(
    (f"{_HF}self_attn.{part}_proj", rows) for part, rows in (("q", "q_rows"), ("k", "k_rows"), ("v", "k_rows"))
)

EMBEDDING = Row("embedding.word_embeddings.weight", (HfTensor("model.embed_tokens.weight", ("vocabulary", "hidden")),))
OUTPUT = Row("output_layer.weight", (HfTensor("lm_head.weight", ("vocabulary", "hidden")),), optional=True)
VALUE_HEAD = Row("output_layer.weight", (HfTensor("score.weight", ("one", "hidden")),), optional=True)
VALUE_BIAS = Row("output_layer.bias", (HfTensor("score.bias", ("one",)),), optional=True)
FINAL_NORM = Row("decoder.final_layernorm.weight", (HfTensor("model.norm.weight", ("hidden",)),))

_IN = (HfTensor(f"{_HF}input_layernorm.weight", ("hidden",)),)
INPUT_NORM = Row(f"{_LAYER}input_layernorm.weight", _IN, spelling=LOCAL)
FUSED_INPUT_NORM = Row(f"{_LAYER}self_attention.linear_qkv.layer_norm_weight", _IN, spelling=TRANSFORMER_ENGINE)

_MLP_IN = (HfTensor(f"{_HF}post_attention_layernorm.weight", ("hidden",)),)
MLP_NORM = Row(f"{_LAYER}pre_mlp_layernorm.weight", _MLP_IN, spelling=LOCAL)
FUSED_MLP_NORM = Row(f"{_LAYER}mlp.linear_fc1.layer_norm_weight", _MLP_IN, spelling=TRANSFORMER_ENGINE)

PROJ = Row(
    f"{_LAYER}self_attention.linear_proj.weight", (HfTensor(f"{_HF}self_attn.o_proj.weight", ("hidden", "q_rows")),)
)
PROJ_BIAS = Row(
    f"{_LAYER}self_attention.linear_proj.bias", (HfTensor(f"{_HF}self_attn.o_proj.bias", ("hidden",)),), optional=True
)
QKV = Row(
    f"{_LAYER}self_attention.linear_qkv.weight",
    tuple(HfTensor(f"{name}.weight", (rows, "hidden")) for name, rows in _QKV),
    Arrangement.GROUPED,
)
QKV_BIAS = Row(
    f"{_LAYER}self_attention.linear_qkv.bias",
    tuple(HfTensor(f"{name}.bias", (rows,)) for name, rows in _QKV),
    Arrangement.GROUPED,
)
Q_NORM = Row(f"{_LAYER}self_attention.q_layernorm.weight", (HfTensor(f"{_HF}self_attn.q_norm.weight", ("head",)),))
K_NORM = Row(f"{_LAYER}self_attention.k_layernorm.weight", (HfTensor(f"{_HF}self_attn.k_norm.weight", ("head",)),))

FC1 = Row(
    f"{_LAYER}mlp.linear_fc1.weight",
    tuple(HfTensor(f"{_HF}mlp.{part}_proj.weight", ("ffn", "hidden")) for part in ("gate", "up")),
    Arrangement.STACKED,
)
FC1_BIAS = Row(
    f"{_LAYER}mlp.linear_fc1.bias",
    tuple(HfTensor(f"{_HF}mlp.{part}_proj.bias", ("ffn",)) for part in ("gate", "up")),
    Arrangement.STACKED,
    optional=True,
)
FC2 = Row(f"{_LAYER}mlp.linear_fc2.weight", (HfTensor(f"{_HF}mlp.down_proj.weight", ("hidden", "ffn")),))
FC2_BIAS = Row(f"{_LAYER}mlp.linear_fc2.bias", (HfTensor(f"{_HF}mlp.down_proj.bias", ("hidden",)),), optional=True)

HEADS = (FINAL_NORM, OUTPUT, VALUE_HEAD, VALUE_BIAS)

_SELF_ATTENTION = tuple(
    f"{_HF}self_attn.{part}_proj.{kind}" for part in ("q", "k", "v", "o") for kind in ("weight", "bias")
)
_QK_NORMS = (f"{_HF}self_attn.q_norm.weight", f"{_HF}self_attn.k_norm.weight")
_MLP = tuple(f"{_HF}mlp.{part}_proj.{kind}" for part in ("gate", "up", "down") for kind in ("weight", "bias"))
_NORMS = (f"{_HF}input_layernorm.weight", f"{_HF}post_attention_layernorm.weight")

ORDER = (
    "model.embed_tokens.weight", *_SELF_ATTENTION, *_QK_NORMS, *_MLP, *_NORMS,
    "model.norm.weight", "lm_head.weight", "score.weight", "score.bias",
)  # fmt: skip
"""``model.parameters()`` of all of them; a name that a model lacks is passed over."""

ARGS: tuple[tuple[str, object], ...] = (
    ("swiglu", True), ("normalization", "RMSNorm"), ("position_embedding_type", "rope"), ("add_position_embedding", True),
)  # fmt: skip
"""What Megatron has to be told of any of them."""
