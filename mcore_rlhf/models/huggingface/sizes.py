"""What the dimensions of a dense decoder's tensors count."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rlhf.core.box import Shape


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a dense decoder.

    Args:
        layers: Decoder layers.
        hidden: Width of the residual stream.
        ffn: Width of the feed-forward, of one of gate and up.
        heads: Query heads.
        groups: Query groups, which are key and value heads.
        head: Width of one head.
        vocabulary: True number of words, without padding.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocabulary: int

    @property
    def q_rows(self) -> int:
        """Rows of all queries."""
        return self.heads * self.head

    @property
    def k_rows(self) -> int:
        """Rows of all keys, and of all values."""
        return self.groups * self.head

    @property
    def one(self) -> int:
        """Rows of a value head."""
        return 1

    def shape(self, dimensions: tuple[str, ...]) -> Shape:
        """A shape given as the names of sizes."""
        return tuple(int(getattr(self, name)) for name in dimensions)
