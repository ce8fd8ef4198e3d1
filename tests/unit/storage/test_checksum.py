from __future__ import annotations

import subprocess
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rlhf.storage import checksum


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_both_ways_of_combining_give_the_crc_of_the_whole(first: bytes, second: bytes) -> None:
    whole = zlib.crc32(first + second)
    pieces = checksum.crc32(first), checksum.crc32(second), len(second)
    assert checksum.combine(*pieces) == whole
    assert checksum.combine_by_algebra(*pieces) == whole
    assert checksum.crc32(second, checksum.crc32(first)) == whole


@pytest.mark.parametrize("nbytes", [0, 1, 1 << 20, (1 << 33) + 7])
def test_combining_huge_lengths_agrees_with_the_library(nbytes: int) -> None:
    assert checksum.combine_by_algebra(0x12345678, 0x9ABCDEF0, nbytes) == checksum.combine(
        0x12345678, 0x9ABCDEF0, nbytes
    )


def test_any_buffer_is_accepted() -> None:
    for buffer in (b"abc", bytearray(b"abc"), memoryview(b"abc")):
        assert checksum.crc32(buffer) == zlib.crc32(b"abc")


@pytest.mark.parametrize("hidden", [("zlib_ng",), ("zlib_ng", "isal")])
def test_without_the_fast_libraries_the_next_one_is_used(hidden: tuple[str, ...]) -> None:
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden!r}))\n"
        "from mcore_rlhf.storage import checksum as c; import zlib\n"
        "assert c.combine(c.crc32(b'ab'), c.crc32(b'cde'), 3) == zlib.crc32(b'abcde')\n"
        "print(c.IMPLEMENTATION)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() in {"isal_zlib", "zlib"}
