"""Which parameter a numbered optimizer state of stage 0 belongs to: the only assignment that keeps order and shapes.

An optimizer's param groups list the parameters in the module's order, each group some of them. So every group is an
ascending selection of the module's parameters, and what is in none is frozen. Where shapes alone leave a choice, the masters'
values decide, and then the user's rules; where they do not, the file is refused: never a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from mcore_rlhf.core.box import Shape
from mcore_rlhf.core.dtype import FLOATING, DType
from mcore_rlhf.errors import LayoutMismatch, Unsupported
from mcore_rlhf.families.module import USE_MUON
from mcore_rlhf.models.rules import Rules
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.ptfile import PtFile, StoredTensor

from .modules import ModuleReading

_MOST_STATES = 20_000
_Places = tuple[int, ...]
_FROZEN = -1


@dataclass(frozen=True, slots=True)
class Slot:
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
    slots: Sequence[Sequence[Slot]],
    module: ModuleReading,
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
    pt: PtFile, slots: Sequence[Sequence[Slot]], names: Sequence[Sequence[str]], module: ModuleReading
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


def _items(module: ModuleReading, fields: Sequence[Mapping[str, object]], rules: Rules) -> list[_Item]:
    """The parameters in the order in which groups list them, with the groups that each may be in."""
    decays, muon = [group.get("weight_decay") for group in fields], [group.get(USE_MUON) is True for group in fields]
    found = []
    for name, tensor in module.tensors.items():
        if name in module.buffers or tensor.dtype not in FLOATING or 0 in tensor.shape:
            continue
        groups, wd, trainable = set(range(len(decays))), rules.wd_mult(name), rules.trainable(name)
        if wd is not None:
            groups = {g for g in groups if bool(decays[g]) == bool(wd)}
        groups = {g for g in groups if not any(muon) or muon[g] == _is_for_muon(name, tensor.shape)}
        allowed = set() if trainable is False else groups
        found.append(_Item(name, tensor.shape, frozenset(allowed | (set() if trainable else {_FROZEN}))))
    if any(muon):  # which sorts its own by size
        own = [item for item in found if _is_for_muon(item.name, item.shape)]
        return [*sorted(own, key=lambda item: item.shape, reverse=True), *(item for item in found if item not in own)]
    return found


def _is_for_muon(name: str, shape: Shape) -> bool:
    """Source: deepspeed 0.19.8, ``__init__.py`` (``set_optimizer_flags``), ``runtime/zero/muon/original_muon.py``."""
    return len(shape) >= 2 and not any(word in name.lower() for word in ("embed", "lm_head"))


def _search(
    items: Sequence[_Item], keys: Sequence[Sequence[Hashable]], key_of: Callable[[_Item], Hashable]
) -> list[list[tuple[str, ...]]]:
    """Up to two assignments. Positions in all groups are the state; each has the ways that lead to it, at most two."""
    spare = len(items) - sum(map(len, keys))
    ways: dict[_Places, list[tuple[int, ...]]] = {(0,) * len(keys): [()]}
    for number, item in enumerate(items):
        after: dict[_Places, list[tuple[int, ...]]] = {}
        for places, found in ways.items():
            frozen = number - sum(places)
            for group in item.groups:
                if group == _FROZEN:
                    if frozen < spare:
                        _extend(after, places, found, group)
                elif _fits(keys[group], places[group], key_of(item)):
                    _extend(after, _advanced(places, group), found, group)
        ways = after
        if len(ways) > _MOST_STATES:
            return [[], []]
    complete = ways.get(tuple(map(len, keys)), [])
    return [_members(items, choice, len(keys)) for choice in complete]


def _fits(slots: Sequence[Hashable], place: int, key: Hashable) -> bool:
    return place < len(slots) and slots[place] in (key, None)


def _advanced(places: _Places, group: int) -> _Places:
    return (*places[:group], places[group] + 1, *places[group + 1 :])


def _extend(
    after: dict[_Places, list[tuple[int, ...]]], places: _Places, found: list[tuple[int, ...]], group: int
) -> None:
    known = after.setdefault(places, [])
    known += [(*choice, group) for choice in found[: 2 - len(known)]]


def _members(items: Sequence[_Item], choice: Sequence[int], groups: int) -> list[tuple[str, ...]]:
    chosen = list(zip(items, choice, strict=True))
    return [tuple(item.name for item, of in chosen if of == group) for group in range(groups)]


def _by_value(
    pt: PtFile, slots: Sequence[Sequence[Slot]], module: ModuleReading
) -> tuple[list[list[Hashable]], Callable[[_Item], Hashable]]:
    """Keys with values: a master, rounded, is its parameter bit for bit."""
    dtypes = {tensor.dtype for name, tensor in module.tensors.items() if name not in module.buffers}

    def key(stored: StoredTensor, dtype: DType) -> Hashable:
        import torch

        words = pt.load(stored).to(getattr(torch, dtype.name)).contiguous().view(-1).view(torch.uint8)
        return stored.shape, dtype, crc32(words.numpy().data)

    def of_item(item: _Item) -> Hashable:
        tensor = module.tensors[item.name]
        stored = tensor.places[0]
        return key(stored, tensor.dtype) if isinstance(stored, StoredTensor) else None

    half = next((dtype for dtype in dtypes if dtype.itemsize == 2), next(iter(dtypes)))
    keys = [[key(slot.master, half) for slot in group if slot.master is not None] for group in slots]
    return keys, of_item
