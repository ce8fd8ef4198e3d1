"""Sums that are computed when they are looked at: the same bits, whoever asks for which part of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rlhf.core import lowrank
from mcore_rlhf.core.catalog import (
    BFLOAT16,
    FLOAT32,
    Box,
    Chunk,
    DType,
    Record,
    TensorEntry,
    TensorName,
    dtype_of,
    row_major,
)
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.computed import ComputedBytes, gather
from mcore_rlhf.core.execute import FileRun
from mcore_rlhf.core.lowrank import LowRankSum
from mcore_rlhf.core.plan import plan_file
from mcore_rlhf.errors import CoverageError


@dataclass
class Memory:
    """Tensors as files; every byte is counted."""

    files: Mapping[str, bytes]
    held: int = 0
    most: int = 0

    def view(self, file: str, byte_offset: int, nbytes: int) -> memoryview:
        self.held += nbytes
        self.most = max(self.most, self.held)
        assert byte_offset + nbytes <= len(self.files[file])
        return memoryview(self.files[file])[byte_offset : byte_offset + nbytes]

    def release(self, file: str, byte_offset: int, nbytes: int) -> None:
        self.held -= nbytes


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().data)


def entry(name: str, tensor: torch.Tensor, cut: int | None = None) -> TensorEntry:
    """A tensor stored whole, or in two pieces of its columns."""
    dtype, shape = dtype_of(tensor.dtype), tuple(tensor.shape)
    record = Record(name, name, dtype, tensor.numel(), 0)
    if cut is None:
        chunks = [Chunk(Box.whole(shape), record, 0, row_major(shape))]
    else:
        steps = row_major(shape)
        left, right = Box((0, 0), (shape[0], cut)), Box((0, cut), (shape[0], shape[1] - cut))
        chunks = [Chunk(box, record, box.offset[1], steps) for box in (right, left)]
    return TensorEntry(TensorName("actor", name), shape, dtype, tuple(chunks))


ROWS, COLUMNS, RANK = 37, 12, 3
BASE, LEFT, RIGHT = (
    torch.randn(shape, generator=torch.Generator().manual_seed(n))
    for n, shape in enumerate([(ROWS, COLUMNS), (ROWS, RANK), (RANK, COLUMNS)])
)
SCALE = 0.75


def made(dtype: DType = FLOAT32, base: torch.Tensor = BASE, transposed: bool = False) -> tuple[LowRankSum, Memory]:
    left, right = (RIGHT.T.contiguous(), LEFT.T.contiguous()) if transposed else (LEFT, RIGHT)
    total = LowRankSum(entry("w", base, 5), entry("b", left), entry("a", right), SCALE, dtype, transposed)
    return total, Memory({"w": as_bytes(base), "b": as_bytes(left), "a": as_bytes(right)})


def expected(dtype: torch.dtype, base: torch.Tensor = BASE) -> torch.Tensor:
    exact = base.double() + SCALE * (LEFT.double() @ RIGHT.double())
    return exact.float().to(dtype)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowrank, "WINDOW_BYTES", 5 * COLUMNS * 4)  # five rows


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("base", [BASE, BASE.bfloat16(), BASE.half()], ids=["fp32", "bf16", "fp16"])
def test_it_is_the_sum(small_blocks: None, base: torch.Tensor, transposed: bool) -> None:
    total, memory = made(base=base, transposed=transposed)
    record = total.record("x")
    data = ComputedBytes(memory, {record.file: total}).view(record.file, 0, record.nbytes)
    found = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(ROWS, COLUMNS)
    torch.testing.assert_close(found, expected(torch.float32, base), rtol=1e-6, atol=1e-6)
    assert memory.held == 0


def test_it_is_rounded_once(small_blocks: None) -> None:
    """As fp32 rounded to bf16, and not as a sum of two roundings."""
    high, memory = made()
    low, _ = made(BFLOAT16)
    files = {high.record("h").file: high, low.record("l").file: low}
    source = ComputedBytes(memory, files)
    exact = torch.frombuffer(bytearray(source.view("computed/h", 0, high.record("h").nbytes)), dtype=torch.float32)
    rounded = torch.frombuffer(bytearray(source.view("computed/l", 0, low.record("l").nbytes)), dtype=torch.bfloat16)
    assert torch.equal(rounded, exact.bfloat16())
    twice = BASE.bfloat16() + (SCALE * LEFT @ RIGHT).bfloat16()
    assert not torch.equal(rounded.reshape(ROWS, COLUMNS), twice)


@given(st.integers(0, ROWS * COLUMNS - 1), st.integers(1, ROWS * COLUMNS))
def test_bits_do_not_depend_on_who_asks(start: int, count: int) -> None:
    total, memory = made()
    count = min(count, ROWS * COLUMNS - start)
    with patch.object(lowrank, "WINDOW_BYTES", 5 * COLUMNS * 4):
        whole = bytes(ComputedBytes(memory, {"computed/x": total}).view("computed/x", 0, ROWS * COLUMNS * 4))
        part = ComputedBytes(memory, {"computed/x": total}).view("computed/x", start * 4, count * 4)
    assert bytes(part) == whole[start * 4 : (start + count) * 4]


def test_a_plan_copies_from_it_and_says_so(small_blocks: None) -> None:
    total, memory = made()
    record = total.record("x")
    name = TensorName("actor", "x")
    stored = TensorEntry(name, (ROWS, COLUMNS), FLOAT32, (Chunk(Box.whole((ROWS, COLUMNS)), record, 0, (COLUMNS, 1)),))
    target = Record("out", "out", FLOAT32, ROWS * 4, 0)
    wanted = TensorEntry(name, (ROWS, COLUMNS), FLOAT32, (Chunk(Box((0, 4), (ROWS, 4)), target, 0, (4, 1)),))
    plan = plan_file("out", Chunks.of([wanted]), Chunks.of([stored]))
    assert not plan.lossless
    assert not plan.problems
    sink = Sink(bytearray(target.nbytes))
    FileRun(plan, [target], ComputedBytes(memory, {record.file: total}), sink, sink, window_bytes=64).run()
    found = torch.frombuffer(sink.data, dtype=torch.float32).reshape(ROWS, 4)
    torch.testing.assert_close(found, expected(torch.float32)[:, 4:8], rtol=1e-6, atol=1e-6)


@dataclass
class Sink:
    data: bytearray

    def write(self, key: str, byte_offset: int, data: memoryview) -> None:
        self.data[byte_offset : byte_offset + len(data)] = data

    def crc32(self, data: memoryview) -> int:
        return 0

    def combine(self, first: int, second: int, second_nbytes: int) -> int:
        return 0

    def saw(self, record: Record, byte_offset: int, nbytes: int, crc32: int) -> None:
        pass


def test_memory_is_bounded_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns, rank = 4096, 64, 4
    tensors = {"w": torch.ones(rows, columns), "b": torch.ones(rows, rank), "a": torch.ones(rank, columns)}
    monkeypatch.setattr(lowrank, "WINDOW_BYTES", 16 << 10)
    memory = Memory({name: as_bytes(tensor) for name, tensor in tensors.items()})
    total = LowRankSum(entry("w", tensors["w"]), entry("b", tensors["b"]), entry("a", tensors["a"]), 2.0, FLOAT32)
    source = ComputedBytes(memory, {"computed/x": total})
    for start in range(0, rows * columns * 4, 32 << 10):
        values = np.frombuffer(source.view("computed/x", start, 32 << 10), np.float32)
        assert (values == 9.0).all()
    assert memory.most <= 32 << 10


def test_what_is_stored_nowhere_is_said() -> None:
    total, memory = made()
    (chunk, _) = total.base.chunks
    part = TensorEntry(total.base.name, total.base.global_shape, FLOAT32, (chunk,))
    with pytest.raises(CoverageError, match="have no source"):
        gather(part, [Box.whole(part.global_shape)], FLOAT32, memory)
