"""Heads and sliding windows, as ``config.json`` and Megatron's arguments say them.

``sliding_window`` counts the tokens that are seen, the own one among them; Megatron's ``window_size`` counts those before
it, and those after it, of which a causal model has none.

Sources: transformers 5.23.0, ``masking_utils.py`` (``sliding_window_overlay``), ``models/{mistral,mixtral,qwen2,qwen3,
qwen2_moe,qwen3_moe}/``; Megatron-LM core_v0.16.1, ``megatron/training/arguments.py``; megatron-core 0.16.1,
``transformer/transformer_config.py`` (``MLATransformerConfig``), ``transformer/utils.py`` (``get_sliding_window_causal_mask``,
``is_layer_window_attention``), ``extensions/transformer_engine.py`` (``TEDotProductAttention``).
"""

from __future__ import annotations

from collections.abc import Callable

from mcore_rlhf.errors import Unsupported
from mcore_rlhf.models.meaning.kinds import Field, Values

from .fields import integer

_HEADS = ("num_query_groups", "group_query_attention", "kv_channels")


def _heads_args(config: Values) -> dict[str, object]:
    heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    groups = integer(config, "num_key_value_heads") or heads
    width = integer(config, "head_dim") or hidden // max(heads, 1)
    return {"num_query_groups": groups, "group_query_attention": groups != heads, "kv_channels": width}


def _heads_config(args: Values) -> dict[str, object]:
    """Without the flag Megatron ignores its number of groups."""
    heads, hidden = integer(args, "num_attention_heads"), integer(args, "hidden_size")
    groups = integer(args, "num_query_groups") if args.get("group_query_attention") else heads
    width = integer(args, "kv_channels") or hidden // max(heads, 1)
    return {"num_key_value_heads": groups or heads, "head_dim": width}


GROUPED_HEADS = Field(("num_key_value_heads", "head_dim"), _HEADS, _heads_args, _heads_config)
"""Query groups and the width of a head."""


def _latent_heads_args(config: Values) -> dict[str, object]:
    """``kv_channels`` is as wide as values are."""
    return {
        "num_query_groups": integer(config, "num_attention_heads"), "group_query_attention": False,
        "kv_channels": integer(config, "v_head_dim"),
    }  # fmt: skip


def _latent_heads_config(args: Values) -> dict[str, object]:
    nope, rope = integer(args, "qk_head_dim"), integer(args, "qk_pos_emb_head_dim")
    return {
        "num_key_value_heads": integer(args, "num_attention_heads"), "qk_head_dim": nope + rope, "head_dim": rope,
    }  # fmt: skip


LATENT_HEADS = Field(
    ("num_key_value_heads", "qk_head_dim", "head_dim"), _HEADS, _latent_heads_args, _latent_heads_config
)
"""Heads of latent attention, which has no query groups, and as many key as query heads."""


def _delta_args(config: Values) -> dict[str, object]:
    """A list with a 1 for every gated delta net, and what kind of attention that is."""
    layers, types = integer(config, "num_hidden_layers"), config.get("layer_types")
    every = integer(config, "full_attention_interval") or 4
    if not isinstance(types, list):
        types = [_FULL if (layer + 1) % every == 0 else _LINEAR for layer in range(layers)]
    if len(types) != layers or not set(types) <= {_FULL, _LINEAR}:
        raise Unsupported(f"config.json: layer_types {types}: expected {layers} of {_LINEAR} and {_FULL}")
    return {
        "linear_attention_freq": [int(one == _LINEAR) for one in types],
        "experimental_attention_variant": "gated_delta_net",
    }


def _delta_config(args: Values) -> dict[str, object]:
    kind, linear = args.get("experimental_attention_variant"), delta_layers(args)
    if kind != "gated_delta_net":
        raise Unsupported(
            f"args: experimental_attention_variant is {kind}, and transformers computes as with gated_delta_net"
        )
    return {"layer_types": [_LINEAR if n in linear else _FULL for n in range(integer(args, "num_layers"))]}


DELTA_LAYERS = Field(
    ("layer_types", "full_attention_interval"),
    ("linear_attention_freq", "experimental_attention_variant"),
    _delta_args,
    _delta_config,
)
"""Which layers are gated delta nets: all but every ``full_attention_interval``-th, unless ``layer_types`` says otherwise.

Source: transformers 5.23.0, ``models/qwen3_next/configuration_qwen3_next.py``; megatron-core 0.19.2,
``models/gpt/experimental_attention_variant_module_specs.py`` (``get_linear_attention_pattern``).
"""


