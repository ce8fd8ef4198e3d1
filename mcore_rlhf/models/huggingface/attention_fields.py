"""Heads, as ``config.json`` and Megatron's arguments say them.

Sources: Megatron-LM core_v0.16.1, ``megatron/training/arguments.py``; megatron-core 0.16.1,
``transformer/transformer_config.py`` (``MLATransformerConfig``).
"""

from __future__ import annotations

from dataclasses import dataclass

from .fields import Values, integer


@dataclass(frozen=True, slots=True)
class Heads:
    """Query groups and the width of a head."""

    @property
    def names(self) -> tuple[str, ...]:
        """Fields of ``config.json``."""
        return ("num_key_value_heads", "head_dim")

    @property
    def arguments(self) -> tuple[str, ...]:
        """Megatron's arguments."""
        return ("num_query_groups", "group_query_attention", "kv_channels")

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

    @property
    def names(self) -> tuple[str, ...]:
        """Fields of ``config.json``."""
        return ("num_key_value_heads", "qk_head_dim", "head_dim")

    @property
    def arguments(self) -> tuple[str, ...]:
        """Megatron's arguments."""
        return ("num_query_groups", "group_query_attention", "kv_channels")

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
