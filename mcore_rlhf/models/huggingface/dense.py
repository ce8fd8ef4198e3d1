"""The rows that decoders have in common, and all that dense ones have.

Sources: transformers 5.23.0, ``models/{llama,qwen2,qwen3}/modeling_*.py``; megatron-core 0.16.1, ``models/gpt/gpt_model.py``,
``transformer/{attention,mlp,transformer_layer}.py``, ``extensions/transformer_engine.py``. No row is permuted for rotary
embeddings: both sides rotate halves, or pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mcore_rlhf.errors import Unsupported
from mcore_rlhf.models.meaning.kinds import Field, Values

from .attention_fields import GROUPED_HEADS
from .fields import always, only, same, unused
from .rotary_fields import rope_of, rope_type, rotary
from .table import DENSE, LOCAL, TRANSFORMER_ENGINE, Arrangement, HfTensor, Row

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
INPUT_NORM = Row(f"{_LAYER}input_layernorm.weight", _IN, needs=(LOCAL,))
FUSED_INPUT_NORM = Row(f"{_LAYER}self_attention.linear_qkv.layer_norm_weight", _IN, needs=(TRANSFORMER_ENGINE,))

MLP_IN = (HfTensor(f"{_HF}post_attention_layernorm.weight", ("hidden",)),)
MLP_NORM = Row(f"{_LAYER}pre_mlp_layernorm.weight", MLP_IN, needs=(DENSE, LOCAL))
FUSED_MLP_NORM = Row(f"{_LAYER}mlp.linear_fc1.layer_norm_weight", MLP_IN, needs=(DENSE, TRANSFORMER_ENGINE))

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
ATTENTION = (INPUT_NORM, PROJ, PROJ_BIAS, FUSED_INPUT_NORM, QKV, replace(QKV_BIAS, optional=True))
"""Of Llama, Qwen3 and what is built alike: biases where the config asks for them."""
BIASED_ATTENTION = (INPUT_NORM, PROJ, FUSED_INPUT_NORM, QKV, QKV_BIAS)
"""Of Qwen2: queries, keys and values always have biases."""
Q_NORM = Row(f"{_LAYER}self_attention.q_layernorm.weight", (HfTensor(f"{_HF}self_attn.q_norm.weight", ("head",)),))
K_NORM = Row(f"{_LAYER}self_attention.k_layernorm.weight", (HfTensor(f"{_HF}self_attn.k_norm.weight", ("head",)),))

FC1 = Row(
    f"{_LAYER}mlp.linear_fc1.weight",
    tuple(HfTensor(f"{_HF}mlp.{part}_proj.weight", ("ffn", "hidden")) for part in ("gate", "up")),
    Arrangement.STACKED,
    needs=(DENSE,),
)
FC1_BIAS = Row(
    f"{_LAYER}mlp.linear_fc1.bias",
    tuple(HfTensor(f"{_HF}mlp.{part}_proj.bias", ("ffn",)) for part in ("gate", "up")),
    Arrangement.STACKED,
    optional=True,
    needs=(DENSE,),
)
FC2 = Row(
    f"{_LAYER}mlp.linear_fc2.weight", (HfTensor(f"{_HF}mlp.down_proj.weight", ("hidden", "ffn")),), needs=(DENSE,)
)
FC2_BIAS = Row(
    f"{_LAYER}mlp.linear_fc2.bias", (HfTensor(f"{_HF}mlp.down_proj.bias", ("hidden",)),), optional=True, needs=(DENSE,)
)

HEADS = (OUTPUT, VALUE_HEAD, VALUE_BIAS)

SELF_ATTENTION = tuple(
    f"{_HF}self_attn.{part}_proj.{kind}" for part in ("q", "k", "v", "o") for kind in ("weight", "bias")
)
QK_NORMS = (f"{_HF}self_attn.q_norm.weight", f"{_HF}self_attn.k_norm.weight")
MLP = tuple(f"{_HF}mlp.{part}_proj.{kind}" for part in ("gate", "up", "down") for kind in ("weight", "bias"))
NORMS = (f"{_HF}input_layernorm.weight", f"{_HF}post_attention_layernorm.weight")


def in_order(*inside: str) -> tuple[str, ...]:
    """``model.parameters()`` of a decoder, given what is in a layer; a name that a model lacks is passed over."""
    heads = ("lm_head.weight", "score.weight", "score.bias")
    return ("model.embed_tokens.weight", *inside, *NORMS, "model.norm.weight", *heads)


ORDER = in_order(*SELF_ATTENTION, *QK_NORMS, *MLP)
"""``model.parameters()`` of dense decoders."""

SIZES: tuple[Field, ...] = (
    same("num_hidden_layers", "num_layers"),
    same("hidden_size", "hidden_size"),
    same("intermediate_size", "ffn_hidden_size"),
    same("num_attention_heads", "num_attention_heads"),
)
"""What a decoder's description cannot be without."""

_OF_ANY: tuple[Field, ...] = (
    same("max_position_embeddings", "max_position_embeddings"),
    same("rms_norm_eps", "layernorm_epsilon"),
    same("initializer_range", "init_method_std"),
    same("attention_dropout", "attention_dropout"),
    always("normalization", "RMSNorm"),
    always("add_position_embedding", True),
    always("rotary_interleaved", False),
)
SILU: Field = only("hidden_act", "silu", "Megatron's --swiglu is silu")
OF_ANY = (*SIZES, *_OF_ANY)
"""What the two descriptions of any of them have in common."""

MIXTURES_ALONE = (
    *(size for size in SIZES if size.arguments != ("ffn_hidden_size",)),
    unused("ffn_hidden_size", "moe_intermediate_size"),
    *_OF_ANY,
)
"""The same where no layer is dense, and ``config.json`` does not say how wide one would be."""

COMMON: tuple[Field, ...] = (*OF_ANY, SILU, always("swiglu", True), always("layernorm_zero_centered_gamma", False))
"""The same with SwiGLU and the usual norms."""

FIELDS: tuple[Field, ...] = (*COMMON, GROUPED_HEADS, rotary())
"""The same with the usual attention."""


def in_pairs(fields: Iterable[Field]) -> tuple[Field, ...]:
    """The same where positions rotate what lies side by side, and not the two halves of a head."""

    def args(config: Values) -> dict[str, object]:
        if rope_type(rope_of(config)) == "yarn":
            raise Unsupported("config.json: YaRN that rotates pairs; Megatron's rotates halves alone, and stops")
        return {"rotary_interleaved": True}

    pairs = replace(always("rotary_interleaved", True), args=args)
    return tuple(pairs if field.arguments == pairs.arguments else field for field in fields)
