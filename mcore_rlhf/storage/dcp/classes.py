"""The classes that torch pickles into a DCP folder's ``.metadata``: their names, and what we keep of each.

Names and fields: torch 2.13.0, ``distributed/checkpoint/metadata.py`` and ``filesystem.py`` (``_StorageInfo``). Reading gives
our own plain values in their place, and writing puts their names where ours would stand: no class of torch's is imported.
"""

from __future__ import annotations

from typing import Any

from .closed import Function

_METADATA = "torch.distributed.checkpoint.metadata"

METADATA = f"{_METADATA}.Metadata"
INDEX = f"{_METADATA}.MetadataIndex"
TENSOR = f"{_METADATA}.TensorStorageMetadata"
BYTES = f"{_METADATA}.BytesStorageMetadata"
CHUNK = f"{_METADATA}.ChunkStorageMetadata"
PROPERTIES = f"{_METADATA}.TensorProperties"
MEMORY_FORMAT = f"{_METADATA}._MEM_FORMAT_ENCODING"
STORAGE_META = f"{_METADATA}.StorageMeta"
STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
LAYOUT = "torch.serialization._get_layout"
SIZE = "torch.Size"
STRIDED = "torch.strided"
CONTIGUOUS = 0
"""``_MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT``."""

VERSION = "1.0.0"
"""``torch/distributed/checkpoint/default_planner.py``, ``Metadata.version``."""


class Pickled:
    """An object of the pickle: keeps those entries of its state that have a slot, and does nothing else.

    A pickle can apply a state to a class as well as to an object; on a class :meth:`__setstate__` lacks its second argument.
    """

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        """Take over what has a slot.

        Raises:
            TypeError: The state is not a dictionary.
        """
        if type(state) is not dict:
            raise TypeError(f"the state of a {type(self).__name__} is a {type(state).__name__}")
        slots: tuple[str, ...] = type(self).__slots__
        for name in slots:
            setattr(self, name, state.get(name))

    def __getattr__(self, name: str) -> Any:  # only where no state came
        if name in type(self).__slots__:
            return None
        raise AttributeError(name)


class Metadata(Pickled):
    """``Metadata``; Megatron's ``all_local_plans`` is not kept."""

    __slots__ = ("planner_data", "state_dict_metadata", "storage_data", "version")


class Index(Pickled):
    """``MetadataIndex``: equal by name and offset, as torch's is."""

    __slots__ = ("fqn", "offset")

    def _key(self) -> tuple[Any, Any]:
        return self.fqn, self.offset

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


class StoredTensorMeta(Pickled):
    """``TensorStorageMetadata``."""

    __slots__ = ("chunks", "properties", "size")


class StoredBytesMeta(Pickled):
    """``BytesStorageMetadata``."""

    __slots__ = ()


class ChunkMeta(Pickled):
    """``ChunkStorageMetadata``."""

    __slots__ = ("offsets", "sizes")


class StorageInfo(Pickled):
    """``_StorageInfo``; fields that are None are left out of its state."""

    __slots__ = ("length", "offset", "relative_path", "transform_descriptors")


class Properties(Pickled):
    """``TensorProperties``: its state is a tuple, ``(dtype, layout, requires_grad, memory format, pin_memory)``."""

    __slots__ = ("dtype", "layout")

    def __setstate__(self, state: Any) -> None:
        """Take over dtype and layout.

        Raises:
            TypeError: The state is not such a tuple.
        """
        if type(state) is not tuple or len(state) != 5:
            raise TypeError("the state of TensorProperties is not a tuple of five")
        self.dtype, self.layout = state[0], state[1]


def _size(values: Any = ()) -> tuple[Any, ...]:
    return tuple(values)


def _layout(name: Any) -> Any:
    return name


def _memory_format(number: Any) -> Any:
    return number


READ: dict[str, Any] = {
    METADATA: Metadata, INDEX: Index, TENSOR: StoredTensorMeta, BYTES: StoredBytesMeta, CHUNK: ChunkMeta,
    PROPERTIES: Properties, STORAGE_INFO: StorageInfo, SIZE: Function(_size), LAYOUT: Function(_layout),
    MEMORY_FORMAT: Function(_memory_format),
}  # fmt: skip
"""What each name of the pickle is loaded as. Everything else, such as Megatron's plans, becomes an inert stub or is refused."""
