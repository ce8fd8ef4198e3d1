"""Strict JSON that loses nothing: what JSON has no words for becomes an object with one ``$`` key.

========================  =============================================================
Python                    JSON
========================  =============================================================
``nan``, ``inf``, ``-inf``  ``{"$float": "NaN"}``, ``"Infinity"``, ``"-Infinity"``
a tuple                   ``{"$tuple": [...]}``
a tensor                  ``{"$tensor": [key in extra.pt, "float32[2, 3]"]}``
a dict with other keys    ``{"$items": [[key, value], ...]}``; also one whose only key starts with ``$``
========================  =============================================================

Finite floats are written by ``repr``, the shortest text that reads back to the same bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from ...errors import Corrupt, Problems, Unsupported, UsageError

_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_KEPT = "numbers, strings, booleans, None, lists, tuples, dicts"


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor's place in the JSON.

    Args:
        key: Its name in the tensor file.
        form: Its dtype and shape: ``float32[2, 3]``.
    """

    key: str
    form: str


def under(place: str, key: object) -> str:
    """The place of a member: ``state.json: kl`` and ``actor`` are ``state.json: kl/actor``."""
    return f"{place}{key}" if place.endswith(": ") else f"{place}/{key}"


def dumps(tree: object, place: str) -> str:
    """Write a tree as strict JSON.

    Args:
        tree: Nested dicts, lists and tuples of plain values; numpy scalars count as Python's.
        place: What it is, for messages.

    Raises:
        UsageError: Something in it cannot be kept; every such place is named.
    """
    problems = Problems()
    try:
        encoded = encode(tree, place, problems)
        problems.raise_if_any()
        return json.dumps(encoded, indent=1, allow_nan=False) + "\n"
    except RecursionError:
        raise UsageError(f"{place}the values are nested too deeply, or contain themselves.") from None


def loads(text: str | bytes, where: str) -> object:
    """Read strict JSON, with the marked values still as they stand; :func:`decode` turns them back.

    Raises:
        Corrupt: It is not JSON, or holds the constants ``NaN`` or ``Infinity``, which JSON does not have.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{where}: is not valid JSON: {error}.\nUse an older step.") from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def encode(value: object, place: str, problems: Problems) -> object:
    """The tree that stands for ``value`` in JSON; what cannot be kept is noted in ``problems``."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": _name(value)}
    if isinstance(value, TensorRef):
        return {"$tensor": [value.key, value.form]}
    if isinstance(value, dict):
        return _encode_dict(value, place, problems)
    if isinstance(value, (list, tuple)):
        items = [encode(item, under(place, index), problems) for index, item in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    problems.add(UsageError, f"{place}: a {type(value).__qualname__} cannot be kept in JSON", f"It keeps {_KEPT}.")
    return None


def _name(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _encode_dict(value: dict[object, object], place: str, problems: Problems) -> object:
    if all(isinstance(key, str) for key in value) and not _is_marked(value):
        return {key: encode(item, under(place, key), problems) for key, item in value.items()}
    return {
        "$items": [
            [encode(key, under(place, f"key {key!r}"), problems), encode(item, under(place, key), problems)]
            for key, item in value.items()
        ]
    }


def _is_marked(value: dict[object, object]) -> bool:
    return len(value) == 1 and str(next(iter(value))).startswith("$")


def decode(tree: object, place: str, problems: Problems) -> object:
    """What a tree of JSON stands for; the inverse of :func:`encode`."""
    if isinstance(tree, list):
        return [decode(item, under(place, index), problems) for index, item in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    if not _is_marked(tree):
        return {key: decode(item, under(place, key), problems) for key, item in tree.items()}
    ((mark, content),) = tree.items()
    if mark not in _MARKS:
        problems.add(Unsupported, f"{place}: the mark {mark} is not known; known are {', '.join(_MARKS)}")
        return None
    try:
        return _MARKS[mark](content, place, problems)
    except (TypeError, ValueError, KeyError):
        problems.add(Corrupt, f"{place}: {mark} is followed by {shorten(content)}")
        return None


def _float(content: object, _place: str, _problems: Problems) -> float:
    return _FLOATS[str(content)]


def _tuple(content: object, place: str, problems: Problems) -> tuple[object, ...]:
    return tuple(_list(decode(_list(content), place, problems)))


def _tensor(content: object, _place: str, _problems: Problems) -> TensorRef:
    key, form = _list(content)
    return TensorRef(str(key), str(form))


def _items(content: object, place: str, problems: Problems) -> dict[object, object]:
    decoded = _list(decode(_list(content), place, problems))
    return {key: value for key, value in map(_list, decoded)}  # noqa: C416  # checks that they are pairs


def _list(content: object) -> list[object]:
    if not isinstance(content, list):
        raise TypeError("not a list")
    return content


_MARKS: dict[str, Callable[[object, str, Problems], object]] = {
    "$float": _float,
    "$tuple": _tuple,
    "$tensor": _tensor,
    "$items": _items,
}


def shorten(value: object) -> str:
    """A value as messages show it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
