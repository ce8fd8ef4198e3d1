"""ModelSpec and ParamSpec: what a model is, independent of how it is cut and stored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from mcore_rlhf.core.box import Shape
from mcore_rlhf.core.dtype import DType


@dataclass(frozen=True, slots=True)
class Partition:
    """How one tensor is cut over tensor-parallel (or expert-tensor-parallel) ranks.

    Args:
        dim: The dimension that is cut, or None for a tensor that every rank holds whole.
        blocks: The dimension is made of that many equal blocks, and each rank holds its part of *each* block:
            2 for a fused ``[gate; up]``.
        vocabulary: The dimension counts words, and is padded to a size that depends on the degree.
        stacked: The stored dimension along which the local experts lie stacked (``GroupedMLP``). The tensor is then
            seen as ``(experts, *shape of one expert)``, and ``dim`` counts in that view.
        parts: The dimension is made of blocks of unequal size instead: name and elements of each, of the whole tensor.
        own_copies: Every rank has a copy of its own, which the others' need not equal. The tensor is seen as all of
            them, one behind the other, and exists at its own degree only.
    """

    dim: int | None = None
    blocks: int = 1
    vocabulary: bool = False
    stacked: int | None = None
    parts: tuple[tuple[str, int], ...] = ()
    own_copies: bool = False

    def __str__(self) -> str:
        if self.dim is None:
            return "replicated"
        if self.own_copies:
            return "a copy of its own on every rank"
        if self.parts:
            return f"split({self.dim}) in {', '.join(f'{name} {size}' for name, size in self.parts)}"
        kind = "vocabulary" if self.vocabulary else "split"
        return f"{kind}({self.dim})" + (f" in {self.blocks} blocks" if self.blocks > 1 else "")


REPLICATED = Partition()
COLUMN = Partition(0)
ROW = Partition(1)
GATED = Partition(0, blocks=2)
VOCABULARY = Partition(0, vocabulary=True)
OWN_COPIES = Partition(0, own_copies=True)


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One tensor of a model.

    Args:
        name: Global name: layer and expert numbers count over the whole model.
        global_shape: Shape before any cut. Stacked experts are seen as ``(experts, *shape of one)``.
        dtype: Element type of the parameter as the model computes with it.
        partition: How it is cut.
        trainable: Whether the optimizer has states for it; False for buffers and frozen parameters.
    """

    name: str
    global_shape: Shape
    dtype: DType
    partition: Partition
    trainable: bool = True


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole model.

    Args:
        params: In registration order.
        num_layers: Decoder layers, multi-token-prediction layers not counted.
        tied: Whether the output layer shares the word embedding's weight.
        mtp_layers: Multi-token-prediction layers.
        num_experts: Routed experts per mixture layer; 0 for a dense model.
        vocab_size: True number of words, or None where nobody said.
        padded_vocab_size: Rows of the embedding as stored.
        unused: Parameters that the framework stores in some layouts only, and never uses.
    """

    params: tuple[ParamSpec, ...]
    num_layers: int
    tied: bool
    mtp_layers: int = 0
    num_experts: int = 0
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    unused: frozenset[str] = frozenset()
    _index: dict[str, ParamSpec] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._index.update((param.name, param) for param in self.params)

    def get(self, name: str) -> ParamSpec | None:
        """The parameter of that global name, or None."""
        return self._index.get(name)

    @property
    def shapes(self) -> dict[str, Shape]:
        """The global shape of every parameter."""
        return {param.name: param.global_shape for param in self.params}

    def with_vocabulary(self, rows: int | None) -> dict[str, int]:
        """Every parameter whose rows are words, with that number of rows; none for None."""
        return {} if rows is None else {spec.name: rows for spec in self.params if spec.partition.vocabulary}

    def having(self, params: Iterable[ParamSpec]) -> ModelSpec:
        """The same model with other parameters."""
        return replace(self, params=tuple(params), _index={})
