"""The ledger: whatever was read in whatever order, every record ends up held against its checksum, and read once."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from mcore_rlhf.core.catalog import UINT8, Record
from mcore_rlhf.errors import Corrupt, Problems
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.verify.audit import Ledger


@dataclass
class Memory:
    data: bytes
    read: list[tuple[int, int]] = field(default_factory=list)

    def view(self, file: str, byte_offset: int, nbytes: int) -> memoryview:
        self.read.append((byte_offset, byte_offset + nbytes))
        return memoryview(self.data)[byte_offset : byte_offset + nbytes]

    def release(self, file: str, byte_offset: int, nbytes: int) -> None:
        pass


def run(ledger: Ledger, memory: Memory) -> Problems:
    problems = Problems()
    for task in ledger.tasks(memory, problems, lambda nbytes: None):
        task()
    return problems


OFFSET = 10


@given(st.randoms(use_true_random=False), st.booleans())
def test_damage_is_found_wherever_it_was_read(rng: random.Random, damaged: bool) -> None:
    content = rng.randbytes(rng.randrange(1, 200))
    bad = bytearray(content)
    if damaged:
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
    memory = Memory(b"x" * OFFSET + bytes(bad))
    record = Record("file.pt", "data/0", UINT8, len(content), OFFSET)
    ledger = Ledger([StoredFile("file.pt", 0, (("data/0", OFFSET, len(content), zlib.crc32(content)),))])
    for _ in range(rng.randrange(6)):  # ranges in any order, overlapping, repeated
        start = rng.randrange(len(bad))
        stop = rng.randrange(start, len(bad)) + 1
        ledger.saw(record, start, stop - start, zlib.crc32(bad[start:stop]))
    problems = run(ledger, memory)
    assert bool(problems) == damaged
    if damaged:
        (problem,) = problems.found
        assert problem.kind is Corrupt
        assert "file.pt: data/0" in problem.message
        assert f"{zlib.crc32(content):08x}" in problem.message
        assert f"{zlib.crc32(bytes(bad)):08x}" in problem.message


def test_what_was_seen_is_not_read_again() -> None:
    content = bytes(range(100))
    record = Record("f", "data/0", UINT8, 100, 0)
    ledger = Ledger([StoredFile("f", 100, (("data/0", 0, 100, zlib.crc32(content)),))])
    for start, stop in ((60, 100), (0, 30)):
        assert ledger.wants(record, start, stop - start)
        ledger.saw(record, start, stop - start, zlib.crc32(content[start:stop]))
        assert not ledger.wants(record, start, stop - start)
    memory = Memory(content)
    assert not run(ledger, memory)
    assert memory.read == [(30, 60)]


def test_an_empty_record_and_one_that_nobody_read() -> None:
    memory = Memory(b"abc")
    records = (("data/0", 0, 0, 0), ("data/1", 0, 3, zlib.crc32(b"abc")))
    assert not run(Ledger([StoredFile("f", 3, records)]), memory)
    assert memory.read == [(0, 3)]
