"""JSON, YAML and small texts: values of other types, keys that are missing or twice, and what no parser likes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..child import CANARY
from .change import FLOATS, NUMBERS, Change, odd_text, rewrite

Place = tuple[Any, Any]
"""A container, and a key or index in it."""


def places(value: object) -> Iterator[Place]:
    """Everything inside a value of JSON, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from places(item)


def other_value(rng: random.Random) -> object:
    """Some value of any type."""
    return rng.choice(
        (
            None,
            True,
            False,
            {},
            [],
            [[]],
            {"": None},
            rng.choice(NUMBERS),
            rng.choice(FLOATS),
            odd_text(rng),
            [1, "a"],
            10**400,
        )
    )


def edit_json(path: Path, rng: random.Random) -> Change | None:
    """Change, remove, rename or swap values."""
    try:
        tree = json.loads(path.read_bytes())
    except ValueError:
        return None
    found = [*places(tree)]
    if not found:
        return None
    text = edit_tree(found, rng)
    rewrite(path, json.dumps(tree).encode("utf-8", "surrogatepass"))
    return Change(text)


def edit_tree(found: list[Place], rng: random.Random) -> str:
    """Change one of the places of a tree."""
    (holder, key), (other, there) = rng.choice(found), rng.choice(found)
    old = holder[key]
    how = rng.choice(("value", "value", "value", "near", "remove", "rename", "swap"))
    if how == "remove":
        del holder[key]
    elif how == "rename" and isinstance(holder, dict):
        holder[odd_text(rng, str(key))] = holder.pop(key)
    elif how == "swap":
        scalars = not isinstance(old, dict | list) and not isinstance(other[there], dict | list)
        if scalars:
            holder[key], other[there] = other[there], old
        return f"swap {key!r:.60} and {there!r:.60}" if scalars else "nothing"
    elif how == "near" and type(old) is int:
        holder[key] = old + rng.choice((-1, 1, 8))
    elif how == "near" and isinstance(old, str):
        holder[key] = odd_text(rng, old)
    else:
        holder[key] = other_value(rng)
    return f"{how} of {key!r:.60}, which was {old!r:.60}"


def _aliases() -> bytes:
    """Twenty lines of YAML that mean a tree of 9²⁰ leaves."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 20)]
    return "\n".join([*lines, "tp: *a19", "source: *a19"]).encode()


def odd_key(data: bytes, rng: random.Random) -> bytes:
    """A key that is in a text of JSON, so that it is there twice."""
    keys = re.findall(rb'"([A-Za-z_]\w{0,60})"\s*:', data)
    return rng.choice(keys) if keys else b"a"


def break_text(path: Path, rng: random.Random) -> Change | None:
    """What is no JSON, YAML or tracker any more, or only nearly."""
    data = path.read_bytes()
    how, broken = rng.choice(
        (
            ("a byte order mark", b"\xef\xbb\xbf" + data),
            ("UTF-16", data.decode("utf-8", "replace").encode("utf-16")),
            ("no UTF-8", data[: len(data) // 2] + b"\xff\xfe" + data[len(data) // 2 :]),
            ("blanks", b" \n\t" + data + b"\n\n"),
            ("another kind of text", rng.choice((b"null", b"[]", b"{}", b'"x"', b"0", b"NaN", b"- a\n- b", b"a: b", b"~", b"{"))),
            ("twice", data + data),
            ("lines as on Windows", data.replace(b"\n", b"\r\n") + b"\r\n"),
            ("a key twice", data.replace(b"{", b'{"' + odd_key(data, rng) + b'": null, ', 1)),
            ("no end", data.rstrip()[:-1]),
            ("a number", str(rng.choice((*NUMBERS, 10**30))).encode()),
            ("a line", odd_text(rng).encode()),
            ("long numbers", data.replace(b"1", b"1" * 5000)),
            ("brackets", rng.choice((b"[", b"{", b'{"a":', b"- ", b"[{")) * 20000),
            ("brackets and their ends", b"[" * 20000 + b"]" * 20000),
            ("aliases", _aliases()),
            ("itself", b"&a [*a]"),
            ("control characters", b'{"a\\u001b[31m": "\\u202e", "tp": "\\u0000"}'),
            ("a tag of Python", f"!!python/object/apply:os.system ['touch {CANARY}']".encode()),
        )
    )  # fmt: skip
    rewrite(path, broken)
    return Change(f"text: {how}")


MUTATORS = (edit_json, edit_json, edit_json, break_text)
