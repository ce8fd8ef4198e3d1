"""What every file has in common that is laid out first and filled in any order: a ``.pt``, a ``.distcp``."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Protocol

from .reserved_file import WrittenFile


class RecordWriter(Protocol):
    """A file being written. Use it in a ``with`` block: left without :meth:`finish`, the file is removed."""

    @property
    def open_records(self) -> list[str]:
        """Keys of the records that have yet to be written, and whose checksums :meth:`finish` wants."""
        ...

    def offset(self, key: str) -> int:
        """Where a record starts in the file, in bytes."""
        ...

    def record_nbytes(self, key: str) -> int:
        """Length of a record, in bytes."""
        ...

    def write(self, key: str, byte_offset: int, data: memoryview) -> None:
        """Put bytes into a record, at an offset from the record's own start."""
        ...

    def finish(self, crcs: Mapping[str, int], *, fsync: bool = False) -> WrittenFile:
        """Complete the file, with the CRC-32 of every record."""
        ...

    def __enter__(self) -> RecordWriter: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
