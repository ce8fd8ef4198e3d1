"""Typed records as JSON, and back: one field is one member, and each is what its annotation says, or is named with its file and place.

A record is a dataclass. Its fields are numbers, texts, truth values, None, records, enumerations by value, literals, and tuples, lists
and mappings of such. Tuples are lists in JSON; a mapping whose keys are neither texts nor numbers is a list of pairs.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..core.catalog import DType, dtype_of
from ..errors import CheckpointError, Corrupt, Incomplete, Problems, Unsupported
from ..installation import to_upgrade
from .reading import parse_json

T = TypeVar("T")

Place = Any
"""Where a value stands: text, or what is above it and its key; it becomes text where something is wrong."""
Check = Callable[[Any, Place, Problems], Any]
"""Gives a value as its annotation wants it, and notes what is wrong."""

_TEXTS: dict[object, Callable[[str], object]] = {DType: dtype_of}
"""What is text in JSON, and how it is read."""

Natural = Annotated[int, 0]
"""A whole number from 0."""

_NAMES: dict[object, str] = {
    Natural: "a whole number from 0",
    int: "a whole number",
    float: "a number",
    str: "a string",
    bool: "true or false",
    types.NoneType: "null",
    list: "a list",
    tuple: "a list",
    dict: "an object",
}


def shorten(value: object) -> str:
    """A value as messages show it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def under(place: Place, key: object = None) -> str:
    """The place of a member: ``state.json: kl`` and ``actor`` are ``state.json: kl/actor``."""
    above = under(*place) if isinstance(place, tuple) else str(place)
    return above if key is None else f"{above}{key}" if above.endswith(": ") else f"{above}/{key}"


def told(value: Any, *, sparse: bool = False) -> Any:
    """A value as data for JSON.

    Args:
        value: A record, or a nest of what one is made of.
        sparse: Whether fields that say nothing, as they do by default, are left out.
    """
    if type(value) in (str, int, bool, float, types.NoneType):
        return value
    if type(value) in _TEXTS:
        return str(value)
    if is_dataclass(value):
        found: dict[str, Any] = {}
        for name, bare, silence in _form(type(value)):  # type: ignore[arg-type]  # a class can be hashed
            one = getattr(value, name)
            if not (sparse and type(one) is type(silence) and one == silence):
                found[name] = _bare(one) if bare else told(one, sparse=sparse)
        return found
    if isinstance(value, Mapping):
        pairs = [(key, told(one, sparse=sparse)) for key, one in value.items()]
        plain = all(isinstance(key, str | int) for key in value)
        return dict(pairs) if plain else [[told(key), one] for key, one in pairs]
    if isinstance(value, list | tuple):
        return [told(one, sparse=sparse) for one in value]
    return value.value if isinstance(value, Enum) else value


def _silence(item: Field[Any]) -> Any:
    """What a field says by default where that is nothing: it is false, or empty. A version that a field has by default is no such."""
    default = item.default if item.default_factory is MISSING else item.default_factory()
    return MISSING if default else default


@cache
def _form(cls: type) -> list[tuple[str, bool, Any]]:
    """The fields of a record: whether they may hold anything, which whoever keeps such a record can keep as it is; what says nothing."""
    hints = get_type_hints(cls)
    return [(item.name, _is_bare(hints[item.name]), _silence(item)) for item in fields(cls)]


def _is_bare(hint: Any) -> bool:
    return hint in (Any, object) or any(map(_is_bare, get_args(hint)))


def _bare(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_bare(one) for one in value]
    return dict(value) if isinstance(value, Mapping) else value


def text_of(value: Any, *, sparse: bool = False, indent: int | None = None) -> bytes:
    """A value as JSON; see :func:`told`."""
    separators = (",", ":") if indent is None else None
    return json.dumps(told(value, sparse=sparse), separators=separators, indent=indent).encode()


def parsed(kind: type[T], text: bytes | str, where: str, *, sparse: bool = False) -> T:
    """A value from JSON; see :func:`record_of`."""
    try:
        content = parse_json(text)
    except ValueError as error:
        raise Corrupt(f"{where}: is no JSON: {error}") from None
    return record_of(kind, content, where, sparse=sparse)


def record_of(kind: type[T], content: object, where: str, *, sparse: bool = False) -> T:
    """From :func:`told`.

    Args:
        kind: A record's class, or another annotation.
        content: What should be one.
        where: Its file, for messages.
        sparse: Whether fields that say nothing by default may be missing.

    Raises:
        Corrupt: Fields are not what their annotations say; all are named.
        Unsupported: There are fields that nobody knows.
        Incomplete: Fields are missing.
    """
    problems = Problems()
    check: Check = check_of(kind, sparse)  # type: ignore[arg-type]  # a class can be hashed
    found: T = check(content, where, problems)
    problems.raise_if_any()
    return found


