"""Writing ``.distcp`` files as a stream: items laid end to end, each a zip as ``torch.save`` makes it, filled in any order.

``.metadata`` follows from the items alone, so that it is known before a byte of a tensor is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from mcore_rlhf.core.box import Shape, row_major
from mcore_rlhf.core.catalog import Record
from mcore_rlhf.core.dtype import DType

from ..checksum import combine, crc32
from ..pickling import pickle_tree
from ..reserved_file import ReservedFile, WrittenFile
from ..stored import StoredTensor
from .checks import item_key
from .metadata import DcpMetadata, Path_, Place, TensorMeta
from .pickled import pickle_metadata
from .zipitem import ZipItem, zip_item

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
        tree: See :func:`..pickling.pickle_tree`; its tensors are real ones.

    Raises:
        Unsupported: It holds something that cannot be saved.
    """
    pickled = pickle_tree(tree, "")
    contents = {key: tensor.numpy().tobytes() for key, tensor in pickled.contents.items()}
    return zip_item(pickled).whole(contents)


@lru_cache(maxsize=4096)
def _tensor_zip(dtype: DType, shape: Shape) -> ZipItem:
    """The zip of a contiguous tensor; chunks of one shape share it."""
    numel = 1
    for count in shape:
        numel *= count
    stored = StoredTensor(Record("", _DATA, dtype, numel, 0), 0, shape, row_major(shape))
    return zip_item(pickle_tree(stored, ""))


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
        Record(file, item.key, item.dtype, _numel(item), offset + _tensor_zip(item.dtype, item.shape).offset(_DATA))
        for item, offset, _ in _placed(items)
        if isinstance(item, TensorItem) and item.data is None and _numel(item)
    ]


def _numel(item: TensorItem) -> int:
    numel = 1
    for count in item.shape:
        numel *= count
    return numel


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


@dataclass(slots=True)
class DcpFileWriter(ReservedFile):
    """A ``.distcp`` being written; ``write`` may be called from several threads."""

    _items: Sequence[Item]
    _data: dict[str, tuple[int, int]]

    @classmethod
    def create(cls, path: Path, items: Sequence[Item]) -> DcpFileWriter:
        """Lay the file out and reserve it; objects and the zips' own headers are written at once.

        Args:
            path: Where to write; must not exist.
            items: What it will hold, in this order.

        Raises:
            StorageError: The file cannot be created.
        """
        data = {record.key: (record.byte_offset, record.nbytes) for record in records(path.name, items)}
        writer = cls(path, sum(map(_length, items)), items, data)
        writer.reserve()
        for item, offset, _ in _placed(items):
            if isinstance(item, ObjectItem):
                writer.pwrite(item.data, offset)
            else:
                head = _tensor_zip(item.dtype, item.shape).head()
                writer.pwrite(head + (item.data or b""), offset)
        return writer

    @property
    def open_records(self) -> list[str]:
        """Keys of the records that have yet to be written, and whose checksums :meth:`finish` wants."""
        return list(self._data)

    def offset(self, key: str) -> int:
        """Where a record starts in the file, in bytes."""
        return self._data[key][0]

    def record_nbytes(self, key: str) -> int:
        """Length of a record, in bytes."""
        return self._data[key][1]

    def write(self, key: str, byte_offset: int, data: memoryview) -> None:
        """Put bytes into a tensor's data. What is never written reads as zeros.

        Args:
            key: The item's key.
            byte_offset: Where, from the first byte of its data.
            data: The bytes.

        Raises:
            StorageError: They cannot be written.
            ValueError: They would lie outside the tensor.
        """
        start, nbytes = self._data[key]
        if byte_offset < 0 or byte_offset + len(data) > nbytes:
            raise ValueError(f"{self.path}: {len(data)} bytes at {byte_offset} do not fit into {key} of {nbytes} bytes")
        self.pwrite(data, start + byte_offset)

    def finish(self, crcs: Mapping[str, int], *, fsync: bool = False) -> WrittenFile:
        """Put the checksums and the zips' directories in place, and close the file.

        Args:
            crcs: CRC-32 of every record, by key, over all its bytes.
            fsync: Whether to wait until the file is on the disk.

        Raises:
            StorageError: The file cannot be completed.
            ValueError: A CRC is missing.
        """
        missing = sorted(self._data.keys() - crcs.keys())
        if missing:
            raise ValueError(f"{self.path}: no CRC was given for {', '.join(missing)}")
        total = 0
        for item, offset, length in _placed(self._items):
            crc = crc32(item.data) if isinstance(item, ObjectItem) else self._end(item, offset, crcs)
            total = combine(total, crc, length)
        return self.complete(total, fsync=fsync)

    def _end(self, item: TensorItem, offset: int, crcs: Mapping[str, int]) -> int:
        """Write what follows the data of an item; returns the CRC of the whole item."""
        crc = crcs.get(item.key, 0) if item.data is None else crc32(item.data)
        zipped = _tensor_zip(item.dtype, item.shape)
        head, tail = zipped.head(), zipped.tail(crc)
        nbytes = zipped.nbytes - len(head) - len(tail)
        self.pwrite(tail, offset + len(head) + nbytes)
        return crc32(tail, combine(crc32(head), crc, nbytes))
