"""DTensors as torch pickles them, written: the other way round of :mod:`.rankfile`.

A DTensor says of what it is a part by objects of torch's own, whose attributes another release calls otherwise, so that no release reads
the files of all others. Which attributes a mesh has is a row of :class:`Release`.

Sources: torch ``distributed/device_mesh.py`` (``DeviceMesh``), ``distributed/_mesh_layout.py``, ``distributed/tensor/_dtensor_spec.py``,
``distributed/tensor/placement_types.py`` of 2.8.0, 2.9.1, 2.10.0, 2.11.0, 2.12.0, 2.13.0, 2.14.1 and 2.15.0; files that 2.13.0 wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from types import MappingProxyType
from typing import Any

from mcore_rlhf.core.catalog import Shape, dtype_of, row_major

from ..stored import Made, StoredTensor, TorchName
from ..torch_values import SmallTensor, TorchDevice, TorchSize, torch_dtype

_TENSOR, _MESH, _LAYOUT = "torch.distributed.tensor", "torch.distributed.device_mesh", "torch.distributed._mesh_layout"
_SPEC = f"{_TENSOR}._dtensor_spec"
_WORLD = "0"
"""What torch calls the group of all ranks."""
_RANK_ORDER = "_preserve_rank_order"


class Release(Enum):
    """Releases of torch whose meshes have the same attributes, by the first of them; the newest is last."""

    T2_8 = "2.8"
    T2_10 = "2.10"
    T2_13 = "2.13"
    T2_15 = "2.15"

    @classmethod
    def of(cls, mesh: Mapping[str, Any], layout: Mapping[str, Any]) -> Release:
        """The releases that have written a mesh.

        Args:
            mesh: Its attributes.
            layout: Those of its layout; empty where it has none.
        """
        if "_layout" not in mesh:
            return cls.T2_8
        if _RANK_ORDER in mesh:
            return cls.T2_15
        return cls.T2_13 if "axes" in layout else cls.T2_10


NEWEST = Release.T2_15
"""What is written where nothing shows which: 2.13 reads it as well, which asks nothing of an attribute more."""


@dataclass(frozen=True, slots=True)
class ReplicaAxis:
    """An axis in front of the one along which a mesh cuts, whose ranks have the same (HSDP).

    Args:
        name: What the mesh calls it; empty where its axes have no names.
        width: Ranks of a copy, which stand behind one another.
        groups: For each rank of the world, what torch calls the groups that it has along the two axes; FSDP1 gathers in those of a file.
    """

    name: str
    width: int
    groups: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class SavingMesh:
    """The ranks of a world in a row, as one of them sees them.

    Args:
        device: What they compute on: ``cuda``, ``cpu``.
        world: How many they are.
        rank: Which of them writes.
        name: What the mesh calls its one axis; a run's own mesh must call it so, or torch takes the two for different ones. Empty for none.
        release: Whose attributes it has.
    """

    device: str
    world: int
    rank: int
    name: str = "fsdp"
    release: Release = NEWEST
    copies: ReplicaAxis | None = None

    @property
    def names(self) -> tuple[str, ...] | None:
        """What it calls its axes."""
        outer = () if self.copies is None else (self.copies.name,)
        return (*outer, self.name) if self.name else None

    @property
    def shape(self) -> tuple[int, ...]:
        """How long they are."""
        return (self.world,) if self.copies is None else (self.world // self.copies.width, self.copies.width)

    @property
    def place(self) -> tuple[int, ...]:
        """Where the rank is along them."""
        return (self.rank,) if self.copies is None else divmod(self.rank, self.copies.width)

    @property
    def groups(self) -> list[str]:
        """What torch calls its groups along them."""
        return [_WORLD] if self.copies is None else [*self.copies.groups[self.rank]]

    @cached_property
    def made(self) -> Made:
        """The mesh: one object for all tensors of a file."""
        return _object(f"{_MESH}.DeviceMesh", _ATTRIBUTES[self.release](self))

    @cached_property
    def layout(self) -> Made:
        """What torch calls a tensor's layout."""
        return Made(TorchName("torch.serialization._get_layout"), ("torch.strided",), None, new=False)


