"""safetensors: the header's JSON, its length, and the bytes behind it."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

from .change import NUMBERS, Change, rewrite
from .texts import edit_tree, places


def edit_header(path: Path, rng: random.Random) -> Change | None:
    """Change a value of the header, and make its length right."""
    header, data = _split(path)
    tree = json.loads(header)
    text = edit_tree([*places(tree)], rng)
    _join(path, json.dumps(tree).encode("utf-8", "surrogatepass"), data)
    return Change(f"header: {text}")


def edit_tensor(path: Path, rng: random.Random) -> Change | None:
    """Another type, shape or place of one tensor."""
    header, data = _split(path)
    tree = json.loads(header)
    name = rng.choice(sorted(set(tree) - {"__metadata__"}))
    entry, field = tree[name], rng.choice(("dtype", "shape", "data_offsets"))
    if field == "dtype":
        entry[field] = rng.choice(("F64", "F32", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F4", "f32", "", "X"))
    else:
        at = rng.randrange(len(entry[field]) + 1)
        entry[field][at : at + rng.randrange(2)] = [rng.choice((*NUMBERS, 0.5, 1.0, True, "1"))]
    _join(path, json.dumps(tree).encode(), data)
    return Change(f"{name}: {field} becomes {entry[field]!r:.80}")


def edit_length(path: Path, rng: random.Random) -> Change | None:
    """A header that says another length than it has."""
    data = bytearray(path.read_bytes())
    (old,) = struct.unpack_from("<Q", data)
    new = rng.choice((0, 1, old - 1, old + 1, len(data), len(data) - 8, 2**31, 2**63, 2**64 - 1))
    struct.pack_into("<Q", data, 0, new)
    rewrite(path, bytes(data))
    return Change(f"the header's length: {old} becomes {new}")


def edit_text(path: Path, rng: random.Random) -> Change | None:
    """A header that is no JSON, or says things twice."""
    header, data = _split(path)
    first = next(name for name in json.loads(header) if name != "__metadata__")
    entry = json.dumps({first: json.loads(header)[first]})[1:-1].encode()
    how, broken = rng.choice(
        (
            ("a tensor twice", header.rstrip()[:-1] + b", " + entry + b"}"),
            ("blanks", header + b" " * 64),
            ("no end", header.rstrip()[:-1]),
            ("a list", b"[" + header + b"]"),
            ("no UTF-8", header.replace(b"a", b"\xff", 1)),
            ("empty", b"{}"),
            ("nothing", b""),
        )
    )
    _join(path, broken, data)
    return Change(f"header: {how}")


def _split(path: Path) -> tuple[bytes, bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    return data[8 : 8 + length], data[8 + length :]


def _join(path: Path, header: bytes, data: bytes) -> None:
    rewrite(path, struct.pack("<Q", len(header)) + header + data)


MUTATORS = (edit_header, edit_tensor, edit_tensor, edit_length, edit_text)
