"""Pickles, opcode by opcode: other numbers, texts, types and names, and opcodes that were never there."""

from __future__ import annotations

import io
import pickletools
import random
import struct
from collections.abc import Callable
from pathlib import Path

from ..child import CANARY
from .change import FLOATS, NUMBERS, Change, odd_text, rewrite

Opcode = tuple[str, object, bytes]
"""Name, argument, and all its bytes."""

Edit = Callable[[list[Opcode], random.Random], str | None]
"""Changes the opcodes of a pickle; None where there is nothing to change."""

_NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1"}
_TEXTS = {"BINUNICODE", "SHORT_BINUNICODE"}
_VALUES = _NUMBERS | _TEXTS | {"BINFLOAT", "NONE", "NEWTRUE", "NEWFALSE", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"}

HARMFUL = (
    ("os", "system"), ("posix", "system"), ("subprocess", "getoutput"), ("os", "popen"), ("builtins", "exec"),
    ("builtins", "eval"), ("__builtin__", "eval"), ("timeit", "timeit"), ("runpy", "_run_code"), ("code", "interact"),
)  # fmt: skip
"""Functions to which the canary's command is given."""

STRANGE = (
    ("torch", "load"), ("torch.serialization", "load"), ("builtins", "getattr"), ("builtins", "open"), ("copyreg", "_reconstructor"),
    ("collections", "OrderedDict"), ("argparse", "Namespace"), ("torch", "Size"), ("torch", "device"), ("torch", "FloatStorage"),
    ("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_parameter"), ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("megatron.core.enums", "ModelType"), ("my.own", "Config"), ("builtins", "bytearray"), ("builtins", "complex"), ("_codecs", "encode"),
    ("builtins", "set"), ("functools", "partial"), ("operator", "attrgetter"), ("", ""), ("a" * 300, "b"), ("os.path", "join"),
)  # fmt: skip


def edited(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """A pickle with one thing changed, and what that is."""
    opcodes = parsed(data)
    while True:
        text = rng.choice(EDITS)(opcodes, rng)
        if text is not None:
            return b"".join(raw for _, _, raw in opcodes), text


def parsed(data: bytes) -> list[Opcode]:
    """The opcodes of a pickle; frames are left out, since a changed pickle would not fill them."""
    found = [(opcode.name, argument, at or 0) for opcode, argument, at in pickletools.genops(io.BytesIO(data))]
    ends = [at for _, _, at in found[1:]] + [len(data)]
    return [(name, arg, data[at:end]) for (name, arg, at), end in zip(found, ends, strict=True) if name != "FRAME"]


def integer(value: int) -> bytes:
    """The shortest opcode for a number."""
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw if len(raw) < 256 else b"\x8b" + struct.pack("<I", len(raw)) + raw


def real(value: float) -> bytes:
    """The opcode for a float."""
    return b"G" + struct.pack(">d", value)


def string(value: str) -> bytes:
    """The opcode for a text."""
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def named(module: str, name: str) -> bytes:
    """The opcode for a global."""
    return f"c{module}\n{name}\n".encode()


def calls(rng: random.Random) -> bytes:
    """A value that would make the canary, if it were ever built."""
    module, name = rng.choice(HARMFUL)
    command = f"open({CANARY!r}, 'w')" if name in ("exec", "eval", "timeit", "_run_code") else f"touch {CANARY}"
    how = rng.choice(("reduce", "newobj", "inst", "obj", "stack"))
    if how == "inst":
        return b"(" + string(command) + f"i{module}\n{name}\n".encode()
    if how == "obj":
        return b"(" + named(module, name) + string(command) + b"o"
    function = string(module) + string(name) + b"\x93" if how == "stack" else named(module, name)
    return function + string(command) + b"\x85" + (b"\x81" if how == "newobj" else b"R")


def other_value(rng: random.Random) -> bytes:
    """Some value of any type."""
    return rng.choice(
        (
            b"N", b"\x88", b"\x89", b"}", b"]", b")", b"\x8f", integer(rng.choice(NUMBERS)), string(odd_text(rng)),
            real(rng.choice(FLOATS)), b"C\x03abc", integer(10 ** rng.choice((20, 300))),
            named(*rng.choice(STRANGE)), named(*rng.choice(STRANGE)) + b")R", b"]" + integer(1) + b"a", b"}" + string("a") + b"Ns",
        )
    )  # fmt: skip


def _places(opcodes: list[Opcode], names: set[str]) -> list[int]:
    return [at for at, (name, _, _) in enumerate(opcodes) if name in names]


def _replaced(
    opcodes: list[Opcode], names: set[str], rng: random.Random, make: Callable[[object], bytes]
) -> str | None:
    places = _places(opcodes, names)
    if not places:
        return None
    at = rng.choice(places)
    name, old, _ = opcodes[at]
    opcodes[at] = ("", None, make(old))
    return f"opcode {at} {name} {old!r:.60} becomes {opcodes[at][2]!r:.90}"


def change_number(opcodes: list[Opcode], rng: random.Random) -> str | None:
    """Another number, far off or next to it."""
    return _replaced(
        opcodes, _NUMBERS, rng, lambda old: integer(rng.choice((*NUMBERS, int(str(old)) + 1, int(str(old)) - 1)))
    )


def change_float(opcodes: list[Opcode], rng: random.Random) -> str | None:
    """Another float."""
    return _replaced(opcodes, {"BINFLOAT"}, rng, lambda _: real(rng.choice(FLOATS)))


def change_text(opcodes: list[Opcode], rng: random.Random) -> str | None:
    """Another text: a key, a name, a device, a kind of storage."""
    return _replaced(opcodes, _TEXTS, rng, lambda old: string(odd_text(rng, str(old))))


def change_type(opcodes: list[Opcode], rng: random.Random) -> str | None:
    """A value of another type."""
    return _replaced(opcodes, _VALUES, rng, lambda _: other_value(rng))


def change_name(opcodes: list[Opcode], rng: random.Random) -> str | None:
    """Another class or function, harmful ones among them."""
    return _replaced(opcodes, {"GLOBAL"}, rng, lambda _: named(*rng.choice(STRANGE + HARMFUL)))


def call(opcodes: list[Opcode], rng: random.Random) -> str | None:
    """A call of the canary's command in place of a value."""
    return _replaced(opcodes, _VALUES, rng, lambda _: calls(rng))


def swap_values(opcodes: list[Opcode], rng: random.Random) -> str | None:
    """Two values, or two keys, in each other's place."""
    names = rng.choice((_VALUES, _TEXTS, _NUMBERS))
    places = _places(opcodes, names)
    if len(places) < 2:
        return None
    a, b = rng.sample(places, 2)
    opcodes[a], opcodes[b] = opcodes[b], opcodes[a]
    return f"swap opcodes {a} {opcodes[b][1]!r:.60} and {b} {opcodes[a][1]!r:.60}"


def remove(opcodes: list[Opcode], rng: random.Random) -> str | None:
    """A few opcodes less."""
    at, count = rng.randrange(len(opcodes)), rng.choice((1, 1, 1, 2, 5))
    gone = [name for name, _, _ in opcodes[at : at + count]]
    del opcodes[at : at + count]
    return f"remove {count} opcodes at {at}: {gone}"


def repeat(opcodes: list[Opcode], rng: random.Random) -> str | None:
    """Some opcodes twice."""
    at, count = rng.randrange(len(opcodes)), rng.choice((1, 1, 3, 10))
    opcodes[at:at] = opcodes[at : at + count]
    return f"repeat {count} opcodes at {at}"


def insert(opcodes: list[Opcode], rng: random.Random) -> str | None:
    """An opcode that was never there."""
    raw = rng.choice(
        (
            b"0",
            b"1",
            b"2",
            b"b",
            b"R",
            b"s",
            b"u",
            b"a",
            b"e",
            b"Q",
            b"\x81",
            b"\x93",
            b"(",
            b"\x94",
            b"P0\n",
            b"h\0",
            b".",
        )
    )
    at = rng.randrange(len(opcodes))
    opcodes.insert(at, ("", None, raw))
    return f"insert {raw!r} at opcode {at}"


def bomb(opcodes: list[Opcode], rng: random.Random) -> str | None:
    """A few bytes in place of a value that cost memory, time or the stack."""
    deep = rng.choice((1000, 300_000))
    bombs = {
        "deep tuple": b")" + b"\x85" * deep,
        "deep tuple as a key": b"})" + b"\x85" * deep + b"Ns",
        "deep list": b"]" * deep + b"a" * (deep - 1),
        "a tuple of itself twice": b")" + b"q\x00h\x00\x86" * 30,
        "the same as a key": b"})" + b"q\x00h\x00\x86" * 30 + b"Ns",
        "a far place in the memo": b"Nr\xff\xff\xff\x7f",
        "a far place in the memo, read": b"j\xff\xff\xff\x7f",
        "a large bytearray": named("builtins", "bytearray") + integer(2**31) + b"\x85R",
        "large bytes": named("builtins", "bytes") + integer(2**31) + b"\x85R",
        "a long text": b"X\xff\xff\xff\x7fabc",
        "a longer text": b"\x8d" + b"\xff" * 7 + b"\x7fabc",
        "a long number": b"\x8b" + struct.pack("<I", 400_000) + b"\x7f" * 400_000,
        "equal hashes": b"}(" + b"".join(integer(n * (2**61 - 1)) + b"N" for n in range(1, 20_000)) + b"u",
        "a frame": b"\x95" + b"\xff" * 8 + b"N",
        "a list of itself": b"]q\x00h\x00a",
        "a set of sets": b"(" * 900 + b"\x91" * 900,
        "a state for a class": named("collections", "OrderedDict") + b"}X\x01\x00\x00\x00a" + b"Nsb",
        "slots for a class": named("argparse", "Namespace") + b"N}X\x01\x00\x00\x00aNs\x86b",
        "another class for an object": named("argparse", "Namespace") + b")\x81N}X\x09\x00\x00\x00__class__Ns\x86b",
    }
    name = rng.choice(sorted(bombs))
    said = _replaced(opcodes, _VALUES, rng, lambda _: bombs[name])
    return said and f"{name}: {said}"


EDITS: tuple[Edit, ...] = (
    change_number, change_number, change_float, change_text, change_text, change_type, change_type, change_name, call,
    swap_values, swap_values, remove, repeat, insert, bomb,
)  # fmt: skip


def edit(path: Path, rng: random.Random) -> Change | None:
    """Change a file that is a bare pickle."""
    data, text = edited(path.read_bytes(), rng)
    rewrite(path, data)
    return Change(text)


MUTATORS = (edit,)