def dtensor(stored: StoredTensor, global_shape: Shape, dim: int, mesh: SavingMesh) -> Made:
    """A rank's part of a tensor.

    Args:
        stored: Its elements.
        global_shape: Shape of the whole tensor.
        dim: The dimension that is cut.
        mesh: The ranks.
    """
    dtype, strides = torch_dtype(str(stored.record.dtype)), row_major(global_shape)
    cls = TorchName(f"{_TENSOR}.DTensor")
    wrapper = (cls, dtype, global_shape, strides, 0, mesh.layout, TorchDevice("cpu"), False)
    slots = {
        "_local_tensor": stored,
        "_spec": _spec(mesh, dim, (TorchSize(global_shape), row_major(global_shape), dtype)),
    }
    build = TorchName("torch._utils._rebuild_wrapper_subclass")
    return Made(TorchName("torch._tensor._rebuild_from_type_v2"), (build, cls, wrapper, (None, slots)), None, new=False)


def _spec(mesh: SavingMesh, dim: int, meta: tuple[Any, ...]) -> Made:
    placement = _object(f"{_TENSOR}.placement_types.Shard", {"dim": dim})
    outer = () if mesh.copies is None else (_object(f"{_TENSOR}.placement_types.Replicate", {}),)
    fields = {"mesh": mesh.made, "placements": (*outer, placement), "tensor_meta": _tuple(f"{_SPEC}.TensorMeta", *meta)}
    if mesh.release is not Release.T2_8:
        fields["shard_order"] = (_tuple(f"{_SPEC}.ShardOrderEntry", dim, (len(outer),)),)
        fields["use_strided_shard_as_shard_order"] = False
    return _object(f"{_SPEC}.DTensorSpec", {**fields, "_hash": None})


def _object(name: str, fields: Mapping[str, Any]) -> Made:
    return Made(TorchName(name), (), dict(fields), new=True)


def _tuple(name: str, *values: Any) -> Made:
    return Made(TorchName(name), values, None, new=True)


def _ranks(mesh: SavingMesh, shape: Shape) -> SmallTensor:
    data = b"".join(rank.to_bytes(4, "little") for rank in range(mesh.world))
    return SmallTensor(data, dtype_of("int32"), shape, row_major(shape))


def _of_2_8(mesh: SavingMesh) -> dict[str, Any]:
    return {
        "device_type": mesh.device, "mesh": _ranks(mesh, mesh.shape), "mesh_dim_names": mesh.names,
        "_flatten_mesh_list": tuple(range(mesh.world)), "_thread_id": None, "_dim_group_names": mesh.groups,
        "_coordinate_on_dim": [*mesh.place], "_hash": None,
    }  # fmt: skip


def _of_2_10(mesh: SavingMesh) -> dict[str, Any]:
    return _since_2_10(mesh, {"shape": mesh.shape, "stride": row_major(mesh.shape)})


def _of_2_13(mesh: SavingMesh, **more: Any) -> dict[str, Any]:
    along = zip(mesh.shape, row_major(mesh.shape), strict=True)
    axes = [
        {"shape": (size,), "stride": (stride,)} if size > 1 else {"shape": (), "stride": ()} for size, stride in along
    ]
    return _since_2_10(mesh, {"axes": tuple(_object(f"{_LAYOUT}._FlatLayout", axis) for axis in axes)}, more)


def _of_2_15(mesh: SavingMesh) -> dict[str, Any]:
    """It compares meshes by an attribute that older ones have not, and so loads none of their files."""
    return _of_2_13(mesh, **{_RANK_ORDER: False})


def _since_2_10(
    mesh: SavingMesh, layout: Mapping[str, Any], more: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    return {
        "_device_type": mesh.device, "_layout": _object(f"{_LAYOUT}._MeshLayout", layout), "_rank_map": _ranks(mesh, (mesh.world,)),
        "_mesh_dim_names": mesh.names, "_root_mesh": None, **more, "_flatten_rank_map": tuple(range(mesh.world)), "_thread_id": None,
        "_flatten_mapping": {}, "_dim_group_names": mesh.groups, "_rank": mesh.rank, "_coordinate_on_dim": mesh.place, "_hash": None,
    }  # fmt: skip


_ATTRIBUTES: dict[Release, Callable[[SavingMesh], dict[str, Any]]] = {
    Release.T2_8: _of_2_8,
    Release.T2_10: _of_2_10,
    Release.T2_13: _of_2_13,
    Release.T2_15: _of_2_15,
}
