"""Which part of a tensor lies on which rank: a mesh of devices (FSDP2), a range of a flat parameter (FSDP1), or everywhere.

Pure geometry: every rank can say it of all others, so that a table of all chunks is made without asking them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Protocol

from mcore_rlhf.core.box import Box, Shape, flat_boxes


class Split(Protocol):
    """How a tensor is dealt out."""

    @property
    def global_shape(self) -> Shape:
        """Shape of the whole tensor."""
        ...

    @property
    def first(self) -> int:
        """The rank that writes what belongs to the tensor and is not cut, such as the optimizer's count of steps."""
        ...

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The parts that a global rank holds, in the order in which they lie in its memory; none of them is empty."""
        ...

    def written(self, rank: int) -> tuple[Box, ...]:
        """Those that the rank writes: where several hold the same, one of them does."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """Ranks in rows and columns.

    Args:
        lengths: Of every axis.
        at: Global rank → its place on every axis.
    """

    lengths: tuple[int, ...]
    at: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(cls, lengths: Sequence[int], ranks: Sequence[int]) -> Mesh:
        """A mesh of these ranks, the last axis running fastest."""
        places = product(*(range(length) for length in lengths))
        return cls(tuple(lengths), dict(zip(ranks, places, strict=True)))


@dataclass(frozen=True, slots=True)
class MeshSplit:
    """A tensor cut along the axes of a mesh, as a ``DTensor`` is.

    An axis that cuts dimension ``d`` deals out ``ceil(n / parts)`` rows to each of its ranks as ``torch.chunk`` does: the
    last ones get fewer, or none. An axis that cuts none keeps equal copies, of which the first is written.

    Source: torch 2.13.0, ``distributed/tensor/placement_types.py`` (``Shard.local_shard_size_and_offset``).

    Args:
        global_shape: Shape of the whole tensor.
        mesh: The ranks.
        cuts: ``(axis, dimension)`` in the order in which they cut.
        first: The first of all ranks. Under tensor parallelism, what is not cut by it lies on several meshes with equal parts;
            the one with this rank is written.
    """

    global_shape: Shape
    mesh: Mesh
    cuts: tuple[tuple[int, int], ...]
    first: int

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """See :meth:`Split.boxes`."""
        if rank not in self.mesh.at:
            return ()
        offset, shape, at = [0] * len(self.global_shape), list(self.global_shape), self.mesh.at[rank]
        for axis, dim in self.cuts:
            step = -(-shape[dim] // self.mesh.lengths[axis])
            first = min(step * at[axis], shape[dim])
            offset[dim], shape[dim] = offset[dim] + first, min(step, shape[dim] - first)
        return (Box(tuple(offset), tuple(shape)),) if prod(shape) else ()

    def written(self, rank: int) -> tuple[Box, ...]:
        """See :meth:`Split.written`."""
        cutting = {axis for axis, _ in self.cuts}
        copy = any(place for axis, place in enumerate(self.mesh.at.get(rank, ())) if axis not in cutting)
        return () if copy or self.first not in self.mesh.at else self.boxes(rank)


@dataclass(frozen=True, slots=True)
class FlatSplit:
    """A parameter in a flat one that is dealt out in equal ranges.

    Source: torch 2.13.0, ``distributed/fsdp/_flat_param.py`` (``FlatParamHandle.shard``).

    Args:
        global_shape: Shape of the whole parameter.
        start: Its first element in the flat one.
        share: Elements of the flat parameter that each rank has.
        mesh: The ranks, on one axis, in the order of their ranges.
    """

    global_shape: Shape
    start: int
    share: int
    mesh: Mesh

    @property
    def first(self) -> int:
        """See :attr:`Split.first`: ranks without a part of the parameter have no state of it."""
        ranks = list(self.mesh.at)
        return ranks[min(self.start // self.share, len(ranks) - 1)]

    def span(self, rank: int) -> tuple[int, int]:
        """The first element of the parameter that a rank holds, and one past the last; equal where it has none."""
        if rank not in self.mesh.at:
            return 0, 0
        low, numel = self.mesh.at[rank][0] * self.share - self.start, prod(self.global_shape)
        first = min(max(low, 0), numel)
        return first, max(first, min(low + self.share, numel))

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """See :meth:`Split.boxes`."""
        return tuple(flat_boxes(self.global_shape, *self.span(rank)))

    def written(self, rank: int) -> tuple[Box, ...]:
        """See :meth:`Split.written`."""
        return self.boxes(rank)


@dataclass(frozen=True, slots=True)
class Everywhere:
    """A tensor that all ranks have; the first writes it.

    Args:
        global_shape: Its shape.
        first: The global rank that writes it.
    """

    global_shape: Shape
    first: int

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """See :meth:`Split.boxes`."""
        del rank
        return (Box.whole(self.global_shape),) if prod(self.global_shape) else ()

    def written(self, rank: int) -> tuple[Box, ...]:
        """See :meth:`Split.written`."""
        return self.boxes(rank) if rank == self.first else ()
