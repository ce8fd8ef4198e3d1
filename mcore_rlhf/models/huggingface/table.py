"""What the table of an architecture is made of: rows that say which tensors of Megatron-core and Hugging Face are the same."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mcore_rlhf.core.catalog import Shape
from mcore_rlhf.models.meaning.kinds import Field

LOCAL = "local"
TRANSFORMER_ENGINE = "transformer_engine"
"""Values of Megatron's ``--transformer-impl``: they name a few parameters differently."""

SEQUENTIAL, GROUPED, STACKED = "sequential", "grouped", "stacked"
"""How Megatron names experts."""

EXPERTS = {SEQUENTIAL: "SequentialMLP", GROUPED: "TEGroupedMLP", STACKED: "GroupedMLP"}
"""The classes that name them so."""

MTP_LAYER, MTP_MODEL_LAYER = "transformer_layer", "mtp_model_layer"
"""What the decoder layer inside a multi-token-prediction layer is called: by megatron-core 0.16, and since 0.17."""

DENSE, MIXTURE = "dense", "mixture"
"""Kinds of decoder layers, by their feed-forward."""

FULL, LINEAR = "full attention", "linear attention"
"""Kinds of decoder layers, by their attention, where a model has both."""

LAYER, NEXT, EXPERT = "{i}", "{k}", "{e}"
"""Stand for the number of a decoder layer, of a multi-token-prediction layer, and of a routed expert."""


_TRAITS = ("experts", "shared", "q_lora", "full_q", "mtp")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a decoder.

    Args:
        layers: Decoder layers.
        hidden: Width of the residual stream.
        ffn: Width of the feed-forward, of one of gate and up.
        heads: Query heads.
        groups: Query groups, which are key and value heads.
        head: Width of one head.
        vocabulary: True number of words, without padding.
        experts: Routed experts of a mixture layer.
        expert_ffn: Width of a routed expert, of one of gate and up.
        shared: Width of the shared experts together.
        mixture: Numbers of the decoder layers that are mixtures of experts.
        mtp: Multi-token-prediction layers.
        q_lora: Rank of the queries' latent projection; 0 for a full one.
        kv_lora: Rank of the keys' and values' latent projection.
        nope: Width of a latent head's part without rotary positions.
        rope: Width of its part with them.
        v_head: Width of a latent head's values.
        linear: Numbers of the decoder layers with linear attention, which are gated delta nets.
        delta_keys: Their key heads, which are query heads.
        delta_key: Width of one.
        delta_values: Their value heads.
        delta_value: Width of one.
        kernel: Length of their convolution.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocabulary: int
    experts: int = 0
    expert_ffn: int = 0
    shared: int = 0
    mixture: frozenset[int] = frozenset()
    mtp: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    nope: int = 0
    rope: int = 0
    v_head: int = 0
    linear: frozenset[int] = frozenset()
    delta_keys: int = 0
    delta_key: int = 0
    delta_values: int = 0
    delta_value: int = 0
    kernel: int = 0

    @property
    def gated_q_rows(self) -> int:
        """Rows of all queries and of a gate for each."""
        return 2 * self.q_rows

    @property
    def delta_v_rows(self) -> int:
        """Rows of all values of a gated delta net, and of all gates."""
        return self.delta_values * self.delta_value

    @property
    def delta_qkv_rows(self) -> int:
        """Rows of a gated delta net's queries, keys and values, which its convolution sees."""
        return 2 * self.delta_keys * self.delta_key + self.delta_v_rows

    @property
    def delta_qkvz_rows(self) -> int:
        """The same with its gates."""
        return self.delta_qkv_rows + self.delta_v_rows

    @property
    def delta_ba_rows(self) -> int:
        """Rows of what decides how much a gated delta net writes and forgets."""
        return 2 * self.delta_values

    @property
    def q_rows(self) -> int:
        """Rows of all queries."""
        return self.heads * self.head

    @property
    def k_rows(self) -> int:
        """Rows of all keys, and of all values."""
        return self.groups * self.head

    @property
    def qkv_rows(self) -> int:
        """Rows of all queries, keys and values."""
        return self.q_rows + 2 * self.k_rows

    @property
    def gate_up_rows(self) -> int:
        """Rows of gate and up."""
        return 2 * self.ffn

    @property
    def latent_q_rows(self) -> int:
        """Rows of all queries under latent attention."""
        return self.heads * (self.nope + self.rope)

    @property
    def kv_down_rows(self) -> int:
        """Rows of the latent of keys and values, and of the rotary key that all heads share."""
        return self.kv_lora + self.rope

    @property
    def kv_up_rows(self) -> int:
        """Rows of all keys without positions and all values under latent attention."""
        return self.heads * (self.nope + self.v_head)

    @property
    def v_rows(self) -> int:
        """Rows of all values under latent attention."""
        return self.heads * self.v_head

    @property
    def twice_hidden(self) -> int:
        """A word's embedding and a hidden state, side by side."""
        return 2 * self.hidden

    @property
    def twice_ffn(self) -> int:
        """Gate and up of a routed expert."""
        return 2 * self.expert_ffn

    @property
    def one(self) -> int:
        """Rows of a value head."""
        return 1

    @property
    def full_q(self) -> bool:
        """Whether queries are projected without a latent between."""
        return not self.q_lora

    @property
    def traits(self) -> frozenset[str]:
        """Which sizes are not 0, as rows may need them."""
        return frozenset(name for name in _TRAITS if getattr(self, name))

    def kinds(self, layer: int) -> frozenset[str]:
        """The kinds of a layer. Those of multi-token prediction follow the decoder's, and are built as the last of them.

        Source: megatron-core 0.16.1, ``models/gpt/gpt_layer_specs.py`` (``get_gpt_mtp_block_spec_for_backend``).
        """
        number = min(layer, self.layers - 1)
        return frozenset((MIXTURE if number in self.mixture else DENSE, LINEAR if number in self.linear else FULL))

    def shape(self, dimensions: tuple[str, ...]) -> Shape:
        """A shape given as the names of sizes."""
        return tuple(int(getattr(self, name)) for name in dimensions)


