"""Asking the table: what every argument and every field of a source means, and which of them a target cannot express."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Protocol

from . import arguments, config_fields, declared, other_arguments
from .kinds import Kind, Meaning, Values, equal


class Relation(Protocol):
    """One relation between the two descriptions of a model: a field of an architecture's table."""

    @property
    def names(self) -> tuple[str, ...]:
        """Fields of ``config.json``."""
        ...

    @property
    def arguments(self) -> tuple[str, ...]:
        """Megatron's arguments."""
        ...


def of_arguments(args: Values, relations: Sequence[Relation]) -> dict[str, Meaning]:
    """What each of Megatron's arguments means for an architecture of Hugging Face.

    Args:
        args: The arguments.
        relations: The architecture's ``fields``.
    """
    return {name: _of_argument(name, relations) for name in args}


def _of_argument(name: str, relations: Sequence[Relation]) -> Meaning:
    spelled = arguments.SPELLED.get(name, name)
    target = tuple(dict.fromkeys(n for r in relations if spelled in r.arguments for n in r.names))
    target = target or tuple(n for n, argument in config_fields.OF_TENSORS.items() if argument == name)
    default = declared.arguments().get(name)
    if name in other_arguments.OTHERS:
        return Meaning(name, other_arguments.OTHERS[name], target, default)
    row = arguments.BY_NAME.get(name) or arguments.BY_NAME.get(spelled)
    if row is not None:
        return Meaning(name, Kind.COMPUTES, target, row.neutral[0] if default is None else default)
    kind = Kind.COMPUTES if target or name in declared.arguments() else Kind.UNDECLARED
    return Meaning(name, kind, target, default)


def of_config(config: Values, model_type: str, relations: Sequence[Relation]) -> dict[str, Meaning]:
    """What each field of a ``config.json`` means for Megatron.

    Args:
        config: The description.
        model_type: What transformers calls its class.
        relations: The architecture's ``fields``.
    """
    return {name: _of_field(name, model_type, relations) for name in config}


def _of_field(name: str, model_type: str, relations: Sequence[Relation]) -> Meaning:
    default = declared.config_fields(model_type).get(name, declared.common_fields().get(name))
    related = [relation for relation in relations if name in relation.names]
    target = tuple(dict.fromkeys(argument for relation in related for argument in relation.arguments))
    if related:
        return Meaning(name, _kind_of(target), target, default)
    if name in config_fields.OF_TENSORS:
        return Meaning(name, Kind.COMPUTES, (config_fields.OF_TENSORS[name],), default)
    if name in config_fields.OTHERS:
        return Meaning(name, config_fields.OTHERS[name], (), default)
    declares = name in declared.config_fields(model_type) or name in declared.common_fields()
    return Meaning(name, Kind.COMPUTES if declares else Kind.UNDECLARED, (), default)


def _kind_of(target: tuple[str, ...]) -> Kind:
    """A field is about what all of its arguments are about."""
    kinds = {other_arguments.OTHERS.get(name, Kind.COMPUTES) for name in target}
    return kinds.pop() if len(kinds) == 1 else Kind.COMPUTES


def inexpressible_arguments(args: Values, relations: Sequence[Relation]) -> Iterator[str]:
    """Arguments that change what the model computes, and of which the architecture has no word.

    Args:
        args: Megatron's.
        relations: The architecture's ``fields``.
    """
    related = {name for relation in relations for name in relation.arguments}
    for name, meaning in of_arguments(args, relations).items():
        if meaning.kind is not Kind.COMPUTES or meaning.target or arguments.SPELLED.get(name, name) in related:
            continue
        row = arguments.BY_NAME.get(name)
        if row.matters(args) if row is not None else not equal(args[name], meaning.default):
            yield name


def inexpressible_fields(config: Values, model_type: str, relations: Sequence[Relation]) -> Iterator[str]:
    """Fields that the class declares, of which nobody has said what they are to Megatron, and that are not the default.

    Args:
        config: The description.
        model_type: What transformers calls its class.
        relations: The architecture's ``fields``.
    """
    related = {name for relation in relations for name in relation.names}
    for name, meaning in of_config(config, model_type, relations).items():
        open_question = meaning.kind is Kind.COMPUTES and not meaning.target and name not in related
        if open_question and not equal(config[name], meaning.default):
            yield name


def undeclared(meanings: Iterable[Meaning], ignored: Collection[str] = ()) -> tuple[str, ...]:
    """Names that nobody declares: they are carried, and said."""
    return tuple(m.name for m in meanings if m.kind is Kind.UNDECLARED and m.name not in ignored)
