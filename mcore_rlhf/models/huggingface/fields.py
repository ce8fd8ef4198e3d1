"""What ``config.json`` and Megatron's arguments have in common: each field is one relation, which reads both ways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_rlhf.errors import Unsupported

Values = Mapping[str, object]


class Field:
    """One relation between the two descriptions of a model; a kind of it says what it has of this."""

    __slots__ = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Fields of ``config.json`` that it speaks of."""
        return ()

    @property
    def arguments(self) -> tuple[str, ...]:
        """Megatron's arguments that it speaks of."""
        return ()

    def args(self, config: Values) -> dict[str, object]:
        """Megatron's arguments that a ``config.json`` says.

        Raises:
            Unsupported: Megatron cannot compute what it asks for.
        """
        return {}

    def config(self, args: Values) -> dict[str, object]:
        """What ``config.json`` has of Megatron's arguments.

        Raises:
            Unsupported: ``config.json`` has no words for it.
        """
        return {}


def integer(values: Values, name: str) -> int:
    """A whole number, 0 where there is none."""
    value = values.get(name)
    return value if isinstance(value, int) else 0


def number(values: Values, name: str, default: float) -> float:
    """A number, or the default."""
    value = values.get(name)
    return value if isinstance(value, int | float) else default


@dataclass(frozen=True, slots=True)
class _Renamed(Field):
    """One value under two names.

    Args:
        name: In ``config.json``.
        arg: In Megatron's arguments.
        also: Further names in ``config.json`` under which it is found.
    """

    name: str
    arg: str
    also: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.also)

    @property
    def arguments(self) -> tuple[str, ...]:
        return (self.arg,)

    def _found(self, config: Values) -> object:
        return next((config[name] for name in self.names if config.get(name) is not None), None)


@dataclass(frozen=True, slots=True)
class Same(_Renamed):
    """One value under two names, which neither side has where it is None.

    Args:
        says_none: Whether None has a meaning, and is not the default of either side.
    """

    says_none: bool = False

    def args(self, config: Values) -> dict[str, object]:
        """The argument, where the config has the value."""
        found = self._found(config)
        return {} if found is None and not self.says_none else {self.arg: found}

    def config(self, args: Values) -> dict[str, object]:
        """The value, where there is such an argument."""
        found = args.get(self.arg)
        return {} if found is None and not self.says_none else {self.name: found}


@dataclass(frozen=True, slots=True)
class NoneAs(_Renamed):
    """A number that ``config.json`` always has, where Megatron says None.

    Args:
        none: The number that stands for None.
    """

    none: float = 0

    def args(self, config: Values) -> dict[str, object]:
        """The number, or None."""
        found = self._found(config)
        return {self.arg: found if isinstance(found, int | float) and found != self.none else None}

    def config(self, args: Values) -> dict[str, object]:
        """The number."""
        return {self.name: args.get(self.arg) or self.none}


@dataclass(frozen=True, slots=True)
class Always(Field):
    """An argument that all models of an architecture have.

    Args:
        arg: Its name.
        value: Its value.
    """

    arg: str
    value: object

    @property
    def arguments(self) -> tuple[str, ...]:
        """Megatron's arguments."""
        return (self.arg,)

    def args(self, config: Values) -> dict[str, object]:
        """The argument."""
        return {self.arg: self.value}

    def config(self, args: Values) -> dict[str, object]:
        """Nothing: the architecture says it.

        Raises:
            Unsupported: The model was trained with another value, so that this architecture would compute something else.
        """
        found = args.get(self.arg)
        if found is not None and found != self.value:
            raise Unsupported(f"args: {self.arg} is {found}, and transformers computes as with {self.value}")
        return {}


@dataclass(frozen=True, slots=True)
class Only(Field):
    """A value of ``config.json`` beside which Megatron can compute no other.

    Args:
        name: Its name.
        value: Its value, also where the config lacks it.
        why: What Megatron has instead.
        written: Whether a new ``config.json`` has it; one that the class does not declare is not made up.
    """

    name: str
    value: object
    why: str
    written: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Fields of ``config.json``."""
        return (self.name,)

    def args(self, config: Values) -> dict[str, object]:
        """Nothing, if the value is the one.

        Raises:
            Unsupported: It is another.
        """
        found = config.get(self.name)
        if found is not None and found != self.value:
            raise Unsupported(f"config.json: {self.name} {found}; {self.why}")
        return {}

    def config(self, args: Values) -> dict[str, object]:
        """The value."""
        return {self.name: self.value} if self.written else {}


@dataclass(frozen=True, slots=True)
class Unused(Field):
    """An argument that Megatron wants and of which these models make nothing: it gets some number.

    Args:
        arg: Its name.
        name: In ``config.json``, what has such a number.
    """

    arg: str
    name: str

    @property
    def arguments(self) -> tuple[str, ...]:
        """Megatron's arguments."""
        return (self.arg,)

    def args(self, config: Values) -> dict[str, object]:
        """The number."""
        return {self.arg: config.get(self.name)}


@dataclass(frozen=True, slots=True)
class Times(Field):
    """An argument that is a number of things of one width.

    Args:
        count: In ``config.json``, how many.
        width: In ``config.json``, how wide each is.
        arg: In Megatron's arguments, how wide all are together.
        width_arg: In Megatron's arguments, how wide each is.
    """

    count: str
    width: str
    arg: str
    width_arg: str

    @property
    def names(self) -> tuple[str, ...]:
        """Fields of ``config.json``."""
        return (self.count,)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Megatron's arguments."""
        return (self.arg,)

    def args(self, config: Values) -> dict[str, object]:
        """The width of all; None where there are none."""
        count, width = config.get(self.count), config.get(self.width)
        whole = count * width if isinstance(count, int) and isinstance(width, int) else 0
        return {self.arg: whole or None}

    def config(self, args: Values) -> dict[str, object]:
        """How many there are.

        Raises:
            Unsupported: It is no whole number of them.
        """
        whole, width = args.get(self.arg), args.get(self.width_arg)
        if not isinstance(whole, int) or not isinstance(width, int) or not whole:
            return {self.count: None}
        if whole % width:
            raise Unsupported(
                f"args: {self.arg} {whole} is no multiple of {self.width_arg} {width}, which {self.count} in config.json counts"
            )
        return {self.count: whole // width}