class Arrangement(Enum):
    """How the rows of a Megatron parameter come from those of Hugging Face's."""

    SAME = "one tensor, all rows in the same order"
    STACKED = "all rows of the first, then all rows of the second, ..."
    GROUPED = "for every query group: its query heads, its key head, its value head"
    FUSED = "the same, of one tensor with all query heads, then all key heads, then all value heads"
    GATED = "for every query group: its query heads, their gates, its key head, its value head; each gate lies behind its query"
    DELTA = "every part of all key heads, then the next part; where for every key head all its parts lie together"
    EXPERTS = "for every expert all rows of the first, then of the second, ...; transposed"
    SLICE = "the expert's slice of one tensor of them all; transposed, where it is a matrix"
    IN_TURN = "the same, where gate and up lie in turn"


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
        shape: What its dimensions count, as names of :class:`Sizes`.
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
        parts: For every tensor, the parts that each key head has, as names of sizes per head; see :attr:`Arrangement.DELTA`.
        shift: What is added to every element of Hugging Face's for Megatron's, in parameters and masters; 0 for copies.
    """

    megatron: str
    huggingface: tuple[HfTensor, ...]
    arrangement: Arrangement = Arrangement.SAME
    optional: bool = False
    needs: tuple[str, ...] = ()
    parts: tuple[tuple[str, ...], ...] = ()
    shift: float = 0.0


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
        implementation: The only ``--transformer-impl`` with which Megatron builds it; None where there are two.
        order4: As ``order``, in transformers 4, whose experts are modules one by one; empty where it is no other.
    """

    model_type: str
    class_name: str
    rows: tuple[Row, ...]
    order: tuple[str, ...]
    fields: tuple[Field, ...]
    packed: tuple[Packed, ...] = ()
    needs: tuple[str, ...] = ()
    implementation: str | None = None
    order4: tuple[str, ...] = ()
