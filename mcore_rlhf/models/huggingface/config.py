"""A model's description: Hugging Face's ``config.json`` and Megatron's arguments, each from the other.

Sources: transformers 5.23.0, ``models/{llama,qwen2,qwen3}/configuration_*.py``; Megatron-LM core_v0.16.1,
``megatron/training/arguments.py``; megatron-core 0.16.1, ``models/common/embeddings/rotary_pos_embedding.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from mcore_rlhf.errors import Problems, Unsupported, UsageError

from . import ARCHITECTURES
from .sizes import Sizes
from .table import Architecture

Config = Mapping[str, object]

# config.json, Megatron's args
_SAME: tuple[tuple[str, str], ...] = (
    ("num_hidden_layers", "num_layers"),
    ("hidden_size", "hidden_size"),
    ("intermediate_size", "ffn_hidden_size"),
    ("num_attention_heads", "num_attention_heads"),
    ("max_position_embeddings", "max_position_embeddings"),
    ("rms_norm_eps", "layernorm_epsilon"),
    ("initializer_range", "init_method_std"),
    ("attention_dropout", "attention_dropout"),
)
_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's ``--use-rope-scaling`` has fixed."""


def sizes_of_config(config: Config) -> Sizes:
    """The sizes in a ``config.json``.

    Raises:
        UsageError: Some are missing; all of them are named.
    """
    missing = [name for name in _SIZES if not isinstance(config.get(name), int)]
    if missing:
        raise UsageError(f"the model's config.json lacks {', '.join(missing)}\nGive the folder of the model itself.")
    heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
    return Sizes(
        _integer(config, "num_hidden_layers"), hidden, _integer(config, "intermediate_size"), heads,
        _integer(config, "num_key_value_heads") or heads, _integer(config, "head_dim") or hidden // heads,
        _integer(config, "vocab_size"),
    )  # fmt: skip


def sizes_of_args(args: Config, vocabulary: int) -> Sizes:
    """The sizes in Megatron's arguments.

    Args:
        args: The arguments.
        vocabulary: True number of words, which they may lack.

    Raises:
        UsageError: Some are missing; all of them are named.
    """
    missing = [arg for _, arg in _SAME[:4] if not isinstance(args.get(arg), int)]
    if missing:
        raise UsageError(
            f"the stored args lack {', '.join(missing)}\nGive --reference-config, the folder of a config.json."
        )
    heads, hidden = _integer(args, "num_attention_heads"), _integer(args, "hidden_size")
    groups = _integer(args, "num_query_groups") if args.get("group_query_attention") else heads
    return Sizes(
        _integer(args, "num_layers"), hidden, _integer(args, "ffn_hidden_size"), heads, groups or heads,
        _integer(args, "kv_channels") or hidden // heads, vocabulary,
    )  # fmt: skip


def config_of(args: Config, sizes: Sizes, known: Architecture, *, tied: bool, biased: bool) -> dict[str, object]:
    """The ``config.json`` of a model that Megatron trained, as far as its arguments tell.

    Args:
        args: Megatron's.
        sizes: Of the model.
        known: Its architecture.
        tied: Whether it has no output layer of its own.
        biased: Whether its attention has biases.
    """
    config: dict[str, object] = {"architectures": [known.class_name], "model_type": known.model_type}
    config.update((ours, args[theirs]) for ours, theirs in _SAME if args.get(theirs) is not None)
    config.update(num_key_value_heads=sizes.groups, head_dim=sizes.head, vocab_size=sizes.vocabulary)
    config.update(hidden_act="silu", tie_word_embeddings=tied, rope_theta=float(_number(args, "rotary_base", 10000)))
    if known.model_type != "qwen2":
        config["attention_bias"] = biased
    if args.get("use_rope_scaling"):
        config["rope_scaling"] = {"rope_type": "llama3", "factor": _number(args, "rope_scaling_factor", 8.0), **_LLAMA3}
    return config


def args_of(config: Config, known: Architecture, *, tied: bool, biased: bool) -> dict[str, object]:
    """Megatron's arguments for a model of Hugging Face's.

    Args:
        config: Its ``config.json``.
        known: Its architecture.
        tied: Whether it has no output layer of its own.
        biased: Whether its attention has biases.

    Raises:
        Unsupported: Megatron cannot compute what it asks for; all of it is named.
    """
    _check(config)
    sizes, rope = sizes_of_config(config), _rope(config)
    args: dict[str, object] = {theirs: config[ours] for ours, theirs in _SAME if config.get(ours) is not None}
    args.update(
        num_query_groups=sizes.groups, group_query_attention=sizes.groups != sizes.heads, kv_channels=sizes.head,
        vocab_size=sizes.vocabulary, untie_embeddings_and_output_weights=not tied,
        rotary_base=int(_number(rope, "rope_theta", 10000)), rotary_percent=_number(rope, "partial_rotary_factor", 1.0),
        add_bias_linear=biased and known.model_type != "qwen2", add_qkv_bias=biased,
        use_rope_scaling=_rope_type(rope) == "llama3",
    )  # fmt: skip
    if args["use_rope_scaling"]:
        args["rope_scaling_factor"] = _number(rope, "factor", 8.0)
    args.update(known.args)
    return args


def _check(config: Config) -> None:
    problems, rope = Problems(), _rope(config)
    types = [known.model_type for known in ARCHITECTURES] + ["mistral"]
    if config.get("model_type", "llama") not in types:
        problems.add(Unsupported, f"config.json: model_type {config['model_type']}; known are {', '.join(types)}")
    if config.get("hidden_act", "silu") != "silu":
        problems.add(Unsupported, f"config.json: hidden_act {config['hidden_act']}; Megatron's --swiglu is silu")
    if _rope_type(rope) not in ("default", "llama3"):
        problems.add(Unsupported, f"config.json: rotary embeddings of type {_rope_type(rope)} are not supported")
    if _rope_type(rope) == "llama3":
        for name, value in _LLAMA3.items():
            if rope.get(name, value) != value:
                problems.add(Unsupported, f"config.json: {name} is {rope[name]}, and {value} is fixed in megatron-core")
    problems.raise_if_any()


def _rope(config: Config) -> Config:
    """What it says of rotary embeddings: in one place since transformers 5, in several before."""
    found = config.get("rope_parameters") or config.get("rope_scaling")
    return {**config, **(found if isinstance(found, Mapping) else {})}


def _rope_type(rope: Config) -> object:
    return rope.get("rope_type", rope.get("type")) or "default"


def _integer(values: Config, name: str) -> int:
    value = values.get(name)
    return value if isinstance(value, int) else 0


def _number(values: Config, name: str, default: float) -> float:
    value = values.get(name)
    return value if isinstance(value, int | float) else default
