"""Which part of a tensor lies on which rank: a mesh of devices (FSDP2), a range of a flat parameter (FSDP1), or everywhere.

Pure geometry: every rank can say it of all others, so that a table of all chunks is made without asking them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from mcore_rlhf.core.catalog import Box, Shape, flat_boxes
from mcore_rlhf.errors import Unsupported


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
class Replicated:
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


_STRIDED = "_StridedShard"
"""FSDP2's placement where tensor parallelism has cut the same dimension before: its axis comes first, and cuts last."""


@dataclass(slots=True)
class Meshes:
    """The device meshes of a model, each looked at once: ``DTensor``s as splits over them.

    Sources: torch 2.13.0, ``distributed/tensor/placement_types.py``, ``distributed/fsdp/_fully_shard/_fsdp_param.py``.

    Args:
        first: The first of the ranks that the model is dealt out to; of meshes with equal parts, its own is written.
    """

    first: int
    _known: dict[DeviceMesh, Mesh] = field(default_factory=dict)

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is distributed over a mesh."""
        return isinstance(tensor, DTensor)

    def place(self, name: str, tensor: torch.Tensor) -> tuple[Split, torch.Tensor]:
        """How a ``DTensor`` is dealt out, and this rank's part, which shares its memory.

        Raises:
            Unsupported: It is cut in a way that is no single box per rank.
        """
        assert isinstance(tensor, DTensor)
        mesh, shape = self._mesh(tensor.device_mesh), tuple(tensor.shape)
        with torch.no_grad():
            local = tensor.to_local()
        cuts = cuts_of(name, shape, mesh.lengths, tensor.placements)
        return MeshSplit(shape, mesh, cuts, self.first), local.detach()

    def _mesh(self, mesh: DeviceMesh) -> Mesh:
        if mesh not in self._known:
            self._known[mesh] = Mesh.of(tuple(mesh.mesh.shape), mesh.mesh.flatten().tolist())
        return self._known[mesh]


def cuts_of(
    name: str, shape: Shape, lengths: Sequence[int], placements: Sequence[Placement]
) -> tuple[tuple[int, int], ...]:
    """The cuts of a tensor over a mesh, in the order in which they are made.

    Args:
        name: For messages.
        shape: Shape of the whole tensor.
        lengths: Of the mesh's axes.
        placements: One for every axis.

    Raises:
        Unsupported: A placement that is no cut and no copy (partial sums), or uneven parts under tensor parallelism.
    """
    plain, late = [], []
    for axis, placement in enumerate(placements):
        if type(placement).__name__ == _STRIDED:
            _check_strided(name, shape, lengths, placements, axis)
            late.append((axis, int(placement.dim)))  # type: ignore[attr-defined]
        elif isinstance(placement, Shard):
            plain.append((axis, placement.dim % max(len(shape), 1)))
        elif not isinstance(placement, Replicate):
            raise Unsupported(f"{name}: is placed as {placement}\nOnly Shard and Replicate can be saved.")
    return (*plain, *reversed(late))


def _check_strided(name: str, shape: Shape, lengths: Sequence[int], placements: Sequence[Placement], axis: int) -> None:
    dim, factor = int(placements[axis].dim), int(placements[axis].split_factor)  # type: ignore[attr-defined]
    later = prod(
        lengths[other] for other in range(axis + 1, len(placements)) if getattr(placements[other], "dim", None) == dim
    )
    if factor != later or shape[dim] % (later * lengths[axis]):
        raise Unsupported(
            f"{name}: dimension {dim} of {shape} is cut into {later} parts by tensor parallelism and {lengths[axis]} by "
            "FSDP, which is not even\nPad it so that it is, or keep this parameter out of tensor parallelism."
        )


_SHARDED = ("FULL_SHARD", "SHARD_GRAD_OP")


@dataclass(slots=True)
class FlatParams:
    """All original parameters of an FSDP1 model, each a range of a flat one; empty for another.

    Source: torch 2.13.0, ``distributed/fsdp/_flat_param.py`` (``FlatParameter``, ``FlatParamHandle``),
    ``distributed/fsdp/_common_utils.py`` (``_FSDPState``). Only attributes are read; nothing is gathered.
    """

    _places: dict[int, tuple[FlatSplit, Any]] = field(default_factory=dict)
    _kept: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, module: torch.nn.Module) -> FlatParams:
        """Look at a model.

        Raises:
            Unsupported: It was wrapped in a way that does not keep its parameters apart, or that shards nothing.
        """
        found = cls()
        for part in module.modules():
            if isinstance(part, FullyShardedDataParallel) and part._handle is not None:
                found._add(part, part._handle)
        return found

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an original parameter."""
        return id(tensor) in self._places

    def place(self, tensor: torch.Tensor) -> tuple[Split, torch.Tensor]:
        """How an original parameter is dealt out, and this rank's range, which shares its memory."""
        (split, handle), rank = self._places[id(tensor)], dist.get_rank()
        flat = handle.flat_param
        shard = getattr(
            flat, "_local_shard", flat
        ).detach()  # before the first forward, the flat parameter is the shard
        first, stop = split.span(rank)
        if first == stop:
            return split, shard[:0]
        at = split.start + first - split.share * split.mesh.at[rank][0]
        return split, shard[at : at + stop - first]

    def ranks(self) -> tuple[int, ...]:
        """Global ranks that hold parts, in order."""
        return tuple(sorted({rank for split, _ in self._places.values() for rank in split.mesh.at}))

    def _add(self, part: FullyShardedDataParallel, handle: Any) -> None:
        flat = handle.flat_param
        if not handle._use_orig_params:
            raise Unsupported(
                "FSDP1 without use_orig_params keeps one flat parameter, and not the model's own\n"
                "Wrap with use_orig_params=True, or with fully_shard (FSDP2)."
            )
        if handle._sharding_strategy.name not in _SHARDED:
            raise Unsupported(
                f"FSDP1 with {handle._sharding_strategy.name}: only {' and '.join(_SHARDED)} are supported\n"
                "Wrap with fully_shard (FSDP2) on a mesh with a replicating axis, which is."
            )
        ranks = dist.get_process_group_ranks(handle.process_group)
        mesh = Mesh.of((len(ranks),), ranks)
        for param, shape, start in zip(flat._params, flat._shapes, _starts(flat), strict=True):
            split = FlatSplit(tuple(shape), start, int(flat._sharded_size.numel()), mesh)
            self._places[id(param)] = split, handle
            self._kept.append(param)


def _starts(flat: Any) -> Iterator[int]:
    """First element of every original parameter in the flat one; paddings lie between them."""
    at = 0
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            yield at
        at += numel
