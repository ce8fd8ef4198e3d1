"""The optimizer of stage 0, which stores no names: numbered states, and masters in lists.

An optimizer's param groups list the parameters in the module's order, each group some of them. So every group is an
ascending selection of the module's parameters, and what is in none is frozen. The parameters of a state are the only
assignment that keeps order and shapes. Where shapes alone leave a choice, the masters' values decide, and then the user's
rules; where they do not, the file is refused: never a guess.

Source: deepspeed 0.19.8, ``runtime/fp16/unfused_optimizer.py``, ``runtime/fp16/fused_optimizer.py`` (``state_dict``),
torch ``optim/optimizer.py`` (``state_dict``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from mcore_rlhf.core.catalog import FLOATING, MASTER, DType, Shape
from mcore_rlhf.core.facts import same
from mcore_rlhf.errors import LayoutMismatch, Unsupported
from mcore_rlhf.families.module import USE_MUON, is_for_muon
from mcore_rlhf.layouts.zero import FlatGroup
from mcore_rlhf.models.spec import Rules
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.pt import PtFile
from mcore_rlhf.storage.stored import StoredTensor

from .catalog import Partitioned, StoredModule

_MOST_STATES = 20_000
_Positions = tuple[int, ...]
_FROZEN = -1


@dataclass(frozen=True, slots=True)
class NumberedState:
    """A numbered state.

    Args:
        shape: Shape of its tensors, or None where it has none.
        master: The fp32 copy of its parameter, where there is one.
    """

    shape: Shape | None
    master: StoredTensor | None = None


@dataclass(frozen=True, slots=True)
class _Item:
    name: str
    shape: Shape
    groups: frozenset[int]


def assign(
    pt: PtFile,
    slots: Sequence[Sequence[NumberedState]],
    module: StoredModule,
    fields: Sequence[Mapping[str, object]],
    rules: Rules,
) -> list[tuple[str, ...]]:
    """The parameters of every param group.

    Args:
        pt: The file, for values and messages.
        slots: The states of every param group, in order.
        module: The module.
        fields: What every group stores besides its members.
        rules: ``wd_mult`` and ``trainable`` narrow the choice.

    Raises:
        Unsupported: There is no assignment, or more than one.
    """
    items = _items(module, fields, rules)
    keys = [[slot.shape for slot in group] for group in slots]
    found = _search(items, keys, lambda item: item.shape)
    if len(found) > 1 and all(slot.master is not None for group in slots for slot in group):
        found = _search(items, *_by_value(pt, slots, module)) or found
    if len(found) == 1:
        return found[0]
    count = sum(len(group) for group in slots)
    why = (
        "no choice of parameters has these shapes"
        if not found
        else "more than one choice of parameters has these shapes"
    )
    raise Unsupported(
        f"{pt.directory.path}: stage 0 stores no names for its {count} optimizer states, and {why} (the module has {len(items)})\n"
        "Say with --rules which parameters are 'trainable', and their 'wd_mult' (0 for the group without weight decay); or load "
        "it with DeepSpeed at ZeRO stage 1 and save it again."
    )


def check_named(
    pt: PtFile, slots: Sequence[Sequence[NumberedState]], names: Sequence[Sequence[str]], module: StoredModule
) -> None:
    """Whether names that a file gives fit its states.

    Raises:
        LayoutMismatch: The module has no such parameter, or one of another shape.
    """
    for group, listed in zip(slots, names, strict=True):
        for slot, name in zip(group, listed, strict=True):
            shape = module.tensors[name].shape if name in module.tensors else None
            if shape is None or slot.shape not in (shape, None):
                raise LayoutMismatch(
                    f"{pt.directory.path}: the optimizer's state of {name} has shape {slot.shape}, the module's {shape}"
                )


def _items(module: StoredModule, fields: Sequence[Mapping[str, object]], rules: Rules) -> list[_Item]:
    """The parameters in the order in which groups list them, with the groups that each may be in."""
    decays, muon = [group.get("weight_decay") for group in fields], [group.get(USE_MUON) is True for group in fields]
    found = []
    for name, tensor in module.tensors.items():
        if name in module.buffers or tensor.dtype not in FLOATING or 0 in tensor.shape:
            continue
        groups, wd, trainable = set(range(len(decays))), rules.wd_mult(name), rules.trainable(name)
        if wd is not None:
            groups = {g for g in groups if bool(decays[g]) == bool(wd)}
        groups = {g for g in groups if not any(muon) or muon[g] == is_for_muon(name, tensor.shape)}
        allowed = set() if trainable is False else groups
        found.append(_Item(name, tensor.shape, frozenset(allowed | (set() if trainable else {_FROZEN}))))
    if any(muon):  # which sorts its own by size
        own = [item for item in found if is_for_muon(item.name, item.shape)]
        return [*sorted(own, key=lambda item: item.shape, reverse=True), *(item for item in found if item not in own)]
    return found


def _search(
    items: Sequence[_Item], keys: Sequence[Sequence[Hashable]], key_of: Callable[[_Item], Hashable]
) -> list[list[tuple[str, ...]]]:
    """Up to two assignments. Positions in all groups are the state; each has the ways that lead to it, at most two."""
    spare = len(items) - sum(map(len, keys))
    ways: dict[_Positions, list[tuple[int, ...]]] = {(0,) * len(keys): [()]}
    for number, item in enumerate(items):
        after: dict[_Positions, list[tuple[int, ...]]] = {}
        for positions, found in ways.items():
            frozen = number - sum(positions)
            for group in item.groups:
                if group == _FROZEN:
                    if frozen < spare:
                        _extend(after, positions, found, group)
                elif _fits(keys[group], positions[group], key_of(item)):
                    _extend(after, _advanced(positions, group), found, group)
        ways = after
        if len(ways) > _MOST_STATES:
            return [[], []]
    complete = ways.get(tuple(map(len, keys)), [])
    return [_members(items, choice, len(keys)) for choice in complete]


def _fits(slots: Sequence[Hashable], position: int, key: Hashable) -> bool:
    return position < len(slots) and slots[position] in (key, None)


def _advanced(positions: _Positions, group: int) -> _Positions:
    return (*positions[:group], positions[group] + 1, *positions[group + 1 :])


def _extend(
    after: dict[_Positions, list[tuple[int, ...]]], positions: _Positions, found: list[tuple[int, ...]], group: int
) -> None:
    known = after.setdefault(positions, [])
    known += [(*choice, group) for choice in found[: 2 - len(known)]]


def _members(items: Sequence[_Item], choice: Sequence[int], groups: int) -> list[tuple[str, ...]]:
    chosen = list(zip(items, choice, strict=True))
    return [tuple(item.name for item, of in chosen if of == group) for group in range(groups)]


def _by_value(
    pt: PtFile, slots: Sequence[Sequence[NumberedState]], module: StoredModule
) -> tuple[list[list[Hashable]], Callable[[_Item], Hashable]]:
    """Keys with values: a master, rounded, is its parameter bit for bit."""
    import numpy as np  # only stage 0 asks for values

    from mcore_rlhf.core.cast import convert

    dtypes = {tensor.dtype for name, tensor in module.tensors.items() if name not in module.buffers}

    def key(stored: StoredTensor, dtype: DType) -> Hashable:
        words = np.ascontiguousarray(pt.load(stored).words)
        rounded = words if dtype == stored.record.dtype else convert(words, stored.record.dtype, dtype)
        return stored.shape, dtype, crc32(rounded.reshape(-1).view(np.uint8).data)

    def of_item(item: _Item) -> Hashable:
        tensor = module.tensors[item.name]
        stored = tensor.stored[0]
        return key(stored, tensor.dtype) if isinstance(stored, StoredTensor) else None

    half = next((dtype for dtype in dtypes if dtype.itemsize == 2), next(iter(dtypes)))
    keys = [[key(slot.master, half) for slot in group if slot.master is not None] for group in slots]
    return keys, of_item


FUSED = "fp32_groups_flat"
UNFUSED = "fp32_groups"


@dataclass(slots=True)
class Stage0Optimizer:
    """The optimizer of stage 0.

    Args:
        fields: What every param group stores, without members.
        params: Names of every param group's parameters.
        stored: For every trained parameter, where its states lie.
        scalars: What the optimizer keeps once for each param group's parameters: ``step``.
    """

    fields: list[dict[str, object]] = field(default_factory=list)
    params: list[tuple[str, ...]] = field(default_factory=list)
    stored: dict[str, dict[str, StoredTensor | Partitioned]] = field(default_factory=dict)
    scalars: list[dict[str, object]] = field(default_factory=list)


def read_plain(pt: PtFile, module: StoredModule, rules: Rules) -> Stage0Optimizer:
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
    if any(not isinstance(group, Mapping) or not isinstance(group.get("params"), list) for group in groups):
        raise Unsupported(
            f"{pt.directory.path}: expected the numbers of parameters, 'params', in each param group of 'optimizer'"
        )
    optimizer = Stage0Optimizer([{k: pt.materialize(v) for k, v in group.items() if k != "params"} for group in groups])
    if FUSED in stored:
        _read_fused(pt, stored[FUSED], inner["state"], module, optimizer)
        return optimizer
    if inner is not stored and UNFUSED not in stored:
        raise Unsupported(f"{pt.directory.path}: 'optimizer' has neither {FUSED} nor {UNFUSED}, its fp32 masters")
    states = [[dict(inner["state"].get(index, {})) for index in group["params"]] for group in groups]
    if (masters := stored.get(UNFUSED)) is not None:
        if [len(group) for group in masters] != [len(group) for group in states]:
            counts = f"{[len(group) for group in masters]}, but its param groups {[len(group) for group in states]}"
            raise Unsupported(f"{pt.directory.path}: the lists in {UNFUSED} have the lengths {counts}")
        for number, group in enumerate(states):
            for position, state in enumerate(group):
                state[MASTER] = masters[number][position]
    _read_numbered(pt, states, _named(pt, groups), module, rules, optimizer)
    return optimizer


def _read_numbered(
    pt: PtFile,
    stored: list[list[dict[str, Any]]],
    named: list[tuple[str, ...]] | None,
    module: StoredModule,
    rules: Rules,
    optimizer: Stage0Optimizer,
) -> None:
    """Every group's states by position, under the names that something stores or that shapes and values leave."""
    slots = [[NumberedState(_shape_of(state), state.get(MASTER)) for state in group] for group in stored]
    if named is not None:
        check_named(pt, slots, named, module)
    optimizer.params = named or assign(pt, slots, module, optimizer.fields, rules)
    members = [list(zip(names, states, strict=True)) for names, states in zip(optimizer.params, stored, strict=True)]
    elementwise = _elementwise([pair for group in members for pair in group], module)
    for group_states in members:
        scalars: dict[str, object] = {}
        for name, state in group_states:
            optimizer.stored.setdefault(name, {}).update((key, state[key]) for key in state if key in elementwise)
            _take_scalars(pt, name, {k: v for k, v in state.items() if k not in elementwise}, scalars)
        optimizer.scalars.append(scalars)


def _elementwise(states: list[tuple[str, dict[str, Any]]], module: StoredModule) -> set[str]:
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
    pt: PtFile, masters: list[StoredTensor], states: Mapping[Any, Any], module: StoredModule, optimizer: Stage0Optimizer
) -> None:
    """Flat groups without padding; their parameters are told apart by their dimensions, and counted."""
    optimizer.params = _flat_members(pt, [master.shape[0] for master in masters], module)
    for number, (names, master) in enumerate(zip(optimizer.params, masters, strict=True)):
        numels = tuple(prod(module.tensors[name].shape) for name in names)
        geometry = FlatGroup(numels, 1, alignment=1)
        scalars: dict[str, object] = {}
        for key, value in {MASTER: master, **states.get(number, {})}.items():
            if isinstance(value, StoredTensor) and value.shape == master.shape and key != "step":
                for index, name in enumerate(names):
                    optimizer.stored.setdefault(name, {})[key] = Partitioned(geometry, index, {0: value})
            else:
                scalars[key] = pt.materialize(value)
        optimizer.scalars.append(scalars)


def _flat_members(pt: PtFile, lengths: list[int], module: StoredModule) -> list[tuple[str, ...]]:
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
