"""Putting a stored optimizer into a sharded one: every state in the type in which it was saved, every param group its own settings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from mcore_rlhf.core.names import PARAM
from mcore_rlhf.errors import LayoutMismatch, Problems
from mcore_rlhf.families.source import ParamGroup

from ..optimizer_load import install_state
from ..optimizer_match import needed_keys, unlike
from ..param_groups import matched_groups
from ..undoing import Undo
from ..writable import not_writable
from .geometry import FlatSplit
from .held import Held
from .optimizers import HeldOptimizer
from .through_plan import Planned, Slot

_ADVICE = "Build the optimizer as it was saved, or load the weights alone: load(optimizer=False)."
_CARRIED = frozenset({"initial_lr"})
"""What schedulers put into a group: taken from every format, whether the live group has it yet or not."""

ParamValues = Mapping[str, Mapping[str, object]]


@dataclass(slots=True)
class ShardedOptimizerLoad:
    """A load of an optimizer in steps, of which only the last cannot be taken back.

    Args:
        held: The live optimizer.
        planned: The load.
        groups: For every live param group, the stored one.
        values: What is stored once per parameter where it differs within a group: stored name → key → value.
    """

    held: HeldOptimizer
    planned: Planned
    groups: Sequence[ParamGroup]
    values: ParamValues = field(default_factory=dict)
    memory: dict[str, torch.Tensor] = field(default_factory=dict)
    _state: defaultdict[object, object] = field(default_factory=lambda: defaultdict(dict))
    _fields: list[dict[str, object]] = field(default_factory=list)
    _slots: dict[str, list[Slot]] = field(default_factory=dict)

    @classmethod
    def of(cls, held: HeldOptimizer, planned: Planned, values: ParamValues, problems: Problems) -> ShardedOptimizerLoad:
        """Match groups and states.

        Args:
            held: The live optimizer.
            planned: The load.
            values: See the class.
            problems: Takes every difference.
        """
        names = [[planned.stored_as[param.name] for param in params] for _, params in held.groups]
        stored = planned.source.state.groups
        found = cls(held, planned, matched_groups(names, stored, problems), values)
        for slot in planned.slots:
            if slot.state != PARAM:
                found._slots.setdefault(slot.held.name, []).append(slot)
        found._check(problems)
        return found

    def _check(self, problems: Problems) -> None:
        """Whether the stored states are those of this optimizer."""
        kept = {slot.state for slots in self._slots.values() for slot in slots}
        scalars = {key for group in self.groups for key in group.scalars}
        missing = [key for key in needed_keys(self.held.optimizer) if key not in kept | scalars]
        kind = type(self.held.optimizer).__qualname__
        if kept and missing:
            text = (
                f"the run's {kind} needs {', '.join(missing)}, the checkpoint has {', '.join(sorted(kept | scalars))}"
            )
            problems.add(LayoutMismatch, f"{self.planned.source.root}: {text}", _ADVICE)
        live = {state.key for state in self.held.states if state.wide}
        if live and kept and live != kept:
            text = f"this run keeps {', '.join(sorted(live))}, the checkpoint has {', '.join(sorted(kept))}"
            problems.add(LayoutMismatch, f"optimizer states: {text}", _ADVICE)
        if self._torchs and len(self.groups) == len(self.held.groups):
            for number, (group, (fields, _)) in enumerate(zip(self.groups, self.held.groups, strict=True)):
                if said := unlike(self.held.optimizer, fields, group.fields):
                    text = f"the optimizer is of another class than the run's {kind}: group {number} {said}"
                    problems.add(LayoutMismatch, f"{self.planned.source.root}: {text}", _ADVICE)

    @property
    def _torchs(self) -> bool:
        """Whether the fields of groups are those of torch's own optimizers."""
        return self.planned.source.format == "dcp"

    def read(self) -> None:
        """Make groups and states anew, of live tensors that will be filled and of new ones; nothing live changes."""
        self._state, self._fields, self.memory, first = defaultdict(dict), [], {}, 0
        for group, (live, params) in zip(self.groups, self.held.groups, strict=True):
            fields = self._group(group, live)
            self._fields.append({**fields, "params": list(range(first, first + len(params)))})
            first += len(params)
            for param in params:
                self._add(param, group, fields)

    def _group(self, stored: ParamGroup, live: Mapping[str, object]) -> dict[str, object]:
        fields: dict[str, object] = dict(live)
        for key, value in stored.fields.items():
            if key not in stored.scalars and (self._torchs or key in live or key in _CARRIED):
                fields[key] = _moved(value, live.get(key))
        return fields

    def _add(self, param: Held, group: ParamGroup, fields: Mapping[str, object]) -> None:
        slots = self._slots.get(param.name, [])
        elsewhere = isinstance(param.split, FlatSplit) and not param.local.numel()
        if not slots or elsewhere:
            return
        live = self.held.optimizer.state.get(param.whole, {})
        state: dict[str, object] = {}
        own = self.values.get(self.planned.stored_as[param.name], {})
        for key in group.scalars:
            state[key] = self._scalar(param, own.get(key, group.fields[key]), live.get(key), fields)
        for slot in slots:
            tensor = _kept_or_new(param, slot, live.get(slot.state))
            state[slot.state], self.memory[slot.record.key] = tensor, _local(tensor)
        self._state[param.whole] = state

    def _scalar(self, param: Held, value: object, live: object, fields: Mapping[str, object]) -> object:
        """A number of its own for each parameter, since optimizers count in place, where torch puts it.

        Source: torch 2.13.0, ``optim/optimizer.py`` (``_process_value_according_to_param_policy``, special device hosting).
        """
        on_device = bool(fields.get("capturable") or fields.get("fused"))
        device = param.local.device if on_device else torch.device("cpu")
        if isinstance(value, torch.Tensor):
            return value.detach().clone().to(device)
        wanted = isinstance(live, torch.Tensor) or (live is None and bool(needed_keys(self.held.optimizer)))
        if wanted and isinstance(value, int | float):
            dtype = live.dtype if isinstance(live, torch.Tensor) else torch.float32
            return torch.tensor(float(value), dtype=dtype, device=device)
        return value

    def install(self, undo: Undo) -> None:
        """Hand the optimizer its groups and states, and say how that is undone."""
        install_state(self.held.optimizer, self._state, self._fields, undo)


def _kept_or_new(param: Held, slot: Slot, live: object) -> torch.Tensor:
    """The live state where it is of the stored type, and a new one otherwise."""
    dtype = getattr(torch, slot.record.dtype.name)
    if isinstance(live, torch.Tensor) and live.dtype == dtype:
        local = _local(live)
        if local.shape == param.local.shape and local.is_contiguous() and not not_writable(local):
            return live
    like = param.whole if isinstance(param.whole, DTensor) else param.local
    return torch.zeros_like(like.detach(), dtype=dtype)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _moved(value: object, live: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.to(live.device) if isinstance(live, torch.Tensor) else value
    return value
