"""Reading small parts of a logical tensor into memory, wherever their elements lie: the executor with memory for a target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .box import Box, row_major
from .cast import Words
from .catalog import Chunk, FixedCatalog, Record, TensorEntry
from .dtype import DType
from .execute import WORDS, FileRun, SourceBytes
from .plan import plan_file

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
    plan = plan_file(_FILE, [wanted], FixedCatalog({entry.name: entry}))
    plan.problems.raise_if_any()
    memory = _Memory(bytearray(record.nbytes))
    FileRun(plan, [record], source, memory, memory).run()
    return memory.data


def words_of(entry: TensorEntry, box: Box, dtype: DType, source: SourceBytes) -> Words:
    """One box of a tensor as an array of words, in its own shape; see :func:`gather`."""
    data = gather(entry, [box], dtype, source)
    return np.frombuffer(data, WORDS[dtype.itemsize]).reshape(box.shape)


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
