"""The second arithmetic that there is, after casts: ``base + scale · left @ right``, which is how a LoRA changes a weight.

The sum is a record that is stored nowhere: a plan copies from it like from any other, and :class:`ComputedBytes` computes what the
executor looks at, a few rows at a time, in fp32, and rounds once.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .box import Box, Shape
from .cast import Words, convert
from .catalog import Record, TensorEntry
from .dtype import FLOAT32, DType
from .execute import WINDOW_BYTES, WORDS, SourceBytes
from .gathering import words_of

COMPUTED = "computed/"
"""What the names of files that are stored nowhere begin with."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """A product of two thin matrices.

    Args:
        left: ``(rows, rank)``.
        right: ``(rank, columns)``.
        scale: What the product is multiplied by.
        transposed: Whether the entries are those of the transposed product: ``left`` is ``(columns, rank)`` and ``right`` is
            ``(rank, rows)``.
    """

    left: TensorEntry
    right: TensorEntry
    scale: float
    transposed: bool = False

    @property
    def shape(self) -> Shape:
        """``(rows, columns)``."""
        rows, columns = self.left.global_shape[0], self.right.global_shape[1]
        return (columns, rows) if self.transposed else (rows, columns)


@dataclass(frozen=True, slots=True)
class LowRankSum:
    """A weight with an adapter added to it.

    Args:
        base: ``(rows, columns)``, of any type.
        product: What is added; of the same shape.
        dtype: What the sum is rounded to.
    """

    base: TensorEntry
    product: LowRank
    dtype: DType

    def record(self, name: str) -> Record:
        """The record that holds the sum, of that name."""
        rows, columns = self.base.global_shape
        return Record(COMPUTED + name, str(self), self.dtype, rows * columns, 0, computed=True)

    @property
    def block_rows(self) -> int:
        """Rows that are computed together. It depends on the shape alone, so that bits do not depend on who asks for what."""
        return max(1, WINDOW_BYTES // (FLOAT32.itemsize * max(1, self.base.global_shape[1])))

    def block(self, number: int, source: SourceBytes) -> Words:
        """One block of rows, as words of its type."""
        rows, columns = self.base.global_shape
        first = number * self.block_rows
        count = min(self.block_rows, rows - first)
        total = _floats(self.base, Box((first, 0), (count, columns)), source)
        total += self._product(first, count, source) * np.float32(self.product.scale)
        words = total.view(WORDS[FLOAT32.itemsize])
        return words if self.dtype == FLOAT32 else convert(words, FLOAT32, self.dtype)

    def _product(self, first: int, count: int, source: SourceBytes) -> Words:
        left, right = self.product.left, self.product.right
        rank = left.global_shape[1]
        if self.product.transposed:
            rows = _floats(right, Box((0, first), (rank, count)), source).T
            return _product(np.ascontiguousarray(rows), _floats(left, Box.whole(left.global_shape), source).T)
        return _product(
            _floats(left, Box((first, 0), (count, rank)), source), _floats(right, Box.whole(right.global_shape), source)
        )

    def __str__(self) -> str:
        return f"{self.base.name.param} + {self.product.scale:g}·B·A"


def _floats(entry: TensorEntry, box: Box, source: SourceBytes) -> Words:
    return words_of(entry, box, FLOAT32, source).view(np.float32)


def _product(left: Words, right: Words) -> Words:
    """By torch, whose threads the caller limits; numpy's BLAS would start its own."""
    import torch

    result: Words = (torch.from_numpy(left) @ torch.from_numpy(right)).numpy()
    return result


@dataclass(slots=True)
class ComputedBytes:
    """Bytes of files, and of sums that are computed when they are looked at. May be used from several threads.

    Args:
        source: The files.
        sums: What is computed, by the name of its record's file.
    """

    source: SourceBytes
    sums: Mapping[str, LowRankSum]
    _last: threading.local = field(default_factory=threading.local)

    def view(self, file: str, byte_offset: int, nbytes: int) -> memoryview:
        """Bytes of a file, or of a sum."""
        found = self.sums.get(file)
        if found is None:
            return self.source.view(file, byte_offset, nbytes)
        out = bytearray(nbytes)
        at = 0
        while at < nbytes:
            number, inside = divmod(byte_offset + at, self._block_nbytes(found))
            part = self._block(file, found, number)[inside : inside + nbytes - at]
            out[at : at + len(part)] = part
            at += len(part)
        return memoryview(out)

    def release(self, file: str, byte_offset: int, nbytes: int) -> None:
        """Say that these bytes are not needed any more."""
        if file not in self.sums:
            self.source.release(file, byte_offset, nbytes)

    def _block_nbytes(self, found: LowRankSum) -> int:
        return found.block_rows * found.base.global_shape[1] * found.dtype.itemsize

    def _block(self, file: str, found: LowRankSum, number: int) -> memoryview:
        """A block; each thread keeps its last one, since windows of a file seldom end where blocks do."""
        if getattr(self._last, "key", None) != (file, number):
            self._last.data = np.ascontiguousarray(found.block(number, self.source)).reshape(-1).view(np.uint8).data
            self._last.key = (file, number)
        data: memoryview = self._last.data
        return data
