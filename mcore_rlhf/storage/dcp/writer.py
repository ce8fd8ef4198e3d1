"""Writing a DCP folder: ``.distcp`` files as a stream, and ``.metadata``, which says where in them everything lies.

Items are laid end to end, each a zip as ``torch.save`` makes it, filled in any order. ``.metadata`` follows from the items alone, so
that it is known before a byte of a tensor is.
``.metadata`` is a pickle under torch's class names, put together from opcodes, as those classes are not here; torch's
``FileSystemReader`` and Megatron-core load it as their own. The order of fields is theirs; equal strings and sizes are stored once.
"""

from __future__ import annotations

import pickle as op
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, ClassVar

from mcore_rlhf.core.catalog import DType, Record, Shape, dtype_of

from ..pickling import pickle_tree
from ..pt import stream_layout
from ..record_file import Container, Layout, Piece, bytes_of, in_memory, naturals, text_of
from ..stored import StoredTensor
from . import classes
from .checks import item_key
from .metadata import DcpMetadata, ItemPlace, Path_, TensorMeta

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
        data: A zip of ``torch.save``, as :func:`saved` makes it: never one of a source as it is, which nobody judged.
    """

    fqn: str
    data: bytes


Item = TensorItem | ObjectItem


def saved(tree: Any, fqn: str) -> bytes:
    """What ``torch.save`` writes for an object, tensors in it included.

    Args:
        tree: See :func:`..pickling.pickle_tree`; its tensors are small, or a live trainer's.
        fqn: Its name, for messages.

    Raises:
        Untrusted: It holds something of a checkpoint that is not on the closed list of what is written.
        Unsupported: It holds something that cannot be saved.
    """
    return in_memory(stream_layout(pickle_tree(tree, fqn)))


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
    shapes: Mapping[str, Shape],
    files: Mapping[str, Sequence[Item]],
    planner_data: Mapping[str, Path_] | None = None,
    unflattened: Mapping[str, Shape] | None = None,
) -> bytes:
    """The content of ``.metadata`` for files that hold these items.

    Args:
        shapes: Whole shape of every tensor, in the order in which they are to be listed.
        files: Items by the file's name, relative to the folder.
        planner_data: Every name's path in the nest of dictionaries; None writes None, as Megatron does.
        unflattened: See :class:`.metadata.DcpMetadata`.

    Raises:
        ValueError: An item is of a tensor whose shape was not given, or is there twice.
    """
    chunks: dict[str, list[TensorItem]] = {fqn: [] for fqn in shapes}
    places: dict[tuple[str, Shape | None], ItemPlace] = {}
    for name, items in files.items():
        for item, offset, length in _placed(items):
            key = (item.fqn, item.offset if isinstance(item, TensorItem) else None)
            if key in places or (isinstance(item, TensorItem) and item.fqn not in chunks):
                raise ValueError(f"{name}: {item_key(*key)} is there twice, or has no shape")
            places[key] = ItemPlace(name, offset, length)
            if isinstance(item, TensorItem):
                chunks[item.fqn].append(item)
    tensors = {
        fqn: TensorMeta(held[0].dtype, shapes[fqn], tuple((item.offset, item.shape) for item in held))
        for fqn, held in chunks.items()
        if held
    }
    objects = tuple(fqn for fqn, offset in places if offset is None)
    return pickle_metadata(DcpMetadata(tensors, objects, places, planner_data or {}, unflattened or {}))


@dataclass(frozen=True, slots=True)
class Distcp(Container):
    """A ``.distcp`` file.

    Args:
        items: What it will hold, in this order.
    """

    name: ClassVar[str] = ".distcp"
    items: Sequence[Item]

    def told(self, file: str, numbers: Mapping[str, int]) -> list[Any]:
        """See :meth:`..record_file.Container.told`."""
        return [
            [item.fqn, text_of(item.data)]
            if isinstance(item, ObjectItem)
            else [item.fqn, item.dtype.name, item.offset, item.shape, None if item.data is None else text_of(item.data)]
            for item in self.items
        ]

    @classmethod
    def of_told(cls, told: Sequence[Any], records: Sequence[Record]) -> Distcp:
        """See :meth:`..record_file.Container.of_told`."""
        return cls([_item(*one) for one in told])

    def layout(self, file: str) -> Layout:
        """Item after item; objects and the zips' own headers are known, and the data of constants."""
        found = records(file, self.items)
        places = {record.key: (record.byte_offset, record.nbytes) for record in found}
        if len(places) < len(found):
            raise ValueError(f"{file}: holds a tensor's chunk twice")
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


