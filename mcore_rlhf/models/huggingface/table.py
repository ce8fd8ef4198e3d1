"""What the table of an architecture is made of: rows that say which tensors of Megatron-core and Hugging Face are the same."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

LOCAL = "local"
TRANSFORMER_ENGINE = "transformer_engine"
"""Values of Megatron's ``--transformer-impl``: they name a few parameters differently."""

LAYER = "{i}"
"""Stands for the number of a decoder layer."""


class Arrangement(Enum):
    """How the rows of a Megatron parameter come from those of Hugging Face's."""

    SAME = "one tensor, all rows in the same order"
    STACKED = "all rows of the first, then all rows of the second, ..."
    GROUPED = "for every query group: its query heads, its key head, its value head"


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A Hugging Face tensor.

    Args:
        name: Its name, with ``{i}`` for the layer.
        shape: What its dimensions count, as names of :class:`~.sizes.Sizes`.
    """

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One Megatron parameter and what it is made of.

    Args:
        megatron: Its name, with ``{i}`` for the layer.
        huggingface: The tensors that it is made of, in order.
        arrangement: How.
        optional: Whether a model of the architecture may lack it.
        spelling: The ``--transformer-impl`` that has this name; None for both.
    """

    megatron: str
    huggingface: tuple[HfTensor, ...]
    arrangement: Arrangement = Arrangement.SAME
    optional: bool = False
    spelling: str | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """All tensors of an architecture.

    Args:
        model_type: What ``config.json`` calls it.
        class_name: The class under ``architectures`` there.
        rows: In the order in which Megatron registers its parameters.
        order: Hugging Face's names in the order of ``model.parameters()``.
        args: Megatron's arguments that follow from the architecture.
    """

    model_type: str
    class_name: str
    rows: tuple[Row, ...]
    order: tuple[str, ...]
    args: tuple[tuple[str, object], ...]
