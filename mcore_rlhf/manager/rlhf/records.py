"""Dataclasses as JSON objects: one field, one member, checked against its annotation in both directions."""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch

from ...errors import CheckpointError, Corrupt, Incomplete, Problems, Unsupported
from .plain import shorten, under

T = TypeVar("T")

_NAMES: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    types.NoneType: "null",
    list: "a list",
    tuple: "a list",
    dict: "an object",
}


def members(
    content: object, names: Collection[str], place: str, problems: Problems, kind: type[CheckpointError] = Corrupt
) -> Mapping[str, object] | None:
    """The members of a JSON object; unknown and missing ones are noted by name.

    Args:
        content: What should be an object.
        names: What it should have.
        place: Where it stands, for messages.
        problems: Where everything that is wrong is noted.
        kind: The error for content that is no object.

    Returns:
        The object where all is well, otherwise None.
    """
    if not isinstance(content, dict):
        problems.add(kind, f"{place}: expected an object, found {shorten(content)}")
        return None
    unknown = sorted(map(str, content.keys() - set(names)))
    missing = [name for name in names if name not in content]
    if unknown:
        advice = "A newer release may have written it: pip install --upgrade mcore_rlhf"
        problems.add(Unsupported, f"{place.removesuffix(': ')}: unknown fields: {', '.join(unknown)}", advice)
    if missing:
        problems.add(Incomplete, f"{place.removesuffix(': ')}: missing fields: {', '.join(missing)}")
    return None if unknown or missing else content


def write_fields(record: object, place: str, problems: Problems) -> dict[str, object]:
    """The fields of a dataclass as plain values; a value that is not what its annotation says is noted."""
    hints, written = get_type_hints(type(record)), {}
    for item in fields(record):  # type: ignore[arg-type]  # every caller passes a dataclass
        value = convert(getattr(record, item.name), hints[item.name], under(place, item.name), problems)
        written[item.name] = list(value) if isinstance(value, tuple) else value  # the annotation turns it back
    return written


def read_fields(cls: type[T], content: object, place: str, problems: Problems) -> T | None:
    """Build a dataclass from a JSON object; the inverse of :func:`write_fields`.

    Returns:
        The record, or None where anything is wrong.
    """
    known = fields(cls)  # type: ignore[arg-type]  # every caller passes a dataclass
    found = members(content, [item.name for item in known], place, problems)
    if found is None:
        return None
    hints, before = get_type_hints(cls), len(problems.found)
    values = {name: convert(value, hints[name], under(place, name), problems) for name, value in found.items()}
    if len(problems.found) > before:
        return None
    try:
        record = cls(**{item.name: values[item.name] for item in known if item.init})
    except CheckpointError as error:
        problems.add(Corrupt, f"{place}: {error}")
        return None
    for item in known:
        if not item.init:
            setattr(record, item.name, values[item.name])
    return record


def convert(value: object, hint: object, place: str, problems: Problems) -> Any:
    """The value as its annotation wants it: whole numbers where floats are meant become floats, lists tuples.

    Args:
        value: A plain value, a numpy scalar or a tensor of one element.
        hint: ``int``, ``float``, ``str``, ``bool``, ``None``, ``list``, ``tuple``, ``dict``, or a union of them.
        place: Where it stands.
        problems: Where a mismatch is noted.
    """
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        value = value.item()
    for option in options(hint):
        fits, converted = _fit(value, get_origin(option) or option, get_args(option))
        if fits:
            return converted
    expected = " or ".join(_describe(option) for option in options(hint))
    problems.add(Corrupt, f"{place}: expected {expected}, found {shorten(value)}")
    return None


def options(hint: object) -> tuple[object, ...]:
    """The members of a union; the annotation itself where it is none."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fit(value: object, wanted: object, inner: tuple[object, ...]) -> tuple[bool, object]:
    if wanted is float and type(value) in (int, float):
        return _as_float(value)
    if wanted is tuple and isinstance(value, (list, tuple)):
        fits = [_fit(item, inner[0] if inner else type(item), ()) for item in value]
        return all(fit for fit, _ in fits), tuple(item for _, item in fits)
    return type(value) is wanted, value


def _as_float(value: Any) -> tuple[bool, object]:
    try:
        return True, float(value)
    except OverflowError:
        return False, value


def _describe(option: object) -> str:
    name = _NAMES.get(get_origin(option) or option, str(option))
    inner = [_NAMES.get(item, str(item)) for item in get_args(option) if item is not Ellipsis]
    return f"{name} of {inner[0].partition(' ')[2]}s" if inner and get_origin(option) is tuple else name
