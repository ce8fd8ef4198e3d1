"""The classes that torch pickles into a DCP folder's ``.metadata``: their names, and what we keep of each.

Names and fields: torch 2.13.0, ``distributed/checkpoint/metadata.py`` and ``filesystem.py`` (``_StorageInfo``). Reading gives
our own plain values in their place, and writing puts their names where ours would stand: no class of torch's is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

_METADATA = "torch.distributed.checkpoint.metadata"

METADATA = f"{_METADATA}.Metadata"
MEGATRON_METADATA = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"
"""What megatron-core 0.15 derives from it, with ``mcore_data`` of its own, which nothing here needs; 0.16 and later still read it."""
INDEX = f"{_METADATA}.MetadataIndex"
TENSOR = f"{_METADATA}.TensorStorageMetadata"
BYTES = f"{_METADATA}.BytesStorageMetadata"
CHUNK = f"{_METADATA}.ChunkStorageMetadata"
PROPERTIES = f"{_METADATA}.TensorProperties"
MEMORY_FORMAT = f"{_METADATA}._MEM_FORMAT_ENCODING"
STORAGE_META = f"{_METADATA}.StorageMeta"
STORAGE_PREFIX = "torch.distributed.checkpoint.filesystem._StoragePrefix"
STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
LAYOUT = "torch.serialization._get_layout"
SIZE = "torch.Size"
STRIDED = "torch.strided"
CONTIGUOUS = 0
"""``_MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT``."""

_MAX_NDIM = 64

VERSION = "1.0.0"
"""``torch/distributed/checkpoint/default_planner.py``, ``Metadata.version``."""


class Function:
    """A function that a pickle may call, whose attributes it cannot set.

    Args:
        call: It; safe with any argument, and never more expensive than its arguments are long.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[Any], Any]) -> None:
        self._call = call

    def __call__(self, argument: Any) -> Any:
        """Call it."""
        return self._call(argument)

    def __setstate__(self, _state: object) -> NoReturn:
        raise TypeError("a function has no state")


class PickledObject:
    """An object of the pickle: keeps those entries of its state that have a slot, and does nothing else; without a state it has none.

    A pickle can apply a state to a class as well as to an object; on a class :meth:`__setstate__` lacks its second argument.
    """

    __slots__ = ("_done",)
    _done: bool

    def __setstate__(self, state: Any) -> None:
        """Take over what has a slot, once.

        Raises:
            TypeError: The state is not a dictionary, or not the first.
        """
        if type(state) is not dict:
            raise TypeError(f"the state of a {type(self).__name__} is a {type(state).__name__}")
        self._once()
        slots: tuple[str, ...] = type(self).__slots__
        for name in slots:
            setattr(self, name, state.get(name))
        state.clear()  # the unpickler keeps it to the end: of a million chunks, a quarter of all memory

    def _once(self) -> None:
        if hasattr(self, "_done"):
            raise TypeError(f"a second state for one {type(self).__name__}")
        self._done = True


class Metadata(PickledObject):
    """``Metadata``; Megatron's ``all_local_plans`` is not kept."""

    __slots__ = ("planner_data", "state_dict_metadata", "storage_data", "version")


class Index(PickledObject):
    """``MetadataIndex``: as a key of the pickle's dictionary equal to itself only, whatever it holds."""

    __slots__ = ("fqn", "offset")
    fqn: Any
    offset: Any

    def __setstate__(self, state: Any) -> None:
        """Take over a name and an offset.

        Raises:
            TypeError: They are something else.
        """
        super().__setstate__(state)
        if type(self.fqn) is not str or (self.offset is not None and not is_shape(self.offset)):
            raise TypeError("a MetadataIndex that is not made of a name and an offset")


class StoredTensorMeta(PickledObject):
    """``TensorStorageMetadata``."""

    __slots__ = ("chunks", "properties", "size")


class StoredBytesMeta(PickledObject):
    """``BytesStorageMetadata``."""

    __slots__ = ()


class ChunkMeta(PickledObject):
    """``ChunkStorageMetadata``."""

    __slots__ = ("offsets", "sizes")


class StorageInfo(PickledObject):
    """``_StorageInfo``; fields that are None are left out of its state."""

    __slots__ = ("length", "offset", "relative_path", "transform_descriptors")


class Properties(PickledObject):
    """``TensorProperties``: its state is a tuple, ``(dtype, layout, requires_grad, memory format, pin_memory)``.

    Since torch 2.15 the strides in memory follow; those of the stored bytes stand in each item, as before.

    Source: pytorch, torch/distributed/checkpoint/metadata.py and filesystem.py (2.13.0, 2.15.0).
    """

    __slots__ = ("dtype", "layout")

    def __setstate__(self, state: Any) -> None:
        """Take over dtype and layout.

        Raises:
            TypeError: The state is not such a tuple.
        """
        if type(state) is not tuple or len(state) not in (5, 6):
            raise TypeError("the state of TensorProperties is not a tuple of five or six")
        self._once()
        self.dtype, self.layout = state[0], state[1]


def is_shape(value: object) -> bool:
    """Whether that is a tuple of at most 64 sizes: dimensions of a tensor, which 48 bits hold."""
    if type(value) is not tuple or len(value) > _MAX_NDIM:
        return False
    for n in value:  # noqa: SIM110  # all() of a generator takes twice as long, and each chunk has two or three shapes
        if type(n) is not int or not 0 <= n < 1 << 48:
            return False
    return True


def _size(values: Any) -> tuple[int, ...]:
    if not is_shape(values):
        raise TypeError("a torch.Size that does not hold sizes")
    same: tuple[int, ...] = values
    return same


def _same_text(name: Any) -> str:
    if type(name) is not str:
        raise TypeError("a layout that is not a name")
    return name


def _same_number(number: Any) -> int:
    if type(number) is not int:
        raise TypeError("a memory format that is not a number")
    return number


READ: dict[str, Any] = {
    METADATA: Metadata, MEGATRON_METADATA: Metadata, INDEX: Index, TENSOR: StoredTensorMeta, BYTES: StoredBytesMeta, CHUNK: ChunkMeta,
    PROPERTIES: Properties, STORAGE_INFO: StorageInfo, SIZE: Function(_size), LAYOUT: Function(_same_text),
    MEMORY_FORMAT: Function(_same_number),
}  # fmt: skip
"""What each name of the pickle is loaded as. Everything else, such as Megatron's plans, becomes an inert stub or is refused."""
