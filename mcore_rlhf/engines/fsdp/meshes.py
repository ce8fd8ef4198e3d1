"""``DTensor``s as splits over a mesh.

Sources: torch 2.13.0, ``distributed/tensor/placement_types.py``, ``distributed/fsdp/_fully_shard/_fsdp_param.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from mcore_rlhf.core.box import Shape
from mcore_rlhf.errors import Unsupported

from .geometry import Mesh, MeshSplit, Split

_STRIDED = "_StridedShard"
"""FSDP2's placement where tensor parallelism has cut the same dimension before: its axis comes first, and cuts last."""


@dataclass(slots=True)
class Meshes:
    """The device meshes of a model, each looked at once.

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
