"""The optimizer of stage 0, which stores no names: numbered states, and masters in lists.

Source: deepspeed 0.19.8, ``runtime/fp16/unfused_optimizer.py``, ``runtime/fp16/fused_optimizer.py`` (``state_dict``),
torch ``optim/optimizer.py`` (``state_dict``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from mcore_rlhf.core.account import same
from mcore_rlhf.core.box import Shape
from mcore_rlhf.core.names import MASTER
from mcore_rlhf.errors import LayoutMismatch, Unsupported
from mcore_rlhf.layouts.zero import FlatGroup
from mcore_rlhf.models.rules import Rules
from mcore_rlhf.storage.ptfile import PtFile, StoredTensor

from .assignment import Slot, assign, check_named
from .catalog import Cut, Place
from .modules import ModuleReading

FUSED = "fp32_groups_flat"
UNFUSED = "fp32_groups"


@dataclass(slots=True)
class PlainReading:
    """The optimizer of stage 0.

    Args:
        fields: What every param group stores, without members.
        members: Names of every param group's parameters.
        places: For every trained parameter, where its states lie.
        scalars: What the optimizer keeps once for each param group's parameters: ``step``.
    """

    fields: list[dict[str, object]] = field(default_factory=list)
    members: list[tuple[str, ...]] = field(default_factory=list)
    places: dict[str, dict[str, Place]] = field(default_factory=dict)
    scalars: list[dict[str, object]] = field(default_factory=list)


def read_plain(pt: PtFile, module: ModuleReading, rules: Rules) -> PlainReading:
    """Read the optimizer in a stage-0 model file.

    Args:
        pt: The file.
        module: The module beside it.
        rules: The user's own: ``wd_mult`` and ``trainable`` decide where shapes do not.

    Raises:
        CheckpointError: Which parameter a state belongs to cannot be told.
    """
    stored: Mapping[str, Any] = pt.tree["optimizer"]
    inner = stored.get("optimizer_state_dict", stored)
    groups = inner.get("param_groups")
    if not isinstance(groups, list) or not isinstance(inner.get("state"), Mapping):
        raise Unsupported(
            f"{pt.directory.path}: 'optimizer' is no state dict of an optimizer: it has {', '.join(map(str, inner))}"
        )
    reading = PlainReading([{k: pt.materialize(v) for k, v in group.items() if k != "params"} for group in groups])
    if FUSED in stored:
        _read_fused(pt, stored[FUSED], inner["state"], module, reading)
    else:
        _read_numbered(pt, groups, stored.get(UNFUSED), inner["state"], module, rules, reading)
    return reading


def _read_numbered(
    pt: PtFile, groups: list[Any], masters: Any, states: Mapping[Any, Any], module: ModuleReading, rules: Rules,
    reading: PlainReading,
) -> None:  # fmt: skip
    stored: list[list[dict[str, Any]]] = []
    for number, group in enumerate(groups):
        stored.append([dict(states.get(index, {})) for index in group["params"]])
        for place, state in enumerate(stored[-1]):
            if masters is not None:
                state[MASTER] = masters[number][place]
    slots = [[Slot(_shape_of(state), state.get(MASTER)) for state in group] for group in stored]
    named = _named(pt, groups)
    if named is not None:
        check_named(pt, slots, named, module)
    reading.members = named or assign(pt, slots, module, reading.fields, rules)
    members = [list(zip(names, states, strict=True)) for names, states in zip(reading.members, stored, strict=True)]
    elementwise = _elementwise([pair for group in members for pair in group], module)
    for group_states in members:
        scalars: dict[str, object] = {}
        for name, state in group_states:
            reading.places.setdefault(name, {}).update((key, state[key]) for key in state if key in elementwise)
            _take_scalars(pt, name, {k: v for k, v in state.items() if k not in elementwise}, scalars)
        reading.scalars.append(scalars)


def _elementwise(states: list[tuple[str, dict[str, Any]]], module: ModuleReading) -> set[str]:
    """States that have a value for every element of every parameter: a scalar is one of a scalar parameter only."""
    keys = dict.fromkeys(key for _, state in states for key in state if key != "step")
    return {
        key
        for key in keys
        if all(getattr(s[key], "shape", None) == module.tensors[name].shape for name, s in states if key in s)
    }


def _named(pt: PtFile, groups: list[Any]) -> list[tuple[str, ...]] | None:
    """The names of every group's parameters where something stores them.

    DeepSpeed does not; torch does for an optimizer that was made with ``named_parameters()``; and this program writes
    ``param_shapes`` at every stage.
    """
    shapes = pt.tree.get("param_shapes")
    if isinstance(shapes, list) and [len(group) for group in shapes] == [len(group["params"]) for group in groups]:
        return [tuple(group) for group in shapes]
    if groups and all(len(group.get("param_names") or ()) == len(group["params"]) > 0 for group in groups):
        return [tuple(group["param_names"]) for group in groups]
    return None


def _shape_of(state: Mapping[str, Any]) -> Shape | None:
    """The shape of the parameter, as its states have it."""
    master = state.get(MASTER)
    if isinstance(master, StoredTensor):
        return master.shape
    shapes = [v.shape for key, v in state.items() if isinstance(v, StoredTensor) and key != "step"]
    return max(shapes, key=len) if shapes else None


def _take_scalars(pt: PtFile, name: str, state: Mapping[str, Any], scalars: dict[str, object]) -> None:
    for key, value in state.items():
        real = pt.materialize(value)
        if not same(scalars.setdefault(key, real), real):
            raise LayoutMismatch(
                f"{pt.directory.path}: {key} of {name} is {_brief(real)}, but {_brief(scalars[key])} for others of its param group\n"
                "ZeRO keeps one per group: a parameter that was added later, or a state that is not elementwise, cannot be carried."
            )


def _brief(value: object) -> str:
    shape = tuple(getattr(value, "shape", ()))
    return f"a tensor of shape {shape}" if shape else repr(value)


def _read_fused(
    pt: PtFile, masters: list[StoredTensor], states: Mapping[Any, Any], module: ModuleReading, reading: PlainReading
) -> None:
    """Flat groups without padding; their parameters are told apart by their dimensions, and counted."""
    reading.members = _flat_members(pt, [master.shape[0] for master in masters], module)
    for number, (names, master) in enumerate(zip(reading.members, masters, strict=True)):
        numels = tuple(prod(module.tensors[name].shape) for name in names)
        geometry = FlatGroup(numels, 1, alignment=1)
        scalars: dict[str, object] = {}
        for key, value in {MASTER: master, **states.get(number, {})}.items():
            if isinstance(value, StoredTensor) and value.shape == master.shape and key != "step":
                for index, name in enumerate(names):
                    reading.places.setdefault(name, {})[key] = Cut(geometry, index, {0: value})
            else:
                scalars[key] = pt.materialize(value)
        reading.scalars.append(scalars)


def _flat_members(pt: PtFile, lengths: list[int], module: ModuleReading) -> list[tuple[str, ...]]:
    named = pt.tree.get("param_shapes")
    if isinstance(named, list) and len(named) == len(lengths):
        return [tuple(group) for group in named]
    numels = {n: prod(t.shape) for n, t in module.tensors.items() if n not in module.buffers and 0 not in t.shape}
    matrices = tuple(name for name in numels if len(module.tensors[name].shape) >= 2)
    vectors = tuple(name for name in numels if len(module.tensors[name].shape) < 2)
    for split in ([tuple(numels)], [matrices, vectors], [vectors, matrices]):
        if [sum(numels[name] for name in names) for names in split] == lengths:
            return split
    raise LayoutMismatch(
        f"{pt.directory.path}: {FUSED} has groups of {lengths} elements, without names; they are neither all parameters, nor "
        "the matrices and the vectors\nLoad it with DeepSpeed at ZeRO stage 1 and save it again."
    )
