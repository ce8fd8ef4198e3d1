"""The inventory of an opened source: everything in it, item by item, with its value; see :mod:`mcore_rlhf.core.account`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mcore_rlhf.core.account import Fate, Item, Kind, Report

from .source import Source, TrainingState

_RNG = (
    "rng",
    "rng_state",
    "random_rng_state",
    "np_rng_state",
    "torch_rng_state",
    "cuda_rng_state",
    "rng_tracker_states",
)
"""Keys of random states, at the top of Megatron's files and of RLinf's DCP folders."""


OF_OPTIMIZER = (Item(Kind.GROUP), Item(Kind.OPTIMIZER), Item(Kind.SCALER), Item(Kind.TENSOR))
"""Everything that an optimizer has, for who leaves it out."""
OPAQUE = Item(Kind.MODEL, "values that are no parameters")
"""What a state dict has under a parameter's name though it is no tensor: ``_extra_state``."""
ELEMENTS = Item(Kind.TENSOR, "elements")
"""All elements of the tensors that are planned: who cuts rows says so."""
LEFT_OUT = "the optimizer: left out, as --no-optimizer asks"


def inventory_of(source: Source) -> dict[Item, object]:
    """Everything that a source has but for its tensors, which are accounted by the plan.

    Args:
        source: An opened checkpoint, or one that is seen under another family's names.
    """
    return {**source.family.inventory(), **dict(state_items(source.state))}


def state_items(state: TrainingState) -> Iterator[tuple[Item, object]]:
    """The items of a training state: every argument, every field of the param groups, every key."""
    yield Item(Kind.VALUE, "iteration"), state.iteration
    yield from ((Item(Kind.ARGUMENT, name), value) for name, value in state.args.items())
    for name in dict.fromkeys(name for group in state.groups for name in group.fields):
        yield Item(Kind.GROUP, name), tuple(group.fields.get(name) for group in state.groups)
    yield from _keyed(Kind.SCHEDULER, state.scheduler)
    yield from _keyed(Kind.SCALER, state.grad_scaler)
    yield from value_items(state.other)


def value_items(values: Mapping[str, object]) -> Iterator[tuple[Item, object]]:
    """Further values by key; random states are a kind of their own."""
    for key, value in values.items():
        yield Item(Kind.RNG if key in _RNG else Kind.VALUE, str(key)), value


def state_dict_of(stored: object, key: str, notes: Report) -> Mapping[str, object] | None:
    """A scheduler's state dict; anything else in its place is lost, since no format has a place for it, and is said.

    Args:
        stored: What the files have.
        key: Under which key.
        notes: Told of a loss.
    """
    if isinstance(stored, Mapping):
        return stored
    if stored is not None:
        notes.add(Fate.LOST, f"{key}: a {type(stored).__name__}, where a scheduler's state dict is expected")
    return None


def _keyed(kind: Kind, value: object) -> Iterator[tuple[Item, object]]:
    """A state dict by key, anything else as a whole."""
    if isinstance(value, Mapping):
        yield from ((Item(kind, str(key)), item) for key, item in value.items())
    elif value is not None:
        yield Item(kind, "state"), value
