"""Frames: what is torn is cut, what is turned over is found, and what is said to be huge is not believed."""

from __future__ import annotations

import random
import struct
import time
import zlib
from pathlib import Path

import pytest

from mcore_rlhf.storage.framed import OVERHEAD, FrameReader, frame_head, payload_at


def by_hand(number: int, payload: bytes) -> bytes:
    """As the module's docstring says, without its code."""
    rest = struct.pack("<I", len(payload)) + struct.pack("<Q", number) + payload
    return struct.pack("<I", zlib.crc32(rest)) + rest


def written(path: Path, payloads: list[bytes]) -> bytes:
    data = b"".join(by_hand(number, payload) for number, payload in enumerate(payloads))
    path.write_bytes(data)
    return data


def read(path: Path) -> tuple[FrameReader, list[bytes]]:
    reader = FrameReader(path)
    return reader, [bytes(frame.payload) for frame in reader.read()]


PAYLOADS = [b"one", b"\0" * 50, b"three" * 20, b"4"]


def test_a_frame_is_what_the_docstring_says() -> None:
    assert all(frame_head(at, payload) + payload == by_hand(at, payload) for at, payload in enumerate([*PAYLOADS, b""]))


def test_a_file_that_was_cut_anywhere_gives_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    data = written(path, PAYLOADS)
    ends = [sum(OVERHEAD + len(one) for one in PAYLOADS[:many]) for many in range(len(PAYLOADS) + 1)]
    for length in range(len(data) + 1):
        path.write_bytes(data[:length])
        reader, found = read(path)
        whole = sum(end <= length for end in ends) - 1
        assert (found, reader.at, reader.torn) == (PAYLOADS[:whole], ends[whole], length - ends[whole])
        assert path.stat().st_size == length, "a reader changes nothing"


