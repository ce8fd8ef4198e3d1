"""A ``.pt`` file of one rank with DTensors in it: its structure, with each local tensor where it lies and what it is a part of.

torch makes DTensors of its own classes, which need a process group. Here they are :class:`Local`.
Source: torch 2.13.0, ``_tensor.py`` (``_reduce_ex_internal``, ``_rebuild_from_type_v2``), ``_utils.py``
(``_rebuild_wrapper_subclass``), ``distributed/tensor/_dtensor_spec.py``; seen in files of FSDP and FSDP2.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from mcore_rlhf.core.catalog import Shape
from mcore_rlhf.errors import Corrupt, Unsupported, shown

from ..meanings import Resolver, Unfit, shape_of
from ..paths import ReadablePath, beneath
from ..resolve import read_tree
from ..stored import StoredTensor, Stub
from ..torchzip import Directory, read_directory
from ..unpickle import Vocabulary
from .sharded import NEWEST, Release

_DTENSOR = "DTensor"
_LONGEST = 256
"""No name of a group is longer."""


@dataclass(frozen=True, slots=True)
class MeshSaid:
    """What a mesh says of a run.

    Args:
        device: On what it computes; empty where that is no word.
        names: What it calls the axes of its mesh; empty where they have no names.
        release: Releases of torch that write such a mesh.
        shape: How long its axes are; empty where that is not understood.
        groups: What torch calls the groups that the rank has along them; empty likewise.
    """

    device: str = ""
    names: tuple[str, ...] = ()
    release: Release = NEWEST
    shape: Shape = ()
    groups: tuple[str, ...] = ()

    @classmethod
    def of(cls, mesh: dict[str, Any]) -> MeshSaid:
        """What the attributes of a mesh say."""
        release = Release.of(mesh, _state(mesh.get("_layout")))
        first = "" if release is Release.T2_8 else "_"
        device, names = mesh.get(f"{first}device_type"), mesh.get(f"{first}mesh_dim_names")
        listed = tuple(names) if isinstance(names, tuple | list) else ()
        known = device if isinstance(device, str) and device.isidentifier() else ""
        groups = _texts(mesh.get("_dim_group_names"))
        return cls(known, listed if all(type(name) is str for name in listed) else (), release, _axes(mesh), groups)


@dataclass(frozen=True, slots=True)
class Local:
    """A rank's part of a tensor.

    Args:
        stored: Where it lies.
        global_shape: Shape of the whole tensor.
        dims: For each axis of the mesh, the dimension that is cut along it, or None where the axis replicates.
        rank: The rank that wrote it, as its mesh says; None where it does not. Source: torch 2.13.0, ``distributed/device_mesh.py``.
        mesh: What else the mesh says.
    """

    stored: StoredTensor
    global_shape: Shape
    dims: tuple[int | None, ...]
    rank: int | None = None
    mesh: MeshSaid = MeshSaid()


@dataclass(frozen=True, slots=True)
class RankFile:
    """An opened file.

    Args:
        file: ReadablePath relative to the checkpoint's root.
        tree: What was saved; tensors are :class:`~..stored.StoredTensor`, DTensors :class:`Local`.
        directory: The records, with their CRCs.
    """

    file: str
    tree: Any
    directory: Directory


def read_rank_file(root: ReadablePath, file: str, stubs: Collection[str] = ()) -> RankFile:
    """Open a file of one rank. No byte of a tensor is read, and nothing of it is run.

    Args:
        root: The checkpoint's folder.
        file: ReadablePath relative to it.
        stubs: Names that the user allows as inert stubs.

    Raises:
        CheckpointError: It is missing, damaged, or has something in it that is not supported.
    """
    directory = read_directory(beneath(root, file))
    data = directory.read("data.pkl")
    return RankFile(file, read_tree(data, file, directory, stubs, _VOCABULARY, _local), directory)


_VOCABULARY = Vocabulary({}, lambda name: name.startswith("torch.distributed.") and ".rpc" not in name)


def _local(resolver: Resolver, name: str, args: tuple[Any, ...], state: Any) -> Local:
    """A DTensor: the arguments are those of its wrapper, the state has its local tensor and what it is a part of."""
    if not name.endswith(f".{_DTENSOR}"):
        raise Unfit(
            Unsupported,
            f"a tensor of the class {name}; only plain tensors and DTensors can be read, and runs that make a device mesh save DTensors",
        )
    fields = _merged(state)
    spec = _state(fields.get("_spec"))
    mesh = _state(spec.get("mesh"))
    placements, rank = spec.get("placements"), _rank_of(mesh)
    stored = resolver.resolve(fields.get("_local_tensor"))
    if not isinstance(stored, StoredTensor) or type(placements) is not tuple or len(args) < 3:
        raise Unfit(Corrupt, "a DTensor without a local tensor, or without its placements")
    whole, dims = shape_of(args[2]), tuple(map(_dim, placements))
    if not dims or len(stored.shape) != len(whole) or any(dim not in (None, *range(len(whole))) for dim in dims):
        text = (
            f"a DTensor of shape {shown(whole)} whose part has the shape {shown(stored.shape)}, cut along {shown(dims)}"
        )
        raise Unfit(Corrupt, text)
    return Local(stored, whole, dims, rank if type(rank) is int else None, MeshSaid.of(mesh))


def _rank_of(mesh: dict[str, Any]) -> Any:
    """The rank that wrote; before 2.11, its place in a mesh of one axis, which is the same."""
    place = mesh.get("_coordinate_on_dim")
    alone = isinstance(place, list | tuple) and len(place) == 1
    return mesh.get("_rank", place[0] if alone and isinstance(place, list | tuple) else None)


def _axes(mesh: dict[str, Any]) -> Shape:
    """How long a mesh's axes are, as one of the releases says it."""
    layout = _state(mesh.get("_layout"))
    axes, shape = layout.get("axes"), layout.get("shape", getattr(mesh.get("mesh"), "shape", None))
    if isinstance(axes, tuple | list):
        shape = tuple(size for axis in axes for size in _state(axis).get("shape", ()) or (1,))
    known = isinstance(shape, tuple | list) and all(type(size) is int and size > 0 for size in shape)
    return tuple(shape) if known and shape is not None else ()


def _texts(value: Any) -> tuple[str, ...]:
    """Short texts of a list; nothing where some are none."""
    listed = tuple(value) if isinstance(value, tuple | list) else ()
    return listed if all(type(text) is str and len(text) < _LONGEST for text in listed) else ()


def _dim(placement: Any) -> int | None:
    kind = getattr(type(placement), "stub_name", "").rpartition(".")[2]
    if kind == "Replicate":
        return None
    dim = _state(placement).get("dim")
    if kind == "Shard" and type(dim) is int:
        return dim
    raise Unfit(
        Unsupported,
        f"a tensor that is placed as {kind or shown(placement)}; only whole copies and plain cuts can be read: "
        "with tensor parallelism, save with torch.distributed.checkpoint",
    )


def _state(value: Any) -> dict[str, Any]:
    """The fields of an object of torch's."""
    return _merged(value.stub_state if isinstance(value, Stub) else None)


def _merged(state: Any) -> dict[str, Any]:
    """A state as the pickle has it: a dictionary, or, of a class with slots, a pair of them."""
    parts = state if isinstance(state, tuple) else (state,)
    return {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}
