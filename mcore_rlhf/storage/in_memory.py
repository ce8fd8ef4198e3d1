"""Files that are written into memory instead of a disk, and handed over as each of them is complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .destination import Destination
from .manifest import FileEntry
from .record_file import Layout, RecordFile

Bytes: TypeAlias = NDArray[np.uint8]


class _MemoryFile(RecordFile):
    """Bytes that are filled as if they were a file."""

    def __init__(self, file: str, layout: Layout, complete: Callable[[str, Bytes], None]) -> None:
        self.data, self._name, self._complete = np.zeros(layout.nbytes, np.uint8), file, complete
        super().__init__(Path(file), layout)

    def _create(self) -> None:
        """Nothing on a disk."""

    def _reserve(self) -> None:
        """It is there."""

    def _pwrite(self, data: memoryview, offset: int) -> None:
        self.data[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    def _close(self, fsync: bool) -> None:
        """Nothing more to do."""

    def finish(self, crcs: Mapping[str, int], *, fsync: bool = False) -> FileEntry:
        """See :meth:`RecordFile.finish`."""
        entry = super().finish(crcs, fsync=fsync)
        self._complete(self._name, self.data)
        return entry


@dataclass(slots=True)
class MemoryFiles(Destination):
    """Files in memory.

    Args:
        files: The bytes of those that are complete, by path.
        complete: What is done with one that is; it is kept in :attr:`files` by default.
    """

    files: dict[str, Bytes] = field(default_factory=dict)
    complete: Callable[[str, Bytes], None] | None = None

    def _writer(self, file: str, layout: Layout) -> RecordFile:
        return _MemoryFile(file, layout, self.complete or self.files.__setitem__)
