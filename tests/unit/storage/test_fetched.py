"""What was fetched is kept, dropped oldest first, and never wrong; what fails is tried anew by whoever asks again."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mcore_rlhf.errors import StorageError
from mcore_rlhf.storage.fetched import PIECE_NBYTES, Fetched

FILES = {name: random.Random(name).randbytes(nbytes) for name, nbytes in (("a", 3_000_000), ("b", 1_234_567), ("c", 1))}


class Far:
    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.broken = False

    def fetch(self, file: str, start: int, stop: int) -> bytes:
        self.asked.append((file, start, stop))
        if self.broken:
            raise StorageError("the store is away")
        return FILES[file][start:stop]

    def kept(self, limit: int | None = None) -> Fetched:
        return Fetched(self.fetch, lambda file: len(FILES[file]), 4, limit=limit)


def test_every_byte_is_fetched_once() -> None:
    far = Far()
    kept = far.kept()
    assert kept.read("a", 100, 50) == FILES["a"][100:150]
    assert kept.read("a", 90, 100) == FILES["a"][90:190]
    assert sorted(far.asked) == [("a", 90, 100), ("a", 100, 150), ("a", 150, 190)]
    assert kept.read("a", 90, 100) == FILES["a"][90:190]
    assert len(far.asked) == 3


def test_a_length_may_be_said_by_what_is_fetched_itself() -> None:
    """The manifest of a published folder says where its files lie: it waited for ever for who had asked for a length."""
    far = Far()

    def length(file: str) -> int:
        assert file == "c" or asked.read("c", 0, 1) == FILES["c"]
        return len(FILES[file])

    asked = Fetched(far.fetch, length, 4)
    expecting = threading.Thread(target=asked.expect, args=([("a", 0, 10)],), daemon=True)
    expecting.start()
    expecting.join(20)
    assert not expecting.is_alive()
    assert asked.read("a", 0, 10) == FILES["a"][:10]


def test_the_end_of_a_file() -> None:
    kept = Far().kept()
    assert kept.read("c", 0, 100) == FILES["c"]
    assert kept.read("c", 1, 1) == b""
    assert kept.read("b", 1_234_560, 1 << 20) == FILES["b"][1_234_560:]


def test_what_lies_close_together_travels_as_one() -> None:
    far = Far()
    kept = far.kept()
    kept.expect([("a", 0, 10), ("b", 0, 10), ("a", 5000, 10), ("a", 2_000_000, 5)])
    assert kept.read("a", 5000, 10) == FILES["a"][5000:5010]
    assert kept.read("a", 2_000_000, 5) == FILES["a"][2_000_000:2_000_005]
    assert sorted(far.asked) == [("a", 0, 5010), ("a", 2_000_000, 2_000_005), ("b", 0, 10)]


def test_large_ranges_travel_in_pieces() -> None:
    asked: list[tuple[int, int]] = []

    def zeros(file: str, start: int, stop: int) -> bytes:
        asked.append((start, stop))
        return bytes(stop - start)

    kept = Fetched(zeros, lambda file: 3 * PIECE_NBYTES, 4)
    assert kept.read("z", 1, 2 * PIECE_NBYTES) == bytes(2 * PIECE_NBYTES)
    assert sorted(asked) == [(1, 1 + PIECE_NBYTES), (1 + PIECE_NBYTES, 1 + 2 * PIECE_NBYTES)]


@pytest.mark.parametrize("limit", [0, 5_000, 100_000, None])
def test_many_threads_read_what_is_there(limit: int | None) -> None:
    """With any limit, however small: what was dropped is fetched anew."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    kept = Far().kept(limit)

    def read(number: int) -> None:
        chosen = random.Random(seed + number)
        for _ in range(40):
            file = chosen.choice("ab")
            offset, nbytes = chosen.randrange(len(FILES[file])), chosen.randrange(1, 20_000)
            if chosen.random() < 0.3:
                kept.expect([(file, offset, min(nbytes, len(FILES[file]) - offset))])
            assert kept.read(file, offset, nbytes) == FILES[file][offset : offset + nbytes]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(read, range(6)))


def test_what_is_read_in_two_parts_stays_until_both_are_there() -> None:
    """However small the limit: each part would make room for the other for ever."""
    kept = Far().kept(limit=0)
    kept.expect([("a", 0, 10), ("a", 100_000, 10)])
    assert kept.read("a", 0, 100_010) == FILES["a"][:100_010]


def test_a_failure_is_told_and_not_kept() -> None:
    far = Far()
    kept = far.kept()
    far.broken = True
    with pytest.raises(StorageError, match="away"):
        kept.read("a", 0, 10)
    far.broken = False
    assert kept.read("a", 0, 10) == FILES["a"][:10]


def test_nothing_is_left_when_it_goes() -> None:
    """Others may end meanwhile: a server of the tests lets go of connections when it likes."""
    descriptors, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    for _ in range(20):
        Far().kept().read("a", 0, 10)
    deadline = time.monotonic() + 10
    while set(threading.enumerate()) - threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) <= threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors
