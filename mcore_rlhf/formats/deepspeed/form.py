"""What a nest of values must look like before anyone works with it: written as data, checked once, named where it is not so.

A pickle or a JSON file holds any value anywhere. A reader that takes one for a number finds out in the middle of something else;
so the forms of what it takes are written down, and whatever else is in the file is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from mcore_rlhf.errors import Unsupported

Form = Callable[[object, str], Iterator[tuple[str, str, object]]]
"""Finds what is wrong in a value at a path: the path, what was expected there, and what was found."""


def check_form(value: object, form: Form, where: str) -> None:
    """Refuse a value that does not have a form.

    Args:
        value: Read from a file.
        form: What it should look like.
        where: The file, for the message.

    Raises:
        Unsupported: Something in it is of another type; says where, what was expected and what was found.
    """
    for path, expected, found in form(value, ""):
        shown = f"{found!r:.80}"
        raise Unsupported(
            f"{where}: {path or 'the saved object'} should be {expected}, found {shown} ({type(found).__name__})"
        )


def of(words: str, *kinds: type) -> Form:
    """Exactly one of some types."""

    def form(value: object, path: str) -> Iterator[tuple[str, str, object]]:
        if type(value) not in kinds:
            yield path, words, value

    return form


def whatever(value: object, path: str) -> Iterator[tuple[str, str, object]]:
    """Any value."""
    return iter(())


def maybe(inner: Form) -> Form:
    """None, or of a form."""
    return lambda value, path: iter(()) if value is None else inner(value, path)


def each(inner: Form) -> Form:
    """A list or a tuple, all of whose items have a form."""

    def form(value: object, path: str) -> Iterator[tuple[str, str, object]]:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            yield path, "a list", value
            return
        for number, item in enumerate(value):
            yield from inner(item, f"{path}[{number}]")

    return form


def items(*forms: Form) -> Form:
    """A list or a tuple of as many items as there are forms."""

    def form(value: object, path: str) -> Iterator[tuple[str, str, object]]:
        if not isinstance(value, list | tuple) or len(value) != len(forms):
            yield path, f"a list of {len(forms)}", value
            return
        for number, (inner, item) in enumerate(zip(forms, value, strict=True)):
            yield from inner(item, f"{path}[{number}]")

    return form


def by_key(key: Form, inner: Form = whatever) -> Form:
    """A dictionary, all of whose keys and values have a form."""

    def form(value: object, path: str) -> Iterator[tuple[str, str, object]]:
        if not isinstance(value, Mapping):
            yield path, "a dictionary", value
            return
        for name, item in value.items():
            yield from key(name, f"a key of {path or 'the saved object'}")
            yield from inner(item, f"{path}.{name}" if path else f"{name}")

    return form


def fields(needed: tuple[str, ...] = (), **known: Form) -> Form:
    """A dictionary, some of whose values have forms of their own.

    Args:
        needed: Those that must be there.
        known: Their forms; other keys may have any.
    """

    def form(value: object, path: str) -> Iterator[tuple[str, str, object]]:
        if not isinstance(value, Mapping):
            yield path, "a dictionary", value
            return
        for name in needed:
            if name not in value:
                yield path, f"a dictionary with {name!r}", value
        for name, inner in known.items():
            if name in value:
                yield from inner(value[name], f"{path}.{name}" if path else name)

    return form


def either(*forms: Form) -> Form:
    """Of one of several forms; what is wrong is said of the last one."""

    def form(value: object, path: str) -> Iterator[tuple[str, str, object]]:
        found: list[tuple[str, str, object]] = []
        for inner in forms:
            found = list(inner(value, path))
            if not found:
                return
        yield from found

    return form


INT = of("a whole number", int)
TEXT = of("a text", str)
NUMBER = of("a number", int, float)


def by_name(inner: Form = whatever) -> Form:
    """A dictionary of texts, all of whose values have a form."""
    return by_key(TEXT, inner)


SHAPES = by_name(each(INT))
