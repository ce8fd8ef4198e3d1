"""Whether a value changes what a trained model computes, and if not, what it is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

Values = Mapping[str, object]


class About(Enum):
    """What an argument or a field is about. All but the first leave the logits of a trained model as they are."""

    COMPUTES = "what the model computes"
    TRAINING = "training only"
    EXECUTION = "kernels, precision and memory"
    LAYOUT = "how it is cut and stored"
    BOOKKEEPING = "names, paths and counters"
    UNDECLARED = "declared by nobody"


def by_name(names: Mapping[About, str]) -> dict[str, About]:
    """The kind of every name.

    Args:
        names: By kind, separated by spaces.
    """
    return {name: kind for kind, of_kind in names.items() for name in of_kind.split()}


@dataclass(frozen=True, slots=True)
class MeaningRow:
    """One argument or field that changes what the model computes, and is not related to one of the other side.

    Args:
        name: Its name.
        neutral: Values with which it changes nothing, the default first.
        needs: Another one, without which it is not looked at; empty where it always is.
    """

    name: str
    neutral: tuple[object, ...]
    needs: str = ""

    def matters(self, values: Values) -> bool:
        """Whether the model would compute something else without it."""
        if self.needs and not values.get(self.needs):
            return False
        value = values.get(self.name, self.neutral[0])
        each = value if isinstance(value, list) and value else [value]  # one for every layer, or every kind of loss
        return not (self._changes_nothing(value) or all(map(self._changes_nothing, each)))

    def _changes_nothing(self, value: object) -> bool:
        return any(equal(value, neutral) for neutral in self.neutral)


def _nothing(_: Values) -> dict[str, object]:
    return {}


@dataclass(frozen=True, slots=True)
class Field:
    """A row of an architecture's table: one relation between the two descriptions of a model, which reads both ways.

    Args:
        names: Fields of ``config.json`` that it speaks of.
        arguments: Megatron's arguments that it speaks of.
        args: Megatron's arguments that a ``config.json`` says; raises Unsupported where Megatron cannot compute what it asks for.
        config: What ``config.json`` has of Megatron's arguments; raises Unsupported where it has no words for it.
    """

    names: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    args: Callable[[Values], dict[str, object]] = _nothing
    config: Callable[[Values], dict[str, object]] = _nothing


@dataclass(frozen=True, slots=True)
class Meaning:
    """What is known of one argument, or of one field of ``config.json``, of a source.

    Args:
        name: Its name.
        about: What it says something about.
        target: What the other family calls it: one name or several; empty where the architecture implies it, where it
            has no counterpart, or where only training looks at it.
        default: What its absence means, as its own framework has it; None where nobody declares it.
    """

    name: str
    about: About
    target: tuple[str, ...] = ()
    default: object = None


def equal(a: object, b: object) -> bool:
    """Whether two values mean the same: a tuple is a list, and an enumeration its name."""
    return _plain(a) == _plain(b)


def _plain(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    return value
