"""What ``config.json`` and Megatron's arguments have in common: kinds of rows of an architecture's table."""

from __future__ import annotations

from mcore_rlhf.errors import Unsupported
from mcore_rlhf.models.meaning.kinds import Field, Values


def integer(values: Values, name: str) -> int:
    """A whole number, 0 where there is none."""
    value = values.get(name)
    return value if isinstance(value, int) else 0


def number(values: Values, name: str, default: float) -> float:
    """A number, or the default."""
    value = values.get(name)
    return value if isinstance(value, int | float) else default


def _found(config: Values, names: tuple[str, ...]) -> object:
    """What stands under the first of some names that has anything."""
    return next((config[name] for name in names if config.get(name) is not None), None)


def same(name: str, arg: str, also: tuple[str, ...] = (), *, says_none: bool = False) -> Field:
    """One value under two names, which neither side has where it is None.

    Args:
        name: In ``config.json``.
        arg: In Megatron's arguments.
        also: Further names in ``config.json`` under which it is found.
        says_none: Whether None has a meaning, and is not the default of either side.
    """

    def said(found: object, under: str) -> dict[str, object]:
        return {} if found is None and not says_none else {under: found}

    names = (name, *also)
    return Field(names, (arg,), lambda config: said(_found(config, names), arg), lambda args: said(args.get(arg), name))


def none_as(name: str, arg: str, also: tuple[str, ...] = (), *, none: float = 0) -> Field:
    """A number that ``config.json`` always has, where Megatron says None.

    Args:
        name: In ``config.json``.
        arg: In Megatron's arguments.
        also: Further names in ``config.json`` under which it is found.
        none: The number that stands for None.
    """

    def args(config: Values) -> dict[str, object]:
        found = _found(config, names)
        return {arg: found if isinstance(found, int | float) and found != none else None}

    names = (name, *also)
    return Field(names, (arg,), args, lambda said: {name: said.get(arg) or none})


def always(arg: str, value: object) -> Field:
    """An argument that all models of an architecture have: one that was trained with another is none of it.

    Args:
        arg: Its name.
        value: Its value.
    """

    def config(args: Values) -> dict[str, object]:
        found = args.get(arg)
        if found is not None and found != value:
            raise Unsupported(f"args: {arg} is {found}, and transformers computes as with {value}")
        return {}

    return Field((), (arg,), lambda _: {arg: value}, config)


def only(name: str, value: object, why: str, *, written: bool = True) -> Field:
    """A value of ``config.json`` beside which Megatron can compute no other.

    Args:
        name: Its name.
        value: Its value, also where the config lacks it.
        why: What Megatron has instead.
        written: Whether a new ``config.json`` has it; one that the class does not declare is not made up.
    """

    def args(config: Values) -> dict[str, object]:
        found = config.get(name)
        if found is not None and found != value:
            raise Unsupported(f"config.json: {name} {found}; {why}")
        return {}

    return Field((name,), (), args, lambda _: {name: value} if written else {})


def unused(arg: str, name: str) -> Field:
    """An argument that Megatron wants and of which these models make nothing: it gets some number.

    Args:
        arg: Its name.
        name: In ``config.json``, what has such a number.
    """
    return Field((), (arg,), lambda config: {arg: config.get(name)})


def times(count: str, width: str, arg: str, width_arg: str) -> Field:
    """An argument that is a number of things of one width; it has to be a whole number of them.

    Args:
        count: In ``config.json``, how many.
        width: In ``config.json``, how wide each is.
        arg: In Megatron's arguments, how wide all are together; None where there are none.
        width_arg: In Megatron's arguments, how wide each is.
    """

    def args(config: Values) -> dict[str, object]:
        return {arg: integer(config, count) * integer(config, width) or None}

    def config(args: Values) -> dict[str, object]:
        whole, each = args.get(arg), args.get(width_arg)
        if not isinstance(whole, int) or not isinstance(each, int) or not whole:
            return {count: None}
        if whole % each:
            raise Unsupported(
                f"args: {arg} {whole} is no multiple of {width_arg} {each}, which {count} in config.json counts"
            )
        return {count: whole // each}

    return Field((count,), (arg,), args, config)
