"""What the dimensions of a decoder's tensors count."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rlhf.core.box import Shape

from .kinds import DENSE, MIXTURE

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

    @property
    def q_rows(self) -> int:
        """Rows of all queries."""
        return self.heads * self.head

    @property
    def k_rows(self) -> int:
        """Rows of all keys, and of all values."""
        return self.groups * self.head

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

    def kind(self, layer: int) -> str:
        """The kind of a layer. Those of multi-token prediction follow the decoder's, and are built as the last of them.

        Source: megatron-core 0.16.1, ``models/gpt/gpt_layer_specs.py`` (``get_gpt_mtp_block_spec_for_backend``).
        """
        return MIXTURE if min(layer, self.layers - 1) in self.mixture else DENSE

    def shape(self, dimensions: tuple[str, ...]) -> Shape:
        """A shape given as the names of sizes."""
        return tuple(int(getattr(self, name)) for name in dimensions)