def _item(fqn: str, first: str, *rest: Any) -> Item:
    if not rest:
        return ObjectItem(str(fqn), bytes_of(first))
    offset, shape, text = rest
    data = None if text is None else bytes_of(text)
    item = TensorItem(str(fqn), dtype_of(first), naturals(offset), naturals(shape), data)
    if data is not None and len(data) != prod(item.shape) * item.dtype.itemsize:
        raise ValueError(f"{item.key} has not its length")
    return item


def _moved(pieces: Iterable[Piece], by: int) -> Iterator[Piece]:
    return (Piece(by + offset, data) for offset, data, _ in pieces)


def pickle_metadata(metadata: DcpMetadata) -> bytes:
    """The bytes of ``.metadata``.

    An empty ``planner_data`` is written as None, which is Megatron's variant. No path of a machine is stored.

    Args:
        metadata: What to write.
    """
    out = _Opcodes(bytearray(op.PROTO + b"\4"))
    out.new(classes.METADATA)
    out.text("state_dict_metadata")
    out.open_dict()
    for fqn, tensor in metadata.tensors.items():
        out.text(fqn)
        _tensor(out, tensor)
    for fqn in metadata.objects:
        out.text(fqn)
        out.new(classes.BYTES)
        out.built()
    out.close_dict()
    out.text("planner_data")
    _planner_data(out, metadata.planner_data)
    out.text("storage_data")
    out.open_dict()
    for (fqn, offset), place in metadata.places.items():
        _place(out, fqn, offset, place)
    out.close_dict()
    out.text("storage_meta")
    _storage_meta(out)
    out.text("version")
    out.text(classes.VERSION)
    if metadata.unflattened:
        _unflattened(out, metadata.unflattened)
    out.built()
    out.data += op.STOP
    return bytes(out.data)


@dataclass(slots=True)
class _Opcodes:
    """A pickle in the making: what was emitted, and what can be referred to again."""

    data: bytearray
    memo: dict[tuple[str, object], int] = field(default_factory=dict)

    def known(self, kind: str, value: object) -> bool:
        """Refer to a value that is there already."""
        number = self.memo.get((kind, value))
        if number is None:
            return False
        self.data += op.BINGET + bytes((number,)) if number < 256 else op.LONG_BINGET + struct.pack("<I", number)
        return True

    def remember(self, kind: str, value: object) -> None:
        """Number the value that was emitted last."""
        self.memo[kind, value] = len(self.memo)
        self.data += op.MEMOIZE

    def text(self, value: str) -> None:
        if not self.known("text", value):
            data = value.encode("utf-8", "surrogatepass")
            self.data += op.BINUNICODE + struct.pack("<I", len(data)) + data
            self.remember("text", value)

    def name(self, full: str) -> None:
        """A global: class or function."""
        if not self.known("name", full):
            module, _, name = full.rpartition(".")
            self.text(module)
            self.text(name)
            self.data += op.STACK_GLOBAL
            self.remember("name", full)

    def number(self, value: int) -> None:
        if 0 <= value < 256:
            self.data += op.BININT1 + bytes((value,))
        elif value < 1 << 31:
            self.data += op.BININT + struct.pack("<i", value)
        else:
            data = op.encode_long(value)
            self.data += op.LONG1 + bytes((len(data),)) + data

    def tuple_of(self, values: Iterable[object]) -> None:
        self.data += op.MARK
        for value in values:
            self.text(value) if isinstance(value, str) else self.number(int(value))  # type: ignore[call-overload]
        self.data += op.TUPLE

    def size(self, shape: Shape) -> None:
        """A ``torch.Size``."""
        if not self.known("size", shape):
            self.name(classes.SIZE)
            self.tuple_of(shape)
            self.data += op.TUPLE1 + op.REDUCE
            self.remember("size", shape)

    def new(self, full: str) -> None:
        """Begin an object: its class, and a dictionary for its state, which :meth:`built` ends."""
        self.name(full)
        self.data += op.EMPTY_TUPLE + op.NEWOBJ
        self.open_dict()

    def built(self) -> None:
        self.close_dict()
        self.data += op.BUILD

    def open_dict(self) -> None:
        self.data += op.EMPTY_DICT + op.MARK

    def close_dict(self) -> None:
        self.data += op.SETITEMS

    def called(self, full: str, argument: str | int) -> None:
        """A call of a global with one argument."""
        if not self.known("call", (full, argument)):
            self.name(full)
            self.text(argument) if isinstance(argument, str) else self.number(argument)
            self.data += op.TUPLE1 + op.REDUCE
            self.remember("call", (full, argument))


