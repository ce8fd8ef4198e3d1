"""Carrying a plan out over real bytes: against numpy, with checksums, casts, small windows and small spans."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rlhf.core import execute
from mcore_rlhf.core.cast import as_floats, convert, differing_after_rounding
from mcore_rlhf.core.catalog import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    UINT8,
    Box,
    Chunk,
    Record,
    TensorEntry,
    dtype_of,
    row_major,
)
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.execute import FileRun
from mcore_rlhf.core.plan import plan_file
from tests.unit.core.layouts import INT32, NAME, catalog, random_tensor, stored


@dataclass
class Memory:
    """Files in memory; what is released must have been viewed, exactly."""

    files: dict[str, bytes]
    out: list[int] = field(default_factory=list)

    def view(self, file: str, byte_offset: int, nbytes: int) -> memoryview:
        assert byte_offset >= 0
        assert byte_offset + nbytes <= len(self.files[file]), "read beyond the end"
        self.out.append(nbytes)
        return memoryview(self.files[file])[byte_offset : byte_offset + nbytes]

    def release(self, file: str, byte_offset: int, nbytes: int) -> None:
        assert self.out.pop() == nbytes


@dataclass
class Sink:
    records: dict[str, bytearray]

    def write(self, key: str, byte_offset: int, data: memoryview) -> None:
        assert byte_offset + len(data) <= len(self.records[key]), "written beyond the end"
        self.records[key][byte_offset : byte_offset + len(data)] = data


@dataclass
class Crcs:
    seen: list[tuple[str, int, int, int]] = field(default_factory=list)

    def crc32(self, data: memoryview) -> int:
        return zlib.crc32(data)

    def combine(self, first: int, second: int, second_nbytes: int) -> int:
        from mcore_rlhf.storage.checksum import combine

        return combine(first, second, second_nbytes)

    def saw(self, record: Record, byte_offset: int, nbytes: int, crc32: int) -> None:
        self.seen.append((record.key, byte_offset, nbytes, crc32))


@settings(max_examples=40)
@given(st.randoms(use_true_random=False), st.sampled_from([4, 12, 64, 1 << 20]), st.sampled_from([4, 16, 1 << 20]))
def test_records_come_out_as_planned(rng: random.Random, window: int, span: int) -> None:
    tensor = random_tensor(rng)
    source = stored(rng, tensor, "a", rng.randrange(1, 6), transposed=True)
    target = stored(rng, tensor, "b", rng.randrange(1, 6))
    at, blob, placed = 0, b"", {}
    for key, content in source.contents.items():  # both records in one file, one behind the other
        placed[key] = len(blob) + 12
        blob += b"x" * 12 + content.tobytes()
    chunks = tuple(replace(c, record=replace(c.record, byte_offset=placed[c.record.key])) for c in source.entry.chunks)
    plan = plan_file("b", Chunks.of([target.entry]), catalog(replace(source.entry, chunks=chunks)))
    records = [Record("b", key, INT32, len(content), at) for key, content in target.contents.items()]
    sink = Sink({r.key: bytearray(r.nbytes) for r in records})
    memory, crcs, done = Memory({"a": blob}), Crcs(), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute, "SPAN_BYTES", span)
        found = FileRun(plan, records, memory, sink, crcs, window, done.append).run()
    assert not memory.out, "everything viewed is released"
    for key, content in target.contents.items():
        got = np.frombuffer(sink.records[key], np.int32)
        np.testing.assert_array_equal(got, np.where(content == -1, 0, content))
        assert found[key] == zlib.crc32(sink.records[key])
    assert sum(done) == sum(r.nbytes for r in records)
    for key, offset, nbytes, crc in crcs.seen:
        assert crc == zlib.crc32(source.contents[key].tobytes()[offset : offset + nbytes])


def test_values_are_cast_as_torch_casts_them() -> None:
    values = torch.cat([torch.randn(100), torch.tensor([0.0, -0.0, float("inf"), 1e-42, 3.3895314e38, 1.00390625])])
    words = values.view(torch.int32).numpy().view(np.uint32)
    for dtype in (BFLOAT16, FLOAT16):
        expected = values.to(getattr(torch, dtype.name)).view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(convert(words, FLOAT32, dtype), expected)
        back = convert(expected, dtype, FLOAT32)
        assert differing_after_rounding(words, expected, FLOAT32, dtype) == 0
        assert differing_after_rounding(back, expected, FLOAT32, dtype) == 0
        broken = expected.copy()
        broken[[3, 7]] ^= 1
        assert differing_after_rounding(words, broken, FLOAT32, dtype) == 2
    np.testing.assert_array_equal(as_floats(words, FLOAT32), values.double().numpy())


def test_a_plan_with_a_cast_writes_the_narrow_type() -> None:
    values = torch.randn(3, 4)
    box = Box.whole((3, 4))
    wide = Record("a", "data/0", FLOAT32, 12, 0)
    narrow = Record("b", "data/0", BFLOAT16, 12, 0)
    entries = [TensorEntry(NAME, (3, 4), r.dtype, (Chunk(box, r, 0, row_major((3, 4))),)) for r in (wide, narrow)]
    plan = plan_file("b", Chunks.of([entries[1]]), catalog(entries[0]))
    sink = Sink({"data/0": bytearray(24)})
    FileRun(plan, [narrow], Memory({"a": values.numpy().tobytes()}), sink, Crcs(), 8).run()
    assert bytes(sink.records["data/0"]) == values.to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


def test_every_word_width_can_be_moved() -> None:
    for name, itemsize in (("uint8", 1), ("bfloat16", 2), ("float32", 4), ("int64", 8), ("complex128", 16)):
        dtype, numel = dtype_of(name), 10
        data = bytes(range(numel * itemsize))
        a, b = Record("a", "data/0", dtype, numel, 0), Record("b", "data/0", dtype, numel, 0)
        box = Box.whole((numel // 2, 2))
        entries = [
            TensorEntry(NAME, box.shape, dtype, (Chunk(box, record, 0, strides),))
            for record, strides in ((a, (1, numel // 2)), (b, (2, 1)))
        ]
        sink = Sink({"data/0": bytearray(len(data))})
        FileRun(
            plan_file("b", Chunks.of([entries[1]]), catalog(entries[0])), [b], Memory({"a": data}), sink, Crcs()
        ).run()
        items = [data[i * itemsize : (i + 1) * itemsize] for i in range(numel)]
        assert bytes(sink.records["data/0"]) == b"".join(
            items[j * numel // 2 + i] for i in range(numel // 2) for j in range(2)
        ), name


def test_names_of_element_types() -> None:
    assert dtype_of(torch.bfloat16) == dtype_of("bf16") == dtype_of("torch.bfloat16") == BFLOAT16
    assert dtype_of(torch.uint8) == UINT8
    with pytest.raises(ValueError, match="int3"):
        dtype_of("int3")
    for dtype in (torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64):
        assert dtype_of(dtype).itemsize == dtype.itemsize