def members(
    content: object,
    names: Collection[str],
    place: Place,
    problems: Problems,
    kind: type[CheckpointError] = Corrupt,
    optional: Collection[str] = (),
) -> Mapping[str, Any] | None:
    """The members of a JSON object; unknown and missing ones are noted by name.

    Args:
        content: What should be an object.
        names: What it should have.
        place: Where it stands, for messages.
        problems: Where everything that is wrong is noted.
        kind: The error for content that is no object.
        optional: Those that may be.

    Returns:
        The object where all is well, otherwise None.
    """
    if not isinstance(content, Mapping):
        problems.add(kind, f"{under(place)}: expected an object, found {shorten(content)}")
        return None
    unknown = sorted(str(name) for name in content if name not in names)
    missing = [name for name in names if name not in content and name not in optional]
    here = under(place).removesuffix(": ") if unknown or missing else ""
    if unknown:
        newer = f"A newer release may have written it: {to_upgrade()}"
        problems.add(Unsupported, f"{here}: unknown fields: {', '.join(unknown)}", newer)
    if missing:
        problems.add(
            Incomplete, f"{here}: missing fields: {', '.join(missing)}", "Use an older step: this one is not whole."
        )
    return None if unknown or missing else content


@cache
def check_of(hint: Any, sparse: bool = False) -> Check:
    """What holds values against an annotation; a value that is not so is noted, and becomes None.

    Args:
        hint: ``int``, ``float``, ``str``, ``bool``, ``None``, ``object``, a record's class, an enumeration, a literal, a named tuple,
            ``list``, ``tuple``, ``dict`` or ``Mapping`` of such or of anything, or a union.
        sparse: See :func:`record_of`.
    """
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if hint in (Any, object):
        return lambda value, place, problems: value
    if hint in _NAMES:
        return _plain(hint)
    if hint in _TEXTS:
        return _text(hint)
    if origin in (Union, types.UnionType):
        return _one_of(inner, sparse)
    if is_dataclass(hint):
        return _record(hint, sparse)
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, Enum)):
        return _listed(hint, inner)
    if inner and issubclass(origin, Mapping) and _is_bare(inner[1]) and not get_args(inner[1]):
        return lambda value, place, problems: (
            value if isinstance(value, Mapping) else _wrong(value, _NAMES[dict], place, problems)
        )
    if inner and issubclass(origin, Mapping):
        of_key = _number if inner[0] is int else check_of(inner[0])
        foreign = (
            isinstance(inner[1], type)
            and inner[1] not in _NAMES
            and not (is_dataclass(inner[1]) or issubclass(inner[1], Enum))
        )
        return _mapping(of_key, check_of(object if foreign else inner[1], sparse), inner[0] in (str, int))
    if (inner or hasattr(origin, "_fields")) and issubclass(origin, Sequence):
        return _sequence(hint, origin, inner, sparse)
    return _plain(hint)


def convert(value: object, hint: object, place: Place, problems: Problems) -> Any:
    """A value as its annotation wants it: whole numbers where floats are meant become floats, lists tuples; see :func:`check_of`."""
    return check_of(hint)(value, place, problems)