def test_a_bit_that_was_turned_over_anywhere_costs_no_frame_before_it(tmp_path: Path, rng: random.Random) -> None:
    path = tmp_path / "f"
    data = written(path, PAYLOADS)
    end_of_third = len(data) - OVERHEAD - 1
    for at in range(len(data)):
        bad = bytearray(data)
        bad[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        reader, found = read(path)
        assert all(payload in PAYLOADS for payload in found), "nothing is made up"
        damaged = len(PAYLOADS) - len(found)
        assert damaged
        in_payload = any(
            start + OVERHEAD <= at < start + OVERHEAD + len(one)
            for start, one in zip((0, OVERHEAD + 3, 2 * OVERHEAD + 53), PAYLOADS[:3], strict=True)
        )
        if in_payload and at < end_of_third:
            assert (damaged, reader.damaged) == (1, 1), "the frames behind it are given"


def test_zeros_and_huge_lengths_are_no_frames(tmp_path: Path) -> None:
    path = tmp_path / "f"
    data = written(path, PAYLOADS)
    for tail in (b"\0" * 4096, b"\xff" * 64, struct.pack("<IIQ", 0, 1 << 31, len(PAYLOADS)) + b"x" * 100):
        path.write_bytes(data + tail)
        reader, found = read(path)
        assert (found, reader.torn, reader.closed) == (PAYLOADS, len(tail), False)


def test_a_frame_of_another_place_is_none(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(by_hand(0, b"a") + by_hand(0, b"a"))
    assert read(path)[1] == [b"a"]


def test_what_was_added_meanwhile_is_read_later(tmp_path: Path) -> None:
    path = tmp_path / "f"
    written(path, PAYLOADS[:2])
    reader, found = read(path)
    assert len(found) == 2
    half = by_hand(2, b"later")
    with path.open("ab") as file:
        file.write(half[:9])
    assert list(reader.read()) == []
    assert reader.torn == 9
    with path.open("ab") as file:
        file.write(half[9:] + by_hand(3, b"") + by_hand(4, b"behind the end"))
    assert [bytes(frame.payload) for frame in reader.read()] == [b"later"]
    assert reader.closed
    assert list(reader.read()) == []


def test_one_frame_alone(tmp_path: Path) -> None:
    path = tmp_path / "f"
    written(path, PAYLOADS)
    reader = FrameReader(path)
    places = [(frame.number, frame.offset, len(frame.payload)) for frame in reader.read()]
    assert [payload_at(path, *place) for place in places] == PAYLOADS
    number, offset, nbytes = places[1]
    assert payload_at(path, number, offset, nbytes - 1) is payload_at(path, 5, offset, nbytes) is None
    path.write_bytes(path.read_bytes()[: offset + 4])
    assert payload_at(path, number, offset, nbytes) is None
    path.unlink()
    assert payload_at(path, number, offset, nbytes) is None


def test_frames_larger_than_the_window(tmp_path: Path) -> None:
    path = tmp_path / "f"
    large = [bytes([at]) * (3 << 20) for at in range(5)] + [b"z" * (9 << 20)]
    written(path, large)
    assert read(path)[1] == large


def _offsets(payloads: list[bytes]) -> list[int]:
    return [sum(OVERHEAD + len(one) for one in payloads[:number]) for number in range(len(payloads))]


@pytest.mark.parametrize("bit", range(8 * OVERHEAD))
def test_a_bit_of_a_head_costs_one_frame(tmp_path: Path, bit: int) -> None:
    """Also one of the length, which says where the next one begins."""
    payloads = [bytes([number]) * (20 + number) for number in range(1, 9)]
    data = bytearray(b"".join(frame_head(number, one) + one for number, one in enumerate((*payloads, b""))))
    data[_offsets(payloads)[3] + bit // 8] ^= 1 << bit % 8
    path = tmp_path / "file"
    path.write_bytes(data)
    reader = FrameReader(path)
    assert [bytes(frame.payload) for frame in reader.read()] == [*payloads[:3], *payloads[4:]]
    assert (reader.damaged, reader.torn, reader.closed) == (1, 0, True)


def test_a_stretch_that_was_written_over_costs_the_frames_in_it(tmp_path: Path, rng: random.Random) -> None:
    payloads = [rng.randbytes(rng.randrange(1, 300)) for _ in range(200)]
    data = bytearray(b"".join(frame_head(number, one) + one for number, one in enumerate(payloads)))
    offsets = _offsets(payloads)
    data[offsets[50] + 3 : offsets[90] - 1] = rng.randbytes(offsets[90] - offsets[50] - 4)
    path = tmp_path / "file"
    path.write_bytes(data)
    reader = FrameReader(path)
    assert [bytes(frame.payload) for frame in reader.read()] == [*payloads[:50], *payloads[90:]]
    assert (reader.damaged, reader.torn) == (40, 0)


def test_numbers_in_a_torn_payload_that_look_like_heads_cost_no_time(tmp_path: Path) -> None:
    whole = b"whole"
    tokens = b"".join(struct.pack("<IIQ", number, 8 << 20, 1 + number % 7) for number in range(1 << 20))
    path = tmp_path / "file"
    path.write_bytes(frame_head(0, whole) + whole + frame_head(1, tokens) + tokens[:-1])
    reader, started = FrameReader(path), time.monotonic()
    assert [bytes(frame.payload) for frame in reader.read()] == [whole]
    assert reader.damaged == 0
    assert reader.torn == OVERHEAD + len(tokens) - 1
    assert time.monotonic() - started < 10


def test_a_file_said_to_be_huge_is_not_searched_to_its_end(tmp_path: Path) -> None:
    """A hole of a terabyte behind a frame that is damaged: nobody waits for hours."""
    data = bytearray(written(tmp_path / "file", PAYLOADS))
    data[_offsets(PAYLOADS)[2] + OVERHEAD + 1] ^= 1
    with (tmp_path / "file").open("wb") as file:
        file.write(data[: _offsets(PAYLOADS)[3]])
        file.truncate(1 << 40)
    started = time.monotonic()
    assert read(tmp_path / "file")[1] == PAYLOADS[:2]
    assert time.monotonic() - started < 60
