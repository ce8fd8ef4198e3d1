"""The third arithmetic that there is: elements of few bits, each times the scale of its block, which is how weights are quantized.

The product is a record that is stored nowhere (see :mod:`.computed`): computed in fp32, which holds it exactly for an fp8 element
and a scale of up to 20 bits, and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .box import Box
from .cast import Words, convert
from .catalog import Record, TensorEntry
from .computed import COMPUTED
from .dtype import FLOAT32, DType
from .execute import WINDOW_BYTES, WORDS, SourceBytes
from .lowrank import floats


@dataclass(frozen=True, slots=True)
class Scaled:
    """A weight times its scales.

    Args:
        weight: ``(rows, columns)``, of a type that converts to fp32 exactly.
        scale: ``(⌈rows / block rows⌉, ⌈columns / block columns⌉)`` scales in row-major order, in whatever shape they are stored.
        block: Rows and columns that share a scale.
        dtype: What the product is rounded to.
    """

    weight: TensorEntry
    scale: TensorEntry
    block_shape: tuple[int, int]
    dtype: DType

    @property
    def record(self) -> Record:
        """The record that holds the product."""
        rows, columns = self.weight.global_shape
        return Record(COMPUTED + self.weight.name.param, str(self), self.dtype, rows * columns, 0, computed=True)

    @property
    def block_nbytes(self) -> int:
        """Bytes of a whole block of rows."""
        return self._rows_at_once * self.weight.global_shape[1] * self.dtype.itemsize

    @property
    def _rows_at_once(self) -> int:
        return max(1, WINDOW_BYTES // (FLOAT32.itemsize * max(1, self.weight.global_shape[1])))

    def block(self, number: int, source: SourceBytes) -> Words:
        """One block of rows, as words of its type."""
        rows, columns = self.weight.global_shape
        first = number * self._rows_at_once
        count = min(self._rows_at_once, rows - first)
        values = floats(self.weight, Box((first, 0), (count, columns)), source)
        values *= self._scales(first, count, source)
        words = values.view(WORDS[FLOAT32.itemsize])
        return words if self.dtype == FLOAT32 else convert(words, FLOAT32, self.dtype)

    def _scales(self, first: int, count: int, source: SourceBytes) -> Words:
        """The scale of every element of some rows."""
        (high, wide), columns = self.block_shape, self.weight.global_shape[1]
        whole = floats(self.scale, Box.whole(self.scale.global_shape), source).reshape(-1, -(-columns // wide))
        found: Words = whole[np.arange(first, first + count) // high][:, np.arange(columns) // wide]
        return found

    def __str__(self) -> str:
        return f"{self.weight.name.param} · {self.scale.name.param}"
