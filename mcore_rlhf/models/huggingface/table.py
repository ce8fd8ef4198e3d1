"""What the table of an architecture is made of: rows that say which tensors of Megatron-core and Hugging Face are the same."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .fields import Field
from .kinds import LOCAL, MTP_LAYER, SEQUENTIAL


class Arrangement(Enum):
    """How the rows of a Megatron parameter come from those of Hugging Face's."""

    SAME = "one tensor, all rows in the same order"
    STACKED = "all rows of the first, then all rows of the second, ..."
    GROUPED = "for every query group: its query heads, its key head, its value head"
    EXPERTS = "for every expert all rows of the first, then of the second, ...; transposed"


@dataclass(frozen=True, slots=True)
class Spelling:
    """Whose names Megatron's side has.

    Args:
        implementation: ``local`` or ``transformer_engine``.
        experts: ``sequential``, ``grouped`` or ``stacked``.
        mtp: What the decoder layer inside a multi-token-prediction layer is called.
    """

    implementation: str = LOCAL
    experts: str = SEQUENTIAL
    mtp: str = MTP_LAYER

    @property
    def traits(self) -> frozenset[str]:
        """What rows may need of it."""
        return frozenset((self.implementation, self.experts, self.mtp))


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A Hugging Face tensor.

    Args:
        name: Its name on disk, with ``{i}`` for the layer and ``{e}`` for the expert.
        shape: What its dimensions count, as names of :class:`~.sizes.Sizes`.
    """

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One Megatron parameter and what it is made of.

    Args:
        megatron: Its name, with ``{i}`` for the layer, ``{k}`` for one of multi-token prediction, ``{e}`` for the expert.
        huggingface: The tensors that it is made of, in order.
        arrangement: How.
        optional: Whether a model of the architecture may lack it.
        needs: What a model, or a layer, must have for the row to count: a spelling, a kind of layer, a size that is not 0.
    """

    megatron: str
    huggingface: tuple[HfTensor, ...]
    arrangement: Arrangement = Arrangement.SAME
    optional: bool = False
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Packed:
    """A parameter of transformers 5 in memory, and the tensors on disk that it is made of.

    Args:
        module: Its name, with ``{i}`` for the layer.
        files: Names on disk. With ``{e}`` there is one of each for every expert, which the parameter's first dimension
            counts, and they lie in its rows one after the other.
    """

    module: str
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Architecture:
    """All tensors of an architecture.

    Args:
        model_type: What ``config.json`` calls it.
        class_name: The class under ``architectures`` there.
        rows: In the order in which Megatron registers its parameters.
        order: Hugging Face's names in the order of ``model.parameters()``.
        fields: What ``config.json`` and Megatron's arguments have in common.
        packed: Parameters that have other names, or other shapes, in memory than on disk.
        needs: Sizes that are not 0 in a model of this architecture.
    """

    model_type: str
    class_name: str
    rows: tuple[Row, ...]
    order: tuple[str, ...]
    fields: tuple[Field, ...]
    packed: tuple[Packed, ...] = ()
    needs: tuple[str, ...] = ()
