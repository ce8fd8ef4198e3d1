"""Records that are stored nowhere: a plan copies from them like from any other, and their bytes are computed when they are looked at.

Here is what a computation is, how one reads its operands (the executor with memory for a target), and the simplest of them:
:class:`Scaled`, elements of few bits, each times the scale of its block, which is how weights are quantized, and :class:`Shifted`.
:mod:`.lowrank` is the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import numpy as np

from .cast import Words, convert
from .catalog import FLOAT32, Box, Chunk, DType, Record, TensorEntry, TensorName, row_major
from .chunks import Chunks
from .execute import WINDOW_BYTES, WORDS, FileRun, SourceBytes
from .plan import plan_file

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
            self._last.data = np.ascontiguousarray(found.block(number, self)).reshape(-1).view(np.uint8).data
            self._last.key = (file, number)
        data: memoryview = self._last.data
        return data


_FILE = "memory"


def gather(entry: TensorEntry, boxes: Sequence[Box], dtype: DType, source: SourceBytes) -> bytearray:
    """The elements of some boxes of a tensor, one box after the other, each in row-major order.

    Args:
        entry: The tensor.
        boxes: Which parts of it.
        dtype: What its elements are converted to.
        source: Where their bytes are.

    Raises:
        CoverageError: Elements of them are stored nowhere.
    """
    record = Record(_FILE, _FILE, dtype, sum(box.numel for box in boxes), 0)
    wanted = TensorEntry(entry.name, entry.global_shape, dtype, tuple(_placed(boxes, record)))
    plan = plan_file(_FILE, Chunks.of([wanted]), Chunks.of([entry]))
    plan.problems.raise_if_any()
    memory = _Memory(bytearray(record.nbytes))
    FileRun(plan, [record], source, memory, memory).run()
    return memory.data


def words_of(entry: TensorEntry, box: Box, dtype: DType, source: SourceBytes) -> Words:
    """One box of a tensor as an array of words, in its own shape; see :func:`gather`."""
    data = gather(entry, [box], dtype, source)
    return np.frombuffer(data, WORDS[dtype.itemsize]).reshape(box.shape)


def floats(entry: TensorEntry, box: Box, source: SourceBytes) -> Words:
    """One box of a tensor as fp32 values."""
    return words_of(entry, box, FLOAT32, source).view(np.float32)


def _placed(boxes: Sequence[Box], record: Record) -> Iterator[Chunk]:
    at = 0
    for box in boxes:
        yield Chunk(box, record, at, row_major(box.shape))
        at += box.numel


@dataclass(frozen=True, slots=True)
class _Memory:
    """Where the executor writes. Checksums are of no use here: whoever owns the files has them."""

    data: bytearray

    def write(self, key: str, byte_offset: int, data: memoryview) -> None:
        """Put bytes there."""
        del key
        self.data[byte_offset : byte_offset + len(data)] = data

    def crc32(self, data: memoryview) -> int:
        """Nothing."""
        del data
        return 0

    def combine(self, first: int, second: int, second_nbytes: int) -> int:
        """Nothing."""
        del first, second, second_nbytes
        return 0

    def saw(self, record: Record, byte_offset: int, nbytes: int, crc32: int) -> None:
        """Nothing."""


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


@dataclass(frozen=True, slots=True)
class Shifted:
    """A small tensor with a number added to every element, rounded once: a norm that counts from 0 as one that counts from 1.

    Args:
        base: Of a type that converts to fp32 exactly; read whole.
        by: What is added.
        name: Whose tensor it becomes.
        dtype: What the sum is rounded to.
    """

    base: TensorEntry
    by: float
    name: TensorName
    dtype: DType

    @property
    def entry(self) -> TensorEntry:
        """The sum as a tensor."""
        shape = self.base.global_shape
        file = f"{COMPUTED}{self.name}, {self.by:+g} in {self.base.chunks[0].record.file}"  # another one where that is such a sum itself
        record = Record(file, str(self), self.dtype, prod(shape), 0, computed=True)
        return TensorEntry(self.name, shape, self.dtype, (Chunk(Box.whole(shape), record, 0, row_major(shape)),))

    @property
    def block_nbytes(self) -> int:
        """Bytes of all of it."""
        return prod(self.base.global_shape) * self.dtype.itemsize

    def block(self, number: int, source: SourceBytes) -> Words:
        """All of it, as words of its type."""
        del number
        values = floats(self.base, Box.whole(self.base.global_shape), source) + np.float32(self.by)
        words = values.view(WORDS[FLOAT32.itemsize])
        return words if self.dtype == FLOAT32 else convert(words, FLOAT32, self.dtype)

    def __str__(self) -> str:
        return f"{self.base.name} {self.by:+g}"
