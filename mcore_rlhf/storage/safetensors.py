"""The container safetensors: a header of JSON, then tensors without gaps.

Layout: the length of the header in 8 bytes, the header, then the tensors in the header's order. What is read comes from strangers:
everything that the header says is held against the file before anything points into it. A file must be as the format's own parser
wants it: no gap, no overlap, no byte left over.
Source: safetensors 0.8.0, ``README.md`` ("Format"), ``safetensors/src/tensor.rs`` (``SafeTensors::read_metadata``,
``Metadata::validate``).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

from ..core.catalog import DType, Record, Shape, dtype_of
from ..errors import Corrupt, Incomplete, Problems, Unsupported
from .paths import ReadablePath, beneath, human
from .reading import opened, parse_json
from .record_file import Container, Layout, OpenedFile, Piece, end_to_end, naturals
from .stored import StoredTensor

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
"""torch's names of element types, and safetensors'."""

MAX_HEADER = 100_000_000
"""Source: safetensors 0.8.0, ``safetensors/src/tensor.rs`` (``MAX_HEADER_SIZE``)."""

_LENGTH = 8
_METADATA, _FRAMEWORK = "__metadata__", "format"
_AGAIN = "Copy the file again from where it came from, and compare its checksum with the one that is published there."
_TORCH_NAMES = {theirs: ours for ours, theirs in DTYPES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Safetensors(Container):
    """A safetensors file.

    Args:
        tensors: In the order in which they will lie; each is the whole of its record, whose key is its name.
        metadata: The header's own texts.
    """

    name: ClassVar[str] = "safetensors"
    suffixes: ClassVar[tuple[str, ...]] = (".safetensors",)
    tensors: Sequence[StoredTensor]
    metadata: Mapping[str, str]

    def told(self, file: str, numbers: Mapping[str, int]) -> list[Any]:
        """See :meth:`.record_file.Container.told`."""
        return [[[numbers[tensor.record.key], tensor.shape] for tensor in self.tensors], [*self.metadata.items()]]

    @classmethod
    def of_told(cls, told: Sequence[Any], records: Sequence[Record]) -> Safetensors:
        """See :meth:`.record_file.Container.of_told`."""
        inside, metadata = told
        tensors = [StoredTensor.whole(records[naturals([at])[0]], naturals(shape)) for at, shape in inside]
        return cls(tensors, {str(key): str(text) for key, text in metadata})

    @classmethod
    def open(cls, root: ReadablePath, file: str, stubs: Collection[str] = ()) -> OpenedFile:
        """See :meth:`.record_file.Container.open` and :func:`read_safetensors`."""
        opened = read_safetensors(root, file)
        texts = {key: text for key, text in opened.metadata.items() if key != _FRAMEWORK and text not in opened.tensors}
        return replace(opened, metadata=texts)

    def layout(self, file: str) -> Layout:
        """The header, and the tensors behind it.

        Raises:
            Unsupported: A tensor has a type that safetensors does not have.
        """
        entries: dict[str, object] = {_METADATA: dict(self.metadata)}
        at = 0
        for tensor in self.tensors:
            record = tensor.record
            if record.dtype.name not in DTYPES:
                raise Unsupported(f"{file}: {record.key}: safetensors has no {record.dtype}")
            span = [at, at + record.nbytes]
            dtype = DTYPES[record.dtype.name]
            entries[record.key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": span}
            at += record.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        header = len(text).to_bytes(_LENGTH, "little") + text
        return Layout(*end_to_end((tensor.record for tensor in self.tensors), len(header)), [Piece(0, header)])


def read_safetensors(root: ReadablePath, file: str) -> OpenedFile:
    """Open a safetensors file, with all texts of its header. No byte of a tensor is read.

    Args:
        root: The checkpoint's folder.
        file: Path relative to it, with ``/``.

    Raises:
        NotACheckpoint: There is no such file.
        Untrusted: ``file`` leads out of ``root``.
        Incomplete: It is cut off.
        Corrupt: Its header is none, or contradicts the file; everything that is wrong is named.
        Unsupported: It holds elements of a type that is not known.
        StorageError: It cannot be read.
    """
    path = beneath(root, file)
    header, nbytes = _header(path)
    entries = _parsed(header, path)
    metadata = entries.pop(_METADATA, {})
    return _Reading(path, file, _LENGTH + len(header), nbytes, Problems()).opened(entries, metadata)


def _header(path: ReadablePath) -> tuple[bytes, int]:
    """The header's bytes, and the length of the file."""
    with opened(path) as file:
        length = int.from_bytes(file.pread(_LENGTH, 0), "little")
        _check_length(path, length, file.nbytes)
        return file.read(_LENGTH, length), file.nbytes


