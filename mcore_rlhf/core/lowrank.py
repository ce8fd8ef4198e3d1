"""The second arithmetic that there is, after casts: ``base + scale · left @ right``, which is how a LoRA changes a weight.

The sum is a record that is stored nowhere (see :mod:`.computed`); it is computed a few rows at a time, in fp32, and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from mcore_rlhf.errors import Unsupported
from mcore_rlhf.installation import to_install

from .cast import Words, convert
from .catalog import FLOAT32, Box, DType, Record, Shape, TensorEntry
from .computed import COMPUTED, floats
from .execute import WINDOW_BYTES, WORDS, SourceBytes


@dataclass(frozen=True, slots=True)
class LowRankSum:
    """A weight with an adapter, the product of two thin matrices, added to it.

    Args:
        base: ``(rows, columns)``, of any type.
        left: ``(rows, rank)``.
        right: ``(rank, columns)``.
        scale: What the product is multiplied by.
        dtype: What the sum is rounded to.
        transposed: Whether what is added is the transposed product: ``left`` is ``(columns, rank)`` and ``right`` is ``(rank, rows)``.
    """

    base: TensorEntry
    left: TensorEntry
    right: TensorEntry
    scale: float
    dtype: DType
    transposed: bool = False

    @property
    def added_shape(self) -> Shape:
        """``(rows, columns)`` of what is added; those of the base, if it belongs to it."""
        rows, columns = self.left.global_shape[0], self.right.global_shape[1]
        return (columns, rows) if self.transposed else (rows, columns)

    def record(self, name: str) -> Record:
        """The record that holds the sum, of that name."""
        rows, columns = self.base.global_shape
        return Record(COMPUTED + name, str(self), self.dtype, rows * columns, 0, computed=True)

    @property
    def block_rows(self) -> int:
        """Rows that are computed together. It depends on the shape alone, so that bits do not depend on who asks for what."""
        return max(1, WINDOW_BYTES // (FLOAT32.itemsize * max(1, self.base.global_shape[1])))

    @property
    def block_nbytes(self) -> int:
        """Bytes of a whole block."""
        return self.block_rows * self.base.global_shape[1] * self.dtype.itemsize

    def block(self, number: int, source: SourceBytes) -> Words:
        """One block of rows, as words of its type."""
        rows, columns = self.base.global_shape
        first = number * self.block_rows
        count = min(self.block_rows, rows - first)
        total = floats(self.base, Box((first, 0), (count, columns)), source)
        total += self._product(first, count, source) * np.float32(self.scale)
        words = total.view(WORDS[FLOAT32.itemsize])
        return words if self.dtype == FLOAT32 else convert(words, FLOAT32, self.dtype)

    def _product(self, first: int, count: int, source: SourceBytes) -> Words:
        left, right = self.left, self.right
        rank = left.global_shape[1]
        if self.transposed:
            rows = floats(right, Box((0, first), (rank, count)), source).T
            return _product(np.ascontiguousarray(rows), floats(left, Box.whole(left.global_shape), source).T)
        return _product(
            floats(left, Box((first, 0), (count, rank)), source), floats(right, Box.whole(right.global_shape), source)
        )

    def __str__(self) -> str:
        return f"{self.base.name.param} + {self.scale:g}·B·A"


@contextmanager
def products_in_one_thread() -> Iterator[None]:
    """Limit torch to one thread: the workers are the threads, and its own would fight with them.

    Raises:
        Unsupported: Torch is not installed.
    """
    torch = _torch()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _torch() -> Any:
    """Multiplies: with the bits of the model that PEFT merges, and without numpy's BLAS, which would start threads of its own."""
    try:
        import torch
    except ImportError as error:
        raise Unsupported(
            "--merge-adapter multiplies matrices with torch, which is not installed here\n"
            f"Install it with: {to_install('torch')}"
        ) from error
    return torch


def _product(left: Words, right: Words) -> Words:
    torch = _torch()
    result: Words = (torch.from_numpy(left) @ torch.from_numpy(right)).numpy()
    return result