def write_fields(record: object, place: Place, problems: Problems) -> dict[str, object]:
    """The fields of a record as plain values; one that is not what its annotation says is noted."""
    hints = get_type_hints(type(record), include_extras=True)
    values = {item.name: getattr(record, item.name) for item in fields(record)}  # type: ignore[arg-type]  # every caller's is one
    found = {name: convert(value, hints[name], (place, name), problems) for name, value in values.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def read_fields(cls: type[T], content: object, place: Place, problems: Problems) -> T | None:
    """A record from a JSON object, the inverse of :func:`write_fields`; None where anything is wrong."""
    found: T | None = convert(content, cls, place, problems)
    return found


def _wrong(value: object, expected: str, place: Place, problems: Problems) -> None:
    problems.add(Corrupt, f"{under(place)}: expected {expected}, found {shorten(value)}")


def _plain(hint: Any) -> Check:
    def check(value: Any, place: Place, problems: Problems) -> Any:
        if type(value) is hint:
            return value
        fits, converted = _fit(_scalar(value), hint)
        return converted if fits else _wrong(value, _describe(hint), place, problems)

    return check


def _text(hint: Any) -> Check:
    def check(value: Any, place: Place, problems: Problems) -> Any:
        if type(value) is not str:
            return _wrong(value, _NAMES[str], place, problems)
        try:
            return _TEXTS[hint](value)
        except ValueError as error:
            return problems.add(Corrupt, f"{under(place)}: {error}")

    return check


def _fit(value: Any, hint: Any) -> tuple[bool, Any]:
    kind = type(value)
    if hint is Natural:
        return kind is int and value >= 0, value
    if hint is float and kind is int:
        try:
            return True, float(value)
        except OverflowError:
            return False, value
    if hint is tuple and kind is list:
        return True, tuple(value)
    return kind is (types.NoneType if hint is None else hint), value


def _scalar(value: Any) -> Any:
    """A number of numpy's, or a tensor of one element, as Python's; there is none before these were imported."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.generic):
        return value.item()
    return value.item() if torch is not None and isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _describe(hint: Any) -> str:
    origin, inner = get_origin(hint) or hint, [one for one in get_args(hint) if one is not Ellipsis]
    if isinstance(hint, type) and issubclass(hint, Enum):
        inner = [one.value for one in hint]
    if origin is Literal or (inner and not get_args(hint)):
        return f"one of {', '.join(map(repr, inner))}"
    if is_dataclass(hint) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return _NAMES[dict]
    if isinstance(origin, type) and issubclass(origin, Sequence) and origin is not str:
        return f"a list of {_NAMES[inner[0]].partition(' ')[2]}s" if inner and inner[0] in _NAMES else _NAMES[list]
    return _NAMES.get(types.NoneType if hint is None else hint, str(hint))


def _one_of(options: Sequence[Any], sparse: bool) -> Check:
    checks = [check_of(option, sparse) for option in options]

    def check(value: Any, place: Place, problems: Problems) -> Any:
        for one in checks:
            tried = Problems()
            found = one(value, place, tried)
            if not tried:
                return found
        return _wrong(value, " or ".join(map(_describe, options)), place, problems)

    def record_or_none(value: Any, place: Place, problems: Problems) -> Any:
        return None if value is None else checks[0](value, place, problems)

    return record_or_none if len(options) == 2 and is_dataclass(options[0]) and options[1] is types.NoneType else check


def _listed(hint: Any, values: Sequence[Any]) -> Check:
    known = {one: one for one in values} or {one.value: one for one in hint}

    def check(value: Any, place: Place, problems: Problems) -> Any:
        fits = isinstance(value, str | int) and value in known
        return known[value] if fits else _wrong(value, _describe(hint), place, problems)

    return check


def _mapping(of_key: Check, of_value: Check, named: bool) -> Check:
    def check(value: Any, place: Place, problems: Problems) -> Any:
        pairs = value.items() if isinstance(value, Mapping) else None if named else _pairs(value)
        if pairs is None:
            return _wrong(value, "an object" if named else "a list of pairs", place, problems)
        return {of_key(key, place, problems): of_value(one, (place, key), problems) for key, one in pairs}

    return check


def _number(key: Any, place: Place, problems: Problems) -> Any:
    """A key that is a number, which is text in JSON."""
    return int(key) if isinstance(key, str) and key.isdecimal() else check_of(int)(key, place, problems)


def _pairs(value: Any) -> list[tuple[Any, Any]] | None:
    """What stands for a mapping whose keys are no texts; a list cannot be a key."""
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return None
    return [(tuple(key) if isinstance(key, list) else key, one) for key, one in value]


def _sequence(hint: Any, origin: Any, inner: Sequence[Any], sparse: bool) -> Check:
    of_fields = list(get_type_hints(origin, include_extras=True).values()) if hasattr(origin, "_fields") else []
    some = origin is not tuple or inner[-1:] == (Ellipsis,)
    checks = [check_of(one, sparse) for one in of_fields or inner if one is not Ellipsis]
    made = list if origin is list else origin._make if of_fields else tuple

    def check(value: Any, place: Place, problems: Problems) -> Any:
        many = len(value) if isinstance(value, list | tuple) else -1
        if many < 0 or (many != len(checks) and (of_fields or not some)):
            return _wrong(
                value, _describe(hint) if some and not of_fields else f"a list of {len(checks)}", place, problems
            )
        each = checks if of_fields or not some else checks * many
        before = len(problems.found)
        found = [one(item, (place, at), problems) for at, (one, item) in enumerate(zip(each, value, strict=True))]
        return made(found) if len(problems.found) == before else None

    return check


def _record(cls: Any, sparse: bool) -> Check:
    known = fields(cls)
    hints = get_type_hints(cls, include_extras=True)
    checks = {item.name: check_of(hints[item.name], sparse) for item in known}
    can_miss = [item.name for item in known if sparse and _silence(item) is not MISSING]

    def check(value: Any, place: Place, problems: Problems) -> Any:
        whole = type(value) is dict and value.keys() == checks.keys()
        found = value if whole else members(value, checks, place, problems, optional=can_miss)
        if found is None:
            return None
        before = len(problems.found)
        values = {name: checks[name](one, (place, name), problems) for name, one in found.items()}
        if len(problems.found) > before:
            return None
        try:
            record = cls(**{item.name: values[item.name] for item in known if item.init and item.name in values})
        except CheckpointError as error:
            return problems.add(Corrupt, f"{under(place)}: {error}")
        for item in known:
            if not item.init:
                setattr(record, item.name, values[item.name])
        return record

    return check
