"""Heads and rotary positions, as ``config.json`` and Megatron's arguments say them.

Sources: transformers 5.23.0, ``modeling_rope_utils.py``; Megatron-LM core_v0.16.1, ``megatron/training/arguments.py``;
megatron-core 0.16.1, ``models/common/embeddings/{rotary_pos_embedding,yarn_rotary_pos_embedding}.py``,
``transformer/transformer_config.py`` (``MLATransformerConfig``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_rlhf.errors import Problems, Unsupported

from .fields import Values

_LLAMA3: dict[str, object] = {
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192
}  # fmt: skip
"""What Megatron's ``--use-rope-scaling`` has fixed."""

# of rotary embeddings of type yarn in config.json, Megatron's argument, its value where the config says nothing
_YARN: tuple[tuple[str, str, float], ...] = (
    ("factor", "rotary_scaling_factor", 1.0),
    ("original_max_position_embeddings", "original_max_position_embeddings", 4096),
    ("beta_fast", "beta_fast", 32.0),
    ("beta_slow", "beta_slow", 1.0),
    ("mscale", "mscale", 1.0),
    ("mscale_all_dim", "mscale_all_dim", 0.0),
)


def integer(values: Values, name: str) -> int:
    """A whole number, 0 where there is none."""
    value = values.get(name)
    return value if isinstance(value, int) else 0


def number(values: Values, name: str, default: float) -> float:
    """A number, or the default."""
    value = values.get(name)
    return value if isinstance(value, int | float) else default


@dataclass(frozen=True, slots=True)
class Heads:
    """Query groups and the width of a head."""

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
class LatentHeads:
    """Heads of latent attention, which has no query groups."""

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
class Rotary:
    """Rotary positions: their base, the part of a head that has them, and Llama 3's scaling."""

    def args(self, config: Values) -> dict[str, object]:
        """Megatron's arguments.

        Raises:
            Unsupported: It is a scaling that Megatron's ``--use-rope-scaling`` is not.
        """
        rope = rope_of(config)
        _check_llama3(rope)
        scaled = rope_type(rope) == "llama3"
        factor = {"rope_scaling_factor": number(rope, "factor", 8.0)} if scaled else {}
        return {
            "rotary_base": _base(rope),
            "rotary_percent": number(rope, "partial_rotary_factor", 1.0), "use_rope_scaling": scaled, **factor,
        }  # fmt: skip

    def config(self, args: Values) -> dict[str, object]:
        """``rope_theta`` and ``rope_scaling``, which transformers before and since version 5 reads.

        Raises:
            Unsupported: Positions are interpolated.
        """
        if args.get("rotary_seq_len_interpolation_factor") not in (None, 1):
            raise Unsupported(
                f"args: rotary_seq_len_interpolation_factor {args['rotary_seq_len_interpolation_factor']} has no counterpart here"
            )
        config: dict[str, object] = {"rope_theta": float(number(args, "rotary_base", 10000))}
        if number(args, "rotary_percent", 1.0) != 1.0:
            config["partial_rotary_factor"] = args["rotary_percent"]
        if args.get("use_rope_scaling"):
            factor = number(args, "rope_scaling_factor", 8.0)
            config["rope_scaling"] = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
        return config


@dataclass(frozen=True, slots=True)
class LatentRotary:
    """Rotary positions of latent attention, of which Megatron also knows YaRN."""

    def args(self, config: Values) -> dict[str, object]:
        """Megatron's arguments; without YaRN its own defaults, which suit DeepSeek-V3's, would scale.

        Raises:
            Unsupported: It is another scaling.
        """
        rope = rope_of(config)
        kind = rope_type(rope)
        if kind not in ("default", "yarn"):
            raise Unsupported(f"config.json: rotary embeddings of type {kind} are not supported with latent attention")
        scaled = kind == "yarn"
        plain: dict[str, object] = {"rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
        yarn: dict[str, object] = {arg: number(rope, name, default) for name, arg, default in _YARN}
        return {
            "rotary_base": _base(rope), "rotary_percent": 1.0,
            "rope_type": "yarn" if scaled else "rope", **(yarn if scaled else plain),
        }  # fmt: skip

    def config(self, args: Values) -> dict[str, object]:
        """``rope_theta``, and ``rope_scaling`` where Megatron's ``rope_type`` is ``yarn``, as it is unless told otherwise."""
        config: dict[str, object] = {"rope_theta": float(number(args, "rotary_base", 10000)), "rope_interleave": True}
        factor = number(args, "rotary_scaling_factor", 1.0)
        if args.get("rope_type", "yarn") == "yarn" and factor != 1.0:
            config["rope_scaling"] = {
                "rope_type": "yarn", "type": "yarn",
                **{name: number(args, arg, default) for name, arg, default in _YARN},
            }  # fmt: skip
        return config


def rope_of(config: Values) -> Values:
    """What it says of rotary embeddings: in one place since transformers 5, in several before."""
    found = config.get("rope_parameters") or config.get("rope_scaling")
    return {**config, **(found if isinstance(found, Mapping) else {})}


def rope_type(rope: Values) -> object:
    """The type of rotary embeddings."""
    return rope.get("rope_type", rope.get("type")) or "default"


def _base(rope: Values) -> int:
    """Megatron's ``--rotary-base`` is a whole number."""
    base = number(rope, "rope_theta", 10000)
    if base != int(base):
        raise Unsupported(f"config.json: rope_theta {base}; Megatron's --rotary-base is a whole number")
    return int(base)


def _check_llama3(rope: Values) -> None:
    problems = Problems()
    if rope_type(rope) not in ("default", "llama3"):
        problems.add(
            Unsupported,
            f"config.json: rotary embeddings of type {rope_type(rope)} are not supported; Megatron's GPT scales as Llama 3 does",
        )
    if rope_type(rope) == "llama3":
        for name, value in _LLAMA3.items():
            if rope.get(name, value) != value:
                problems.add(Unsupported, f"config.json: {name} is {rope[name]}, and {value} is fixed in megatron-core")
    problems.raise_if_any()