def _check_length(path: ReadablePath, length: int, nbytes: int) -> None:
    if nbytes < _LENGTH:
        raise Incomplete(
            f"{path}: has {nbytes} bytes; a safetensors file begins with {_LENGTH} that say how long its header is\n{_AGAIN}"
        )
    if length > MAX_HEADER:
        raise Corrupt(
            f"{path}: says that its header has {length} bytes, and no safetensors header is longer than {human(MAX_HEADER)}: "
            f"it is no safetensors file, or damaged\n{_AGAIN}"
        )
    if _LENGTH + length > nbytes:
        raise Incomplete(
            f"{path}: says that its header has {length} bytes, but the file has {nbytes}: it is cut off\n{_AGAIN}"
        )


def _parsed(header: bytes, path: ReadablePath) -> dict[str, object]:
    try:
        entries = parse_json(header, object_pairs_hook=_unique)
    except ValueError as error:
        raise Corrupt(f"{path}: the header is not the JSON that it should be: {error}\n{_AGAIN}") from None
    if not isinstance(entries, dict):
        raise Corrupt(f"{path}: the header should be an object of tensors, found {type(entries).__name__}\n{_AGAIN}")
    return entries


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} stands in it twice")
        found[name] = value
    return found


@dataclass
class _Reading:
    """A header on its way into tensors.

    Args:
        path: The file.
        file: Its path relative to the checkpoint's root.
        start: Where its tensors begin, in bytes.
        nbytes: Its length.
        problems: Told of everything that is wrong.
    """

    path: ReadablePath
    file: str
    start: int
    nbytes: int
    problems: Problems

    def opened(self, entries: Mapping[str, object], metadata: object) -> OpenedFile:
        spans = [span for name, entry in entries.items() if (span := self._span(name, entry)) is not None]
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            self._wrong(f"{_METADATA} should hold texts")
        if not self.problems:
            self._check_order(spans)
        self.problems.raise_if_any()
        tensors = {name: self._stored(name, dtype, shape, begin) for name, dtype, shape, begin, _ in spans}
        return OpenedFile(self.file, self.nbytes, tensors, metadata=metadata if isinstance(metadata, dict) else {})

    def _stored(self, name: str, dtype: DType, shape: Shape, begin: int) -> StoredTensor:
        record = Record(self.file, name, dtype, prod(shape), self.start + begin)
        return StoredTensor.whole(record, shape)

    def _span(self, name: str, entry: object) -> tuple[str, DType, Shape, int, int] | None:
        """One tensor of the header: name, type, shape, first byte and end."""
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            self._wrong(f"{name}: expected dtype, shape and data_offsets, found {entry!r:.80}")
            return None
        kind = _TORCH_NAMES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        shape, offsets = _naturals(entry["shape"]), _naturals(entry["data_offsets"])
        if kind is None:
            text = f"{name}: elements of type {entry['dtype']!r}; known are {', '.join(_TORCH_NAMES)}"
            self._wrong(text, Unsupported)
        elif shape is None or offsets is None or len(offsets) != 2:
            found = f"{entry['shape']!r:.60} or data_offsets {entry['data_offsets']!r:.60}"
            self._wrong(f"{name}: shape {found} are no sizes")
        else:
            return self._sized(name, dtype_of(kind), shape, offsets[0], offsets[1])
        return None

    def _sized(
        self, name: str, dtype: DType, shape: Shape, begin: int, end: int
    ) -> tuple[str, DType, Shape, int, int] | None:
        needs = prod(shape) * dtype.itemsize
        if end - begin == needs:
            return name, dtype, shape, begin, end
        self._wrong(f"{name}: {list(shape)} of {dtype} need {needs} bytes, but its offsets are {begin}:{end}")
        return None

    def _check_order(self, spans: list[tuple[str, DType, Shape, int, int]]) -> None:
        """Tensors lie one after the other, from the header to the end of the file."""
        at, room = 0, self.nbytes - self.start
        for name, _, _, begin, end in sorted(spans, key=lambda span: span[3:]):
            if begin != at:
                what = "overlaps the tensor before it" if begin < at else "leaves a gap before it"
                self._wrong(f"{name}: begins at byte {begin} of the data, and {what}, which ends at {at}")
            at = max(at, end)
        if at > room:
            text = f"{self.path}: its tensors need {at} bytes after the header, and {room} are there: it is cut off"
            self.problems.add(Incomplete, text, _AGAIN)
        elif at < room:
            self._wrong(f"{room - at} bytes after the last tensor belong to nothing")

    def _wrong(self, text: str, kind: type[Corrupt] | type[Unsupported] = Corrupt) -> None:
        self.problems.add(kind, f"{self.path}: {text}", _AGAIN if kind is Corrupt else "")


def _naturals(value: object) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return None
