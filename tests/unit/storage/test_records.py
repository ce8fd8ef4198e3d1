"""Records: what is written is read, and whatever else is there is named with its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple

import pytest

from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, Unsupported
from mcore_rlhf.storage.records import Natural, parsed, record_of, text_of, told


class Colour(Enum):
    RED = "red"


class Row(NamedTuple):
    name: str
    nbytes: Natural


@dataclass(frozen=True)
class Inner:
    count: Natural = 0
    release: str = "1.0"


@dataclass(frozen=True)
class Outer:
    name: str
    number: float
    colour: Colour
    state: Literal["on", "off"]
    rows: tuple[Row, ...]
    inner: Inner | None
    by_name: Mapping[str, Inner] = field(default_factory=dict)
    by_step: Mapping[int, str] = field(default_factory=dict)
    spans: dict[tuple[str, str], list[tuple[int, int]]] = field(default_factory=dict)
    whatever: Mapping[str, object] = field(default_factory=dict)


FULL = Outer(
    "a", 1.5, Colour.RED, "on", (Row("r", 3),), Inner(2), {"x": Inner(1)}, {7: "t"}, {("f", "k"): [(0, 9)]}, {"y": [1, None]},
)  # fmt: skip
PLAIN = Outer("", 0.0, Colour.RED, "off", (), None)


@pytest.mark.parametrize("record", [FULL, PLAIN], ids=["full", "plain"])
@pytest.mark.parametrize("sparse", [True, False])
def test_what_is_written_is_read(record: Outer, sparse: bool) -> None:
    assert parsed(Outer, text_of(record, sparse=sparse), "file", sparse=sparse) == record


def test_only_what_says_nothing_is_left_out() -> None:
    """A version is written although it is the one that everybody has today: tomorrow's reader has another."""
    assert told(Inner(), sparse=True) == {"release": "1.0"}
    assert told(Inner(3), sparse=True) == {"count": 3, "release": "1.0"}
    with pytest.raises(Incomplete, match="missing fields: release"):
        record_of(Inner, {}, "file", sparse=True)


WRONG: list[tuple[dict[str, Any], type[CheckpointError], str]] = [
    ({"name": 1}, Corrupt, "file: name: expected a string, found 1"),
    ({"name": None}, Corrupt, "name: expected a string, found None"),
    ({"number": True}, Corrupt, "number: expected a number, found True"),
    ({"colour": "blue"}, Corrupt, "colour: expected one of 'red', found 'blue'"),
    ({"state": ["on"]}, Corrupt, r"state: expected one of 'on', 'off', found \['on'\]"),
    ({"rows": [["r", -1]]}, Corrupt, "rows/0/1: expected a whole number from 0, found -1"),
    ({"rows": [["r"]]}, Corrupt, r"rows/0: expected a list of 2, found \['r'\]"),
    ({"rows": "rows"}, Corrupt, "rows: expected a list, found 'rows'"),
    ({"inner": 3}, Corrupt, "inner: expected an object, found 3"),
    ({"inner": {"count": 1}}, Incomplete, "inner: missing fields: release"),
    ({"inner": {"count": 1.0, "release": ""}}, Corrupt, "inner/count: expected a whole number from 0, found 1.0"),
    ({"by_name": {"x": {"count": 1, "release": "", "z": 1}}}, Unsupported, "by_name/x: unknown fields: z"),
    ({"by_step": {"x": "t"}}, Corrupt, "expected a whole number, found 'x'"),
    ({"by_step": []}, Corrupt, "by_step: expected an object"),
    ({"spans": {"f": []}}, Corrupt, "spans: expected a list of 2, found 'f'"),
    ({"spans": [[["f", "k"], [[1]]]]}, Corrupt, r"expected a list of 2, found \[1\]"),
    ({"more": 1}, Unsupported, "unknown fields: more"),
]


@pytest.mark.parametrize(("change", "kind", "text"), WRONG)
def test_what_is_not_so_is_named_with_its_place(change: dict[str, Any], kind: type[CheckpointError], text: str) -> None:
    with pytest.raises(kind, match=text):
        record_of(Outer, {**told(FULL), **change}, "file: ")


def test_all_that_is_wrong_is_named_at_once() -> None:
    with pytest.raises(Corrupt, match=r"2 problems:\n  - file/name: .*\n  - file/number: "):
        record_of(Outer, {**told(FULL), "name": 1, "number": "x"}, "file")
    with pytest.raises(Corrupt, match="file: is no JSON"):
        parsed(Outer, b"{", "file")
