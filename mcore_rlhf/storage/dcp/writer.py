"""Writing ``.distcp`` files as a stream: items laid end to end, each a zip as ``torch.save`` makes it, filled in any order.

``.metadata`` follows from the items alone, so that it is known before a byte of a tensor is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, ClassVar

from mcore_rlhf.core.box import Shape
from mcore_rlhf.core.catalog import Record
from mcore_rlhf.core.dtype import DType

from ..pickling import pickle_tree
from ..pt import stream_layout
from ..record_file import Container, Layout, Piece, in_memory
from ..stored import StoredTensor
from .checks import item_key
from .metadata import DcpMetadata, Path_, Place, TensorMeta
from .pickled import pickle_metadata

_DATA = "data/0"


@dataclass(frozen=True, slots=True)
class TensorItem:
    """One chunk of a tensor, to be written contiguously.

    Args:
        fqn: The tensor's name.
        dtype: Element type.
        offset: Where the chunk lies in the tensor; ``()`` for a 0-dim one.
        shape: The chunk's shape.
        data: Its bytes where they are known, as those of a counter; such an item needs no record.
    """

    fqn: str
    dtype: DType
    offset: Shape
    shape: Shape
    data: bytes | None = None

    @property
    def key(self) -> str:
        """Key of its record in the file."""
        return item_key(self.fqn, self.offset)


@dataclass(frozen=True, slots=True)
class ObjectItem:
    """Something that is not a tensor.

    Args:
        fqn: Its name.
        data: A zip of ``torch.save``: see :func:`saved`, or :meth:`.folder.DcpObject.data`.
    """

    fqn: str
    data: bytes


Item = TensorItem | ObjectItem


def saved(tree: Any) -> bytes:
    """What ``torch.save`` writes for an object, tensors in it included.

    Args:
        tree: See :func:`..pickling.pickle_tree`; its tensors are small, or a live trainer's.

    Raises:
        Unsupported: It holds something that cannot be saved.
    """
    return in_memory(stream_layout(pickle_tree(tree, "")))


@lru_cache(maxsize=4096)
def _tensor_zip(dtype: DType, shape: Shape) -> Layout:
    """The zip of a contiguous tensor; chunks of one shape share it."""
    return stream_layout(pickle_tree(StoredTensor.whole(Record("", _DATA, dtype, prod(shape), 0), shape), ""))


@lru_cache(maxsize=4096)
def _tensor_length(dtype: DType, shape: Shape) -> int:
    return _tensor_zip(dtype, shape).nbytes


def _length(item: Item) -> int:
    return len(item.data) if isinstance(item, ObjectItem) else _tensor_length(item.dtype, item.shape)


def _placed(items: Iterable[Item]) -> Iterator[tuple[Item, int, int]]:
    """Every item, with its offset in the file and its length."""
    offset = 0
    for item in items:
        length = _length(item)
        yield item, offset, length
        offset += length


def records(file: str, items: Iterable[Item]) -> list[Record]:
    """The records of a file to be written: the data of its tensors, without the empty ones.

    Args:
        file: Its path relative to the target's root.
        items: What it will hold.
    """
    return [
        Record(file, item.key, item.dtype, numel, offset + _tensor_zip(item.dtype, item.shape).records[_DATA][0])
        for item, offset, _ in _placed(items)
        if isinstance(item, TensorItem) and item.data is None and (numel := prod(item.shape))
    ]


def dcp_metadata(
    shapes: Mapping[str, Shape], files: Mapping[str, Sequence[Item]], planner_data: Mapping[str, Path_] | None = None
) -> bytes:
    """The content of ``.metadata`` for files that hold these items.

    Args:
        shapes: Whole shape of every tensor, in the order in which they are to be listed.
        files: Items by the file's name, relative to the folder.
        planner_data: Every name's path in the nest of dictionaries; None writes None, as Megatron does.

    Raises:
        ValueError: An item is of a tensor whose shape was not given, or is there twice.
    """
    chunks: dict[str, list[TensorItem]] = {fqn: [] for fqn in shapes}
    places: dict[tuple[str, Shape | None], Place] = {}
    for name, items in files.items():
        for item, offset, length in _placed(items):
            key = (item.fqn, item.offset if isinstance(item, TensorItem) else None)
            if key in places or (isinstance(item, TensorItem) and item.fqn not in chunks):
                raise ValueError(f"{name}: {item_key(*key)} is there twice, or has no shape")
            places[key] = Place(name, offset, length)
            if isinstance(item, TensorItem):
                chunks[item.fqn].append(item)
    tensors = {
        fqn: TensorMeta(held[0].dtype, shapes[fqn], tuple((item.offset, item.shape) for item in held))
        for fqn, held in chunks.items()
        if held
    }
    objects = tuple(fqn for fqn, offset in places if offset is None)
    return pickle_metadata(DcpMetadata(tensors, objects, places, planner_data or {}))


@dataclass(frozen=True, slots=True)
class Distcp(Container):
    """A ``.distcp`` file.

    Args:
        items: What it will hold, in this order.
    """

    name: ClassVar[str] = ".distcp"
    items: Sequence[Item]

    def layout(self, file: str) -> Layout:
        """Item after item; objects and the zips' own headers are known, and the data of constants."""
        places = {record.key: (record.byte_offset, record.nbytes) for record in records(file, self.items)}
        return Layout(sum(map(_length, self.items)), places, self._known(), self._ending)

    def _known(self) -> Iterator[Piece]:
        for item, offset, _ in _placed(self.items):
            if isinstance(item, ObjectItem):
                yield Piece(offset, item.data)
                continue
            zipped = _tensor_zip(item.dtype, item.shape)
            yield from _moved(zipped.known, offset)
            if item.data is not None:
                yield Piece(offset + zipped.records[_DATA][0], item.data, item.key)

    def _ending(self, crcs: Mapping[str, int]) -> Iterator[Piece]:
        for item, offset, _ in _placed(self.items):
            if isinstance(item, TensorItem):
                crc = crcs.get(item.key, 0)  # of a tensor without elements nobody has one
                yield from _moved(_tensor_zip(item.dtype, item.shape).ending({_DATA: crc}), offset)


def _moved(pieces: Iterable[Piece], by: int) -> Iterator[Piece]:
    return (Piece(by + offset, data) for offset, data, _ in pieces)
