"""Classes that are stored by the name of their kind: adding one is adding a class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Generic, TypeVar

from ...errors import Corrupt, Incomplete, Problems, Unsupported, UsageError
from .plain import shorten
from .records import read_fields, write_fields

T = TypeVar("T")
C = TypeVar("C")


class Kinds(Generic[T]):
    """The kinds of one thing, by the name that stands in the file.

    A registered class is a dataclass, not frozen, whose fields are all of its state: numbers, strings, booleans,
    lists and dicts of such, or None.

    Args:
        what: What they are, for messages: ``KL controller``.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._classes: dict[str, type[T]] = {}

    def register(self, kind: str) -> Callable[[type[C]], type[C]]:
        """Decorate a class that is to be stored as ``"kind": kind``.

        Raises:
            UsageError: The kind is taken, or the class cannot be stored.
        """

        def decorate(cls: type[C]) -> type[C]:
            self._check(kind, cls)
            self._classes[kind] = cls  # type: ignore[assignment]  # the registry's T; the decorator keeps C
            return cls

        return decorate

    def _check(self, kind: str, cls: type[object]) -> None:
        if not is_dataclass(cls) or cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
            raise UsageError(f"{cls.__qualname__}: a {self.what} must be a dataclass that is not frozen.")
        if any(item.name == "kind" for item in fields(cls)):
            raise UsageError(f"{cls.__qualname__}: a {self.what} has no field called 'kind'; that is its name here.")
        taken = self._classes.get(kind)
        # The same class again is a notebook's cell that was run twice.
        if taken and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
            raise UsageError(f"The {self.what} kind {kind!r} is {taken.__qualname__} already; take another name.")

    def kind_of(self, item: object) -> str | None:
        """The name of an object's kind, or None where its class is not registered."""
        return next((kind for kind, cls in self._classes.items() if type(item) is cls), None)

    def write(self, item: T, place: str, problems: Problems) -> dict[str, object]:
        """An object as plain values, its kind first."""
        kind = self.kind_of(item)
        if kind is None:
            problems.add(
                UsageError,
                f"{place}: {type(item).__qualname__} is not a {self.what} that can be stored; known are {self._known()}",
                "Register your own class: see docs/reference/rlhf-state.md",
            )
            return {}
        return {"kind": kind, **write_fields(item, place, problems)}

    def read(self, content: object, place: str, problems: Problems) -> T | None:
        """Build an object from its JSON; None where something is wrong, which is noted."""
        if not isinstance(content, dict):
            problems.add(Corrupt, f"{place}: expected a {self.what} as an object, found {shorten(content)}")
            return None
        rest = dict(content)
        kind = rest.pop("kind", None)
        if kind is None:
            problems.add(Incomplete, f"{place}: missing fields: kind")
            return None
        if not isinstance(kind, str) or kind not in self._classes:
            advice = "Import the module that registers it before loading."
            text = f"{place}: unknown kind of {self.what} {shorten(kind)}; known are {self._known()}"
            problems.add(Unsupported, text, advice)
            return None
        return read_fields(self._classes[kind], rest, place, problems)

    def _known(self) -> str:
        return ", ".join(sorted(self._classes))
