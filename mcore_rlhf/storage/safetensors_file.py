"""Writing a safetensors file as a stream: its header first, its tensors in any order.

:mod:`.safetensors_reader` reads one.

Layout: the length of the header in 8 bytes, the header as JSON, then the tensors without gaps, in the header's order.
Source: safetensors 0.4, ``README.md`` ("Format"), ``safetensors/src/tensor.rs``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..core.catalog import Record
from ..errors import Unsupported
from .checksum import combine, crc32
from .reserved_file import ReservedFile, WrittenFile

_ALIGNMENT = 8
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip
"""torch's names of element types, and safetensors'."""


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """A tensor to be written, contiguous.

    Args:
        record: Its elements; the key is its name.
        shape: Its shape.
    """

    record: Record
    shape: tuple[int, ...]


@dataclass(slots=True)
class SafetensorsWriter(ReservedFile):
    """A safetensors file being written."""

    _header: bytes
    _offsets: dict[str, tuple[int, int]]

    @classmethod
    def create(cls, path: Path, tensors: list[SafeTensor], metadata: Mapping[str, str]) -> SafetensorsWriter:
        """Lay the file out and reserve it.

        Args:
            path: Where to write; must not exist.
            tensors: In the order in which they will lie.
            metadata: Goes into the header.

        Raises:
            StorageError: The file cannot be created.
            Unsupported: A tensor has a type that safetensors does not have.
        """
        entries: dict[str, object] = {"__metadata__": dict(metadata)}
        offsets: dict[str, tuple[int, int]] = {}
        at = 0
        for tensor in tensors:
            record = tensor.record
            if record.dtype.name not in DTYPES:
                raise Unsupported(f"{path}: {record.key}: safetensors has no {record.dtype}")
            stop = at + record.nbytes
            dtype = DTYPES[record.dtype.name]
            entries[record.key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, stop]}
            offsets[record.key] = (at, record.nbytes)
            at = stop
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % _ALIGNMENT)
        start = 8 + len(header)
        placed = {key: (start + offset, nbytes) for key, (offset, nbytes) in offsets.items()}
        writer = cls(path, start + at, len(header).to_bytes(8, "little") + header, placed)
        writer.reserve()
        writer.pwrite(writer._header, 0)
        return writer

    @property
    def open_records(self) -> list[str]:
        """Names of the tensors, whose checksums :meth:`finish` wants."""
        return list(self._offsets)

    def offset(self, key: str) -> int:
        """Where a tensor starts in the file, in bytes."""
        return self._offsets[key][0]

    def record_nbytes(self, key: str) -> int:
        """Length of a tensor, in bytes."""
        return self._offsets[key][1]

    def write(self, key: str, byte_offset: int, data: memoryview) -> None:
        """Put bytes into a tensor. What is never written reads as zeros.

        Raises:
            StorageError: They cannot be written.
            ValueError: They would lie outside the tensor.
        """
        start, nbytes = self._offsets[key]
        if byte_offset < 0 or byte_offset + len(data) > nbytes:
            raise ValueError(f"{self.path}: {len(data)} bytes at {byte_offset} do not fit into {key} of {nbytes} bytes")
        self.pwrite(data, start + byte_offset)

    def finish(self, crcs: Mapping[str, int], *, fsync: bool = False) -> WrittenFile:
        """Close the file.

        Args:
            crcs: CRC-32 of every tensor, by name; safetensors stores none, the whole file's is made of them.
            fsync: Whether to wait until the file is on the disk.

        Raises:
            StorageError: The file cannot be completed.
        """
        total = crc32(self._header)
        for key, (_, nbytes) in self._offsets.items():
            total = combine(total, crcs[key], nbytes)
        return self.complete(total, fsync=fsync)
