"""Writing ``.metadata``: a pickle under torch's class names, put together from opcodes, as those classes are not here.

torch's ``FileSystemReader`` and Megatron-core load it as their own. The order of fields is theirs; equal strings and sizes
are stored once.
"""

from __future__ import annotations

import pickle as op
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from . import classes
from .metadata import DcpMetadata, Path_, Place, Shape, TensorMeta


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


def _place(out: _Opcodes, fqn: str, offset: Shape | None, place: Place) -> None:
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