def _tensor(out: _Opcodes, tensor: TensorMeta) -> None:
    out.new(classes.TENSOR)
    out.text("properties")
    out.name(classes.PROPERTIES)
    out.data += op.EMPTY_TUPLE + op.NEWOBJ + op.MARK
    out.name(f"torch.{tensor.dtype}")
    out.called(classes.LAYOUT, classes.STRIDED)
    out.data += op.NEWFALSE  # requires_grad
    out.called(classes.MEMORY_FORMAT, classes.CONTIGUOUS)
    out.data += op.NEWFALSE + op.TUPLE + op.BUILD  # pin_memory
    out.text("size")
    out.size(tensor.global_shape)
    out.text("chunks")
    out.data += op.EMPTY_LIST + op.MARK
    for offsets, sizes in tensor.chunks:
        out.new(classes.CHUNK)
        out.text("offsets")
        out.size(offsets)
        out.text("sizes")
        out.size(sizes)
        out.built()
    out.data += op.APPENDS
    out.built()


def _planner_data(out: _Opcodes, paths: Mapping[str, Path_]) -> None:
    if not paths:
        out.data += op.NONE
        return
    out.open_dict()
    for fqn, path in paths.items():
        out.text(fqn)
        out.tuple_of(path)
    out.close_dict()


def _unflattened(out: _Opcodes, shapes: Mapping[str, Shape]) -> None:
    """Source: megatron-core 0.13.1, ``dist_checkpointing/strategies/torch.py`` (``get_reformulation_metadata``)."""
    out.text("mcore_data")
    out.open_dict()
    for fqn, shape in shapes.items():
        out.text(fqn)
        out.open_dict()
        out.text("nd_reformulated_orig_global_shape")
        out.tuple_of(shape)
        out.close_dict()
    out.close_dict()


def _place(out: _Opcodes, fqn: str, offset: Shape | None, place: ItemPlace) -> None:
    out.new(classes.INDEX)
    out.text("fqn")
    out.text(fqn)
    if offset is not None:  # else the class's own default holds
        out.text("offset")
        out.size(offset)
    out.text("index")
    out.data += op.NONE
    out.built()
    out.new(classes.STORAGE_INFO)
    out.text("relative_path")
    out.text(place.file)
    out.text("offset")
    out.number(place.offset)
    out.text("length")
    out.number(place.length)
    out.built()


def _storage_meta(out: _Opcodes) -> None:
    """Empty but for its fields: torch stores the folder's path and the save's id there."""
    out.new(classes.STORAGE_META)
    for name in ("checkpoint_id", "save_id", "load_id"):
        out.text(name)
        out.data += op.NONE
    out.text("modules")
    out.data += op.EMPTY_LIST
    out.built()
