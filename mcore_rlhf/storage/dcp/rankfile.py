"""A ``.pt`` file of one rank with DTensors in it: its structure, with each local tensor where it lies and what it is a part of.

torch's ``weights_only`` unpickler makes DTensors of torch's own classes, which need a process group. Here they are :class:`Local`.
Source: torch 2.13.0, ``_tensor.py`` (``_reduce_ex_internal``, ``_rebuild_from_type_v2``), ``_utils.py``
(``_rebuild_wrapper_subclass``), ``distributed/tensor/_dtensor_spec.py``; seen in files of FSDP and FSDP2.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rlhf.core.box import Shape
from mcore_rlhf.core.catalog import Record
from mcore_rlhf.core.dtype import DType, dtype_of
from mcore_rlhf.errors import Corrupt, Unsupported

from ..paths import inside
from ..stored import StoredTensor
from ..stubs import Stub, stub_class
from ..torchzip import Directory, read_directory
from .closed import RESTORE, Function, unpickle_closed

_DTENSOR = "DTensor"
_STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Local:
    """A rank's part of a tensor.

    Args:
        stored: Where it lies.
        global_shape: Shape of the whole tensor.
        dims: For each axis of the mesh, the dimension that is cut along it, or None where the axis replicates.
    """

    stored: StoredTensor
    global_shape: Shape
    dims: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class RankFile:
    """An opened file.

    Args:
        file: Path relative to the checkpoint's root.
        tree: What was saved; tensors are :class:`~..stored.StoredTensor`, DTensors :class:`Local`.
        directory: The records, with their CRCs.
    """

    file: str
    tree: Any
    directory: Directory


def read_rank_file(root: Path, file: str, stubs: Collection[str] = ()) -> RankFile:
    """Open a file of one rank. No byte of a tensor is read, and nothing of it is run.

    Args:
        root: The checkpoint's folder.
        file: Path relative to it.
        stubs: Names that the user allows as inert stubs.

    Raises:
        CheckpointError: It is missing, damaged, or has something in it that is not supported.
    """
    directory = read_directory(inside(root, file))
    reading = _Reading(file, directory)
    data = directory.read("data.pkl")
    tree = unpickle_closed(data, str(directory.path), reading.resolve, stubs, reading.storage)
    return RankFile(file, tree, directory)


@dataclass(frozen=True, slots=True)
class _Reading:
    file: str
    directory: Directory

    def resolve(self, name: str) -> Any:
        """What a name of torch's becomes."""
        module, _, last = name.rpartition(".")
        if module == "torch" and last in _STORAGES:
            return _STORAGES[last]
        found = self._functions().get(name)
        if found is not None:
            return Function(found)
        if module.startswith("torch.distributed.") and module.partition(".rpc")[0] == module:
            return stub_class(name)
        return None

    def _functions(self) -> dict[str, Any]:
        return {
            "collections.OrderedDict": OrderedDict,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_parameter": lambda data, *_: data,
            "torch._utils._rebuild_wrapper_subclass": lambda *args: args,
            "torch._tensor._rebuild_from_type_v2": self._from_type,
            "torch.serialization._get_layout": lambda name: name,
            "torch.device": lambda *args: ":".join(map(str, args)),
            "torch.Size": lambda values=(): tuple(values),
        }

    def storage(self, pid: Any) -> Record:
        """A storage: ``("storage", type, key, location, elements)``."""
        _, name, key, _, numel = pid
        dtype: DType = dtype_of(name)
        member = self.directory.members[f"data/{key}"]
        if type(numel) is not int or numel * dtype.itemsize != member.nbytes:
            raise Corrupt(
                f"{self.directory.path}: storage {key} has {member.nbytes} bytes, not {numel} {dtype}\n{RESTORE}"
            )
        return Record(self.file, member.name, dtype, numel, member.byte_offset)

    def _tensor(self, record: Any, start: Any, shape: Any, strides: Any, *_: Any) -> StoredTensor:
        shape, strides = tuple(shape), tuple(strides)
        numbers = (start, *shape, *strides)
        if not isinstance(record, Record) or any(type(n) is not int or n < 0 for n in numbers):
            raise Corrupt(f"{self.directory.path}: a tensor of shape {shape} and strides {strides}\n{RESTORE}")
        stored = StoredTensor(record, start, shape, strides)
        if len(shape) != len(strides) or stored.stop > record.numel:
            raise Corrupt(
                f"{self.directory.path}: a tensor of shape {shape} reaches beyond its storage {record.key}\n{RESTORE}"
            )
        return stored

    def _from_type(self, _function: Any, cls: Any, args: Any, state: Any) -> Local:
        """A DTensor: ``args`` are those of its wrapper, the state has its local tensor and what it is a part of."""
        name = getattr(cls, "stub_name", str(cls))
        if not name.endswith(f".{_DTENSOR}"):
            raise Unsupported(
                f"{self.directory.path}: holds a tensor of the class {name}; only plain tensors and DTensors can be read\n"
                "Runs that make a device mesh save DTensors."
            )
        fields = _merged(state)
        placements = _state(fields["_spec"])["placements"]
        return Local(fields["_local_tensor"], tuple(args[2]), tuple(map(self._dim, placements)))

    def _dim(self, placement: Any) -> int | None:
        kind = getattr(type(placement), "stub_name", "").rpartition(".")[2]
        if kind == "Replicate":
            return None
        if kind == "Shard":
            return int(_state(placement)["dim"])
        raise Unsupported(
            f"{self.directory.path}: a tensor is placed as {kind or placement!r}; only whole copies and plain cuts can be read\n"
            "With tensor parallelism, save with torch.distributed.checkpoint."
        )


def _state(value: Any) -> dict[str, Any]:
    """The fields of an object of torch's."""
    return _merged(value.stub_state if isinstance(value, Stub) else None)


def _merged(state: Any) -> dict[str, Any]:
    """A state as the pickle has it: a dictionary, or, of a class with slots, a pair of them."""
    parts = state if isinstance(state, tuple) else (state,)
    return {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}