def delta_layers(args: Values) -> frozenset[int]:
    """Numbers of the decoder layers that are gated delta nets, as Megatron's arguments say."""
    said, layers = args.get("linear_attention_freq"), range(integer(args, "num_layers"))
    if args.get("experimental_attention_variant") != "gated_delta_net":
        return frozenset()
    if isinstance(said, int) and said > 0:
        return frozenset(layer for layer in layers if (layer + 1) % said)
    return frozenset(layer for layer, one in enumerate(said) if one) if isinstance(said, list) else frozenset()


_SIZE, _LAYERS = "window_size", "window_attn_skip_freq"
_SLIDING, _FULL, _LINEAR = "sliding_attention", "full_attention", "linear_attention"


def last_layers(config: Values, layers: int) -> frozenset[int]:
    """Qwen2's and Qwen3's rule: the layers from ``max_window_layers`` on."""
    return frozenset(range(integer(config, "max_window_layers"), layers))


def every_other_layer(config: Values, layers: int) -> frozenset[int]:
    """Qwen2-MoE's rule: every other layer before ``max_window_layers``."""
    return frozenset(range(0, min(integer(config, "max_window_layers"), layers), 2))


def every_other(config: Values, layers: int) -> frozenset[int]:
    """GPT-OSS's rule: every other layer, the first one among them."""
    return frozenset(range(0, layers, 2))


def every(_: Values, layers: int) -> frozenset[int]:
    """Ministral's rule: all of them."""
    return frozenset(range(layers))


def without_positions(config: Values, layers: int) -> frozenset[int]:
    """SmolLM3's rule: the layers without positions."""
    said, interval = config.get("no_rope_layers"), integer(config, "no_rope_layer_interval") or 4
    if said is None:
        return frozenset(number for number in range(layers) if (number + 1) % interval == 0)
    if not isinstance(said, list) or len(said) < layers or not all(isinstance(one, int) for one in said):
        raise Unsupported(f"config.json: no_rope_layers {said!r:.80}: expected a number for each of {layers} layers")
    return frozenset(number for number in range(layers) if not said[number])


_NO_ROPE = "no_rope_freq"


def _no_positions_args(config: Values) -> dict[str, object]:
    layers = integer(config, "num_hidden_layers")
    none = without_positions(config, layers)
    return {_NO_ROPE: [int(number in none) for number in range(layers)] if none else None}


def _no_positions_config(args: Values) -> dict[str, object]:
    said, layers = args.get(_NO_ROPE), integer(args, "num_layers")
    if isinstance(said, int) and said > 0:
        said = [int((number + 1) % said == 0) for number in range(layers)]
    none = said if isinstance(said, list | tuple) else [0] * layers
    return {"no_rope_layers": [int(not one) for one in none]}


NO_POSITIONS = Field(
    ("no_rope_layers", "no_rope_layer_interval"), (_NO_ROPE,), _no_positions_args, _no_positions_config
)
"""Which layers have no rotary positions: in ``config.json`` 1 stands for those that have them, in Megatron's list for those that have none.

Sources: transformers 5.23.0, ``models/smollm3/configuration_smollm3.py``; megatron-core 0.19.2, ``transformer/transformer_config.py``.
"""

_NUMBERED = (last_layers, every_other_layer)
"""Rules that look at ``max_window_layers``."""


Windowed = Callable[[Values, int], frozenset[int]]
"""Which of so many layers of a ``config.json`` have a window."""


