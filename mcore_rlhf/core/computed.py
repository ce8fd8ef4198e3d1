"""Records that are stored nowhere: a plan copies from them like from any other, and their bytes are computed when they are looked at."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .cast import Words
from .execute import SourceBytes

COMPUTED = "computed/"
"""What the names of files that are stored nowhere begin with."""


class Computation(Protocol):
    """A matrix that is computed a block of rows at a time; its bits depend on nobody's windows."""

    @property
    def block_nbytes(self) -> int:
        """Bytes of a whole block; the last one may be shorter."""
        ...

    def block(self, number: int, source: SourceBytes) -> Words:
        """One block of rows, as words of its type."""
        ...


@dataclass(slots=True)
class ComputedBytes:
    """Bytes of files, and of what is computed of them when it is looked at. May be used from several threads.

    Args:
        source: The files.
        computations: What is computed, by the name of its record's file.
    """

    source: SourceBytes
    computations: Mapping[str, Computation]
    _last: threading.local = field(default_factory=threading.local)

    def view(self, file: str, byte_offset: int, nbytes: int) -> memoryview:
        """Bytes of a file, or of what is computed."""
        found = self.computations.get(file)
        if found is None:
            return self.source.view(file, byte_offset, nbytes)
        out = bytearray(nbytes)
        at = 0
        while at < nbytes:
            number, inside = divmod(byte_offset + at, found.block_nbytes)
            part = self._block(file, found, number)[inside : inside + nbytes - at]
            out[at : at + len(part)] = part
            at += len(part)
        return memoryview(out)

    def release(self, file: str, byte_offset: int, nbytes: int) -> None:
        """Say that these bytes are not needed any more."""
        if file not in self.computations:
            self.source.release(file, byte_offset, nbytes)

    def _block(self, file: str, found: Computation, number: int) -> memoryview:
        """A block; each thread keeps its last one, since windows of a file seldom end where blocks do."""
        if getattr(self._last, "key", None) != (file, number):
            self._last.data = np.ascontiguousarray(found.block(number, self.source)).reshape(-1).view(np.uint8).data
            self._last.key = (file, number)
        data: memoryview = self._last.data
        return data
