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
from dataclasses import dataclass

from mcore_rlhf.errors import Unsupported

from .fields import Field, Values, integer


@dataclass(frozen=True, slots=True)
class Heads(Field):
    """Query groups and the width of a head."""

    names = ("num_key_value_heads", "head_dim")
    arguments = ("num_query_groups", "group_query_attention", "kv_channels")

    def args(self, config: Values) -> dict[str, object]:
        """``num_query_groups``, ``group_query_attention``, ``kv_channels``."""
        heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
        groups = integer(config, "num_key_value_heads") or heads
        width = integer(config, "head_dim") or hidden // max(heads, 1)
        return {"num_query_groups": groups, "group_query_attention": groups != heads, "kv_channels": width}

    def config(self, args: Values) -> dict[str, object]:
        """``num_key_value_heads`` and ``head_dim``; without the flag Megatron ignores its number of groups."""
        heads, hidden = integer(args, "num_attention_heads"), integer(args, "hidden_size")
        groups = integer(args, "num_query_groups") if args.get("group_query_attention") else heads
        width = integer(args, "kv_channels") or hidden // max(heads, 1)
        return {"num_key_value_heads": groups or heads, "head_dim": width}


@dataclass(frozen=True, slots=True)
class LatentHeads(Field):
    """Heads of latent attention, which has no query groups."""

    names = ("num_key_value_heads", "qk_head_dim", "head_dim")
    arguments = ("num_query_groups", "group_query_attention", "kv_channels")

    def args(self, config: Values) -> dict[str, object]:
        """The arguments of heads; ``kv_channels`` is as wide as values are."""
        return {
            "num_query_groups": integer(config, "num_attention_heads"), "group_query_attention": False,
            "kv_channels": integer(config, "v_head_dim"),
        }  # fmt: skip

    def config(self, args: Values) -> dict[str, object]:
        """As many key as query heads."""
        nope, rope = integer(args, "qk_head_dim"), integer(args, "qk_pos_emb_head_dim")
        return {
            "num_key_value_heads": integer(args, "num_attention_heads"), "qk_head_dim": nope + rope, "head_dim": rope,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeltaLayers(Field):
    """Which layers are gated delta nets: all but every ``full_attention_interval``-th, unless ``layer_types`` says otherwise.

    Source: transformers 5.23.0, ``models/qwen3_next/configuration_qwen3_next.py``; megatron-core 0.19.2,
    ``models/gpt/experimental_attention_variant_module_specs.py`` (``get_linear_attention_pattern``).
    """

    names = ("layer_types", "full_attention_interval")
    arguments = ("linear_attention_freq", "experimental_attention_variant")

    def args(self, config: Values) -> dict[str, object]:
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

    def config(self, args: Values) -> dict[str, object]:
        """``layer_types``.

        Raises:
            Unsupported: Its attention is of another kind.
        """
        kind, linear = args.get("experimental_attention_variant"), delta_layers(args)
        if kind != "gated_delta_net":
            raise Unsupported(
                f"args: experimental_attention_variant is {kind}, and transformers computes as with gated_delta_net"
            )
        return {"layer_types": [_LINEAR if n in linear else _FULL for n in range(integer(args, "num_layers"))]}


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


_NUMBERED = (last_layers, every_other_layer)
"""Rules that look at ``max_window_layers``."""


@dataclass(frozen=True, slots=True)
class Window(Field):
    """A sliding window.

    Args:
        switch: Whether ``use_sliding_window`` turns it on.
        rule: Which layers have it where ``layer_types`` does not say; None where all do, whatever else is said.
    """

    switch: bool = False
    rule: Callable[[Values, int], frozenset[int]] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Fields of ``config.json``."""
        switch = ("use_sliding_window",) if self.switch else ()
        number = ("max_window_layers",) if self.rule in _NUMBERED else ()
        return ("sliding_window", *switch, *number, *(("layer_types",) if self.rule else ()))

    arguments = (_SIZE, _LAYERS)

    def args(self, config: Values) -> dict[str, object]:
        """``window_size``, and which layers have it where not all do.

        Raises:
            Unsupported: A layer is of a kind that is not known.
        """
        size, layers = config.get("sliding_window"), integer(config, "num_hidden_layers")
        windowed = self._windowed(config, layers)
        if not isinstance(size, int) or size <= 0 or not windowed:
            return {_SIZE: None, _LAYERS: None}
        some = None if len(windowed) == layers else [int(number in windowed) for number in range(layers)]
        return {_SIZE: (size - 1, 0), _LAYERS: some}

    def _windowed(self, config: Values, layers: int) -> frozenset[int]:
        if self.switch and not config.get("use_sliding_window"):
            return frozenset()
        kinds = config.get("layer_types") if self.rule is not None else None
        if isinstance(kinds, list):
            strange = [kind for kind in kinds if kind not in (_SLIDING, _FULL)]
            if strange:
                raise Unsupported(
                    f"config.json: layer_types has {strange[0]}, and Megatron knows {_SLIDING} and {_FULL}"
                )
            return frozenset(number for number, kind in enumerate(kinds) if kind == _SLIDING)
        return self.rule(config, layers) if self.rule is not None else frozenset(range(layers))

    def config(self, args: Values) -> dict[str, object]:
        """What ``config.json`` says of the window, or that there is none.

        Raises:
            Unsupported: Only some layers have it, and the class cannot say so; or tokens look ahead.
        """
        size, layers = _size(args), integer(args, "num_layers")
        windowed = _windowed_layers(args, layers) if size else frozenset[int]()
        if not windowed:
            if self.rule is every_other:  # its class wants a number even where no layer has a window, and has a default
                return {"layer_types": [_FULL] * layers}
            off: dict[str, object] = {"use_sliding_window": False} if self.switch else {"sliding_window": None}
            return off if self.rule is None else {**off, "max_window_layers": layers}
        if self.rule is None and len(windowed) < layers:
            raise Unsupported(
                f"args: {_LAYERS} gives {_SIZE} {args[_SIZE]} to {len(windowed)} of {layers} layers, and transformers to all"
            )
        said: dict[str, object] = {"sliding_window": size}
        if self.switch:
            said["use_sliding_window"] = True
        if self.rule in _NUMBERED:  # transformers 4 has the number alone, and newer ones prefer the list
            said["max_window_layers"] = min(windowed) if self.rule is last_layers else layers
        if self.rule is not None:
            said["layer_types"] = [_SLIDING if number in windowed else _FULL for number in range(layers)]
        return said


@dataclass(frozen=True, slots=True)
class NoWindow(Field):
    """A class without windows, whatever its ``config.json`` says."""

    arguments = (_SIZE, _LAYERS)

    def args(self, config: Values) -> dict[str, object]:
        """Nothing."""
        return {}

    def config(self, args: Values) -> dict[str, object]:
        """Nothing.

        Raises:
            Unsupported: Some layers have a window.
        """
        if _size(args) and _windowed_layers(args, integer(args, "num_layers")):
            raise Unsupported(f"args: {_SIZE} is {args[_SIZE]!r}, for which its config.json has no words")
        return {}


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