def window(*, switch: bool = False, rule: Windowed | None = None) -> Field:
    """A sliding window: ``window_size``, and which layers have it where not all do.

    Args:
        switch: Whether ``use_sliding_window`` turns it on.
        rule: Which layers have it where ``layer_types`` does not say; None where all do, whatever else is said.
    """

    def args(config: Values) -> dict[str, object]:
        size, layers = config.get("sliding_window"), integer(config, "num_hidden_layers")
        windowed = _where(config, layers, switch, rule)
        if not isinstance(size, int) or size <= 0 or not windowed:
            return {_SIZE: None, _LAYERS: None}
        some = None if len(windowed) == layers else [int(number in windowed) for number in range(layers)]
        return {_SIZE: (size - 1, 0), _LAYERS: some}

    def config(args: Values) -> dict[str, object]:
        size, layers = _size(args), integer(args, "num_layers")
        windowed = _windowed_layers(args, layers) if size else frozenset[int]()
        if not windowed:
            if rule is every_other:  # its class wants a number even where no layer has a window, and has a default
                return {"layer_types": [_FULL] * layers}
            off: dict[str, object] = {"use_sliding_window": False} if switch else {"sliding_window": None}
            return {**off, "max_window_layers": layers} if rule in _NUMBERED else off
        if rule is None and len(windowed) < layers:
            raise Unsupported(
                f"args: {_LAYERS} gives {_SIZE} {args[_SIZE]} to {len(windowed)} of {layers} layers, and transformers to all"
            )
        said: dict[str, object] = {"sliding_window": size}
        if switch:
            said["use_sliding_window"] = True
        if rule in _NUMBERED:  # transformers 4 has the number alone, and newer ones prefer the list
            said["max_window_layers"] = min(windowed) if rule is last_layers else layers
        if rule is not None:
            said["layer_types"] = [_SLIDING if number in windowed else _FULL for number in range(layers)]
        return said

    further = [
        ("use_sliding_window", switch),
        ("max_window_layers", rule in _NUMBERED),
        ("layer_types", rule is not None),
    ]
    names = ("sliding_window", *(name for name, is_said in further if is_said))
    return Field(names, (_SIZE, _LAYERS), args, config)


def _where(config: Values, layers: int, switch: bool, rule: Windowed | None) -> frozenset[int]:
    """The layers with a window, of which there are none where it is switched off.

    Raises:
        Unsupported: A layer is of a kind that is not known, or sees no token at all.
    """
    if not switch or config.get("use_sliding_window"):
        return _sliding(config, layers, rule)
    if rule is every_other_layer and _sliding(config, layers, lambda *_: frozenset()):
        raise Unsupported(
            "config.json: layer_types has sliding_attention, but use_sliding_window is false: transformers takes a window of 0 there"
        )
    return frozenset()


def _sliding(config: Values, layers: int, rule: Windowed | None) -> frozenset[int]:
    """The layers with a window where there is one.

    Raises:
        Unsupported: A layer is of a kind that is not known.
    """
    kinds = config.get("layer_types") if rule is not None else None
    if isinstance(kinds, list):
        if len(kinds) != layers:
            raise Unsupported(
                f"config.json: layer_types has {len(kinds)} kinds, expected one for each of {layers} layers"
            )
        strange = [kind for kind in kinds if kind not in (_SLIDING, _FULL)]
        if strange:
            raise Unsupported(f"config.json: layer_types has {strange[0]}, and Megatron knows {_SLIDING} and {_FULL}")
        return frozenset(number for number, kind in enumerate(kinds) if kind == _SLIDING)
    return rule(config, layers) if rule is not None else frozenset(range(layers))


def _no_window(args: Values) -> dict[str, object]:
    if _size(args) and _windowed_layers(args, integer(args, "num_layers")):
        raise Unsupported(f"args: {_SIZE} is {args[_SIZE]!r}, for which its config.json has no words")
    return {}


NO_WINDOW = Field((), (_SIZE, _LAYERS), config=_no_window)
"""A class without windows, whatever its ``config.json`` says."""


def _size(args: Values) -> int:
    """How many tokens are seen; 0 for all."""
    said = args.get(_SIZE)
    if not isinstance(said, list | tuple) or len(said) != 2 or not all(isinstance(n, int) for n in said):
        if said is None:
            return 0
        raise Unsupported(f"args: {_SIZE} is {said!r}, and should be two numbers, of tokens before and after")
    before, after = said
    if after > 0:
        raise Unsupported(
            f"args: {_SIZE} {tuple(said)} looks {after} tokens ahead, and transformers' causal models do not"
        )
    return before + 1 if before >= 0 else 0


def _windowed_layers(args: Values, layers: int) -> frozenset[int]:
    """Numbers of the layers with a window; those whose number from 1 is a multiple of the argument have none."""
    some = args.get(_LAYERS)
    if isinstance(some, list | tuple):
        return frozenset(number for number, windowed in enumerate(some) if windowed)
    every = some if isinstance(some, int) and some > 0 else 0
    return frozenset(number for number in range(layers) if not every or (number + 1) % every)
