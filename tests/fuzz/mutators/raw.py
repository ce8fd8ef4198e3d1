"""Bytes of any file, as disks, copies and people change them."""

from __future__ import annotations

import random
from pathlib import Path

from .change import Change, rewrite


def flip(path: Path, rng: random.Random) -> Change | None:
    """Flip one bit anywhere."""
    data = bytearray(path.read_bytes())
    if not data:
        return None
    at = rng.randrange(len(data))
    data[at] ^= 1 << rng.randrange(8)
    rewrite(path, bytes(data))
    return Change(f"flip a bit of byte {at}")


def cut(path: Path, rng: random.Random) -> Change | None:
    """Cut the file off, as an interrupted copy would."""
    data = path.read_bytes()
    if not data:
        return None
    at = rng.choice((0, 1, len(data) // 2, len(data) - 1, rng.randrange(len(data))))
    rewrite(path, data[:at])
    return Change(f"cut to {at} bytes")


def append(path: Path, rng: random.Random) -> Change | None:
    """Go on after the end."""
    data = path.read_bytes()
    more = rng.choice((b"\0", b"\n", b"PK\5\6" + bytes(18), data[-64:], bytes(4096)))
    rewrite(path, data + more)
    return Change(f"append {len(more)} bytes")


def blank(path: Path, rng: random.Random) -> Change | None:
    """A run of zeros, as a disk that lost a block leaves it."""
    data = bytearray(path.read_bytes())
    if not data:
        return None
    at, length = rng.randrange(len(data)), rng.choice((1, 16, 512, 4096))
    data[at : at + length] = bytes(len(data[at : at + length]))
    rewrite(path, bytes(data))
    return Change(f"{length} zeros at {at}")


def splice(path: Path, rng: random.Random) -> Change | None:
    """Copy a piece of the file over another one."""
    data = bytearray(path.read_bytes())
    if len(data) < 2:
        return None
    length = rng.randrange(1, min(len(data), 600))
    here, there = (rng.randrange(len(data) - length + 1) for _ in range(2))
    data[there : there + length] = data[here : here + length]
    rewrite(path, bytes(data))
    return Change(f"copy {length} bytes from {here} to {there}")


def page(path: Path, rng: random.Random) -> Change | None:
    """What came after a page is gone, or was never written: a power failure, or a copy whose last blocks did not arrive."""
    data = path.read_bytes()
    pages = range(0, len(data), rng.choice((512, 4096, 65536)))
    if not pages:
        return None
    at = rng.choice(pages)
    zeros = rng.random() < 0.5
    rewrite(path, data[:at] + bytes(len(data) - at if zeros else 0))
    return Change(f"{'zeros' if zeros else 'nothing'} from page boundary {at} on")


MUTATORS = (flip, flip, cut, append, blank, splice, page)
