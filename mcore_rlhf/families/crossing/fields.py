"""What one family's description of a model says, and the other's has no words for: it is carried, passed over, and said.

A ``config.json`` goes along as a file (:mod:`mcore_rlhf.formats.carried`) and keeps there what fine-tuners add. Arguments that
no Megatron declares wait in ``config.json``, under a name of ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mcore_rlhf.core.account import Fate, Item, Reason, Report
from mcore_rlhf.core.account import Kind as Of
from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.families.origin import ORIGIN, plain
from mcore_rlhf.models.huggingface.table import Architecture
from mcore_rlhf.models.meaning import Kind
from mcore_rlhf.models.meaning.arguments import modern
from mcore_rlhf.models.meaning.declared import complete
from mcore_rlhf.models.meaning.kinds import equal
from mcore_rlhf.models.meaning.lookup import of_arguments, of_config, undeclared

_SHOWN = 8
_IMPLIED = "the architecture implies it"
Values = Mapping[str, object]


def carried_args(config: Values) -> dict[str, object]:
    """The arguments that wait in a ``config.json``; empty where there are none."""
    waiting = config.get(ORIGIN)
    found = waiting.get("args") if isinstance(waiting, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def waiting_args(args: Values, known: Architecture, ignored: Sequence[str], notes: Report) -> dict[str, object]:
    """What a ``config.json`` gets of arguments: those that nobody declares.

    Args:
        args: Megatron's.
        known: The architecture that they become.
        ignored: Those that are passed over.
        notes: Told which.
    """
    names = [name for name in undeclared(of_arguments(args, known.fields).values(), ignored) if name != ORIGIN]
    kept = plain({name: args[name] for name in names})
    _note("arguments", list(kept), f"in config.json, under {ORIGIN}", notes)
    lost = [name for name in names if name not in kept]
    if lost:
        notes.add(Fate.LOST, f"arguments that nobody declares, and that no JSON can hold: {_listed(lost)}")
    return {ORIGIN: {"args": kept}} if kept else {}


def note_fields(config: Values, known: Architecture, ignored: Sequence[str], notes: Report) -> None:
    """Say which fields of a ``config.json`` nobody declares: they go along in the file itself."""
    meanings = of_config(config, known.model_type, known.fields).values()
    _note("fields of config.json", undeclared(meanings, ignored), "in the file that goes along", notes)


def _note(what: str, names: Sequence[str], where: str, notes: Report) -> None:
    if names:
        notes.add(Fate.KEPT, f"{what} that nobody declares: {_listed(names)}: {where}")


def _listed(names: Sequence[str]) -> str:
    more = f", … ({len(names)})" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def note_ignored(ignored: Sequence[str], values: Values, notes: Report) -> None:
    """Say what was passed over because the user said so.

    Args:
        ignored: Names that the user gave.
        values: The source's arguments, or its ``config.json``.
        notes: Told what each was.
    """
    there = dict(values)
    for name in ("rope_scaling", "rope_parameters"):
        inside = values.get(name)
        there.update(inside if isinstance(inside, Mapping) else {})
    for name in ignored:
        if name in there:
            text = f"{name} {there[name]!r}: passed over, as --ignore-field asks"
            notes.add(Fate.LOST, text, Item(Of.ARGUMENT, name), Item(Of.CONFIG, name))
        else:
            notes.add(Fate.NOTE, f"--ignore-field {name}: the source has nothing of that name")


def arguments_to_config(args: Values, known: Architecture, config: Values, notes: Report) -> dict[Item, Item]:
    """Where each of Megatron's arguments is after a crossing: in the ``config.json``, or in what waits for the way back.

    Args:
        args: Megatron's.
        known: The architecture that they become.
        config: The ``config.json`` that was made of them.
        notes: Told of those that are nowhere.
    """
    kept, moved = plain(args), dict[Item, Item]()
    for name, meaning in of_arguments(args, known.fields).items():
        item, spelled = Item(Of.ARGUMENT, name), next((n for n in meaning.target if n in config), None)
        if spelled is not None:
            moved[item] = Item(Of.CONFIG, spelled)
        elif name in carried_args(config):
            moved[item] = Item(Of.CONFIG, ORIGIN)
        elif meaning.kind is Kind.COMPUTES:
            notes.settle(Fate.DERIVED, _IMPLIED, item)
        elif name in kept:
            moved[item] = Item(Of.VALUE, ORIGIN)
        else:
            notes.leave(Reason.OF_ENGINE, item)
    return moved


def config_to_arguments(
    config: Values, known: Architecture, args: Values, notes: Report, *, carried: bool
) -> dict[Item, Item]:
    """Where each field of a ``config.json`` is after a crossing: in Megatron's arguments, or in the file that goes along.

    Args:
        config: The description.
        known: Its architecture.
        args: The arguments that were made of it.
        notes: Told of those that are nowhere.
        carried: Whether the file goes along.
    """
    moved = dict[Item, Item]()
    for name, meaning in of_config(config, known.model_type, known.fields).items():
        item, spelled = Item(Of.CONFIG, name), next((n for n in meaning.target if n in args), None)
        if spelled is not None:
            moved[item] = Item(Of.ARGUMENT, spelled)
        elif carried:
            notes.settle(Fate.KEPT, "in config.json, which goes along", item)
        elif meaning.kind is Kind.COMPUTES:
            notes.settle(Fate.DERIVED, _IMPLIED, item)
        elif meaning.kind is Kind.UNDECLARED:
            notes.add(Fate.LOST, f"{name}: a field of the model's description that nobody declares", item)
        else:
            notes.leave(Reason.OF_ENGINE, item)
    return moved


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that Megatron's arguments say otherwise than a ``config.json`` for the same model.

    Args:
        names: Fields of the ``config.json``.
        argument: Megatron's argument.
        said: Its value.
        other: What it would be of the ``config.json``.
    """

    names: tuple[str, ...]
    argument: str
    said: object
    other: object


def differences(args: Values, config: Values, known: Architecture) -> Iterator[Difference]:
    """What arguments say otherwise than a ``config.json``.

    Args:
        args: Megatron's; what is not there says nothing.
        config: For the same model.
        known: Its architecture.
    """
    args = modern(args)
    meanings = of_arguments(args, known.fields)
    described = complete(config, known.model_type)
    for field in known.fields:
        try:
            said = field.args(described)
        except CheckpointError:  # Megatron cannot say it, so that its arguments are another model's
            said = dict.fromkeys(field.arguments)
        for name, value in said.items():
            computes = name in args and meanings[name].kind is Kind.COMPUTES
            if computes and not equal(args[name], value):
                yield Difference(field.names, name, args[name], value)


def kept_spelling(carried: Values, made: Values, args: Values, known: Architecture, notes: Report) -> dict[str, object]:
    """A ``config.json`` that travelled with a checkpoint, where it says what the arguments say; what they make, otherwise.

    Args:
        carried: The one that travelled.
        made: What the arguments make.
        args: Megatron's.
        known: The architecture of both.
        notes: Told what is another by now.
    """
    config, dropped = dict(carried), dict[str, None]()
    for found in differences(args, carried, known):
        dropped.update(dict.fromkeys(found.names))
        text = f"args: {found.argument} is {found.said!r}, and was {found.other!r} in the config.json that travelled with it"
        notes.add(Fate.CHANGED, text)
    for name in dropped:
        config.pop(name, None)
        if name in made:
            config[name] = made[name]
    return config
