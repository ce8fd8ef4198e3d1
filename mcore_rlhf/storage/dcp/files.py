"""The files of a DCP folder, with checksums that are read when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

StoredRecord = tuple[str, int, int, int]
"""``(key, byte offset, bytes, crc32)``"""


class FileRecords(Sequence[StoredRecord]):
    """The parts of a file that have a checksum; whoever wants but the file's path and length pays nothing for them.

    Args:
        find: Reads them; called once, at first use. What it raises, every use raises.
    """

    __slots__ = ("_find", "_found")

    def __init__(self, find: Callable[[], tuple[StoredRecord, ...]]) -> None:
        self._find = find
        self._found: tuple[StoredRecord, ...] | None = None

    def _all(self) -> tuple[StoredRecord, ...]:
        if self._found is None:
            self._found = self._find()
        return self._found

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[StoredRecord]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> StoredRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[StoredRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> StoredRecord | tuple[StoredRecord, ...]:
        return self._all()[index]


@dataclass(frozen=True, slots=True)
class DcpFile:
    """A file of the folder, with the checksums that it carries: those of the zips in it.

    Args:
        path: Relative to the checkpoint's root.
        nbytes: Its length.
        records: ``(key, byte offset, bytes, crc32)`` of every tensor's data, and of every object's pickle.
    """

    path: str
    nbytes: int
    records: Sequence[StoredRecord] = ()
