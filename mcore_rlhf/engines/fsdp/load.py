"""Loading into sharded parts: this rank's as slots, any checkpoint of however many ranks as their source, and what torch's code takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch.distributed.tensor import DTensor

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import MASTER, PARAM, Chunk, DType, TensorEntry, TensorName, dtype_of, row_major
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.core.plan import FilePlan
from mcore_rlhf.errors import LayoutMismatch, Problems
from mcore_rlhf.families.fsdp.state import SCHEDULER, SCHEDULERS, VERSION
from mcore_rlhf.families.source import ParamGroup, Source
from mcore_rlhf.formats.dcp import FORMAT
from mcore_rlhf.formats.dcp.state import DcpState
from mcore_rlhf.storage.paths import ReadablePath

from ..load import Load, Slot, Slots, naming, planned
from ..module_source import LiveParam, ModuleSource, matched_groups
from ..optimizers import install_state, needed_keys, unlike
from ..stateful import Stateful, Undo, copied, not_writable
from .geometry import FlatSplit
from .model import LocalShard, ShardedModule, ShardedOptimizer

_ADVICE = "Build the optimizer as it was saved, or load the weights alone: load(optimizer=False)."
_CARRIED = frozenset({"initial_lr"})
"""What schedulers put into a group: taken from every format, whether the live group has it yet or not."""

ParamValues = Mapping[str, Mapping[str, object]]


@dataclass(slots=True)
class Matching:
    """A checkpoint, matched with this rank's parts.

    Args:
        stored: The checkpoint, of the module family, and what it calls the live tensors.
        module: The live module's tensors.
        optimizer: The live optimizer; None to load weights alone.
        rank: This global rank.
        ranks: All that the model is dealt out to.
    """

    stored: ModuleSource
    module: ShardedModule
    optimizer: ShardedOptimizer | None
    rank: int
    ranks: tuple[int, ...]
    slots: Slots[LocalShard] = field(default_factory=Slots)

    @classmethod
    def of(
        cls,
        source: Source,
        module: ShardedModule,
        optimizer: ShardedOptimizer | None,
        rank: int,
        ranks: tuple[int, ...],
    ) -> Matching:
        """Take a checkpoint up.

        Raises:
            Unsupported: It is of another family.
        """
        live = [
            LiveParam(one.name, one.split.global_shape, dtype_of(one.local.dtype), one.trained)
            for one in module.tensors
        ]
        stored = ModuleSource.of(source, live, module.shared, "an FSDP model")
        return cls(stored, module, optimizer if source.optimizer is not None else None, rank, ranks)

    def load(self, opened: Sequence[ReadablePath], *, wanted: bool) -> Load[LocalShard]:
        """Plan the load; what does not fit is noted in the plan's problems.

        Args:
            opened: Files that were read already.
            wanted: Whether an optimizer was asked for.
        """
        stored, source = self.stored, self.stored.source
        settled = settled_lines(source)
        stored.report.extend((fate, text) for fate, text in source.notes.lines if text not in settled)
        missing, view = stored.compare(), stored.view()
        for one in self.module.tensors:
            if one.name not in missing:
                self.slots.add(one, PARAM, dtype_of(one.local.dtype), one.local.numel(), partial(_part, one))
        for param in (param for _, params in (self.optimizer.groups if self.optimizer else ()) for param in params):
            self._add_states(param, view)
        plan = planned(self.slots.found, self._holds, view, stored.problems)
        self._note(stored.report, plan, wanted=wanted)
        return Load.of(source, self.slots.found, plan, stored.report, opened)

    def _holds(self, slot: Slot[LocalShard]) -> Iterator[TensorEntry]:
        """The logical tensor, with this rank's parts as chunks of the live memory."""
        chunks, at, split = [], 0, slot.owner.split
        for box in split.boxes(self.rank):
            chunks.append(Chunk(box, slot.record, at, row_major(box.shape)))
            at += box.numel
        name = TensorName(self.stored.source.role, self.stored.stored_as(slot.owner.name), slot.state)
        yield slot.entry(name, split.global_shape, chunks)

    def _add_states(self, param: LocalShard, view: Chunks) -> None:
        """Every state that the checkpoint has of a parameter; one that never got a gradient has none."""
        source, optimizer = self.stored.source, self.optimizer
        assert optimizer is not None
        name = TensorName(source.role, self.stored.stored_as(param.name))
        for state in source.states:
            dtype = view.dtype(name._replace(state=state)) if state != MASTER else None
            if dtype is not None:
                memory = partial(_state_part, optimizer.optimizer, param, state)
                self.slots.add(param, state, self._dtype(param, name, dtype), param.local.numel(), memory)

    def _dtype(self, param: LocalShard, name: TensorName, dtype: DType) -> DType:
        """A state keeps the type in which it was stored, unless what it belongs to is of another here, or is a master beside a
        parameter, which no optimizer of torch's has.
        """
        live, catalog = dtype_of(param.local.dtype), self.stored.source.catalog
        kept = [one for state in (PARAM, MASTER) if (one := catalog.dtype(name._replace(state=state))) is not None]
        return dtype if kept == [live] else live

    def _note(self, report: Report, plan: FilePlan, *, wanted: bool) -> None:
        source, ranks, restored = self.stored.source, len(self.ranks), self.optimizer is not None
        if (source.format, source.parallel.dp) != (FORMAT.name, ranks):
            report.add(Fate.CHANGED, f"layout: {source.format} on DP {source.parallel.dp} → FSDP on {ranks} ranks")
        report.add(Fate.KEPT, "weights, optimizer states and param groups" if restored else "weights")
        if wanted and not restored:
            report.add(Fate.LOST, "optimizer: not in the checkpoint; this run's is left as it is")
        if not plan.lossless:
            report.add(Fate.DERIVED, "tensors: converted to this run's element types")


def _part(one: LocalShard) -> torch.Tensor:
    return one.local


def _state_part(optimizer: torch.optim.Optimizer, param: LocalShard, state: str) -> torch.Tensor:
    tensor: torch.Tensor = optimizer.state[param.whole][state]
    return _local(tensor)


@dataclass(slots=True)
class FsdpHooks:
    """What torch's code takes in a load.

    Args:
        root: The checkpoint, for messages.
        optimizer: The optimizer's part, or None.
        handed: What others' code takes back: a scheduler with its state.
        extra: Modules that have an extra state, with the stored one.
        done: Called when the live model is the loaded one.
    """

    root: ReadablePath
    optimizer: ShardedOptimizerLoad | None
    handed: Sequence[tuple[Stateful, dict[str, object]]]
    extra: Sequence[tuple[torch.nn.Module, object]]
    done: Callable[[], None]

    def check(self, problems: Problems) -> None:
        """Match param groups and states."""
        if self.optimizer is not None:
            self.optimizer.check(problems)

    def install(self, undo: Undo) -> None:
        """Hand over the optimizer's groups and states, the schedules, extra states."""
        if self.optimizer is not None:
            with naming("optimizer", self.root):
                self.optimizer.install(undo)
        for scheduler, state in self.handed:
            with naming("lr_scheduler", self.root):
                undo.handed(scheduler, state)
        for module, value in self.extra:
            with naming(f"the extra state of {type(module).__name__}", self.root):
                undo.note(partial(module.set_extra_state, copied(module.get_extra_state())))
                module.set_extra_state(value)

    def fill(self, copy: Callable[[], None]) -> None:
        """All in place; nothing is derived."""
        copy()
        self.done()


@dataclass(slots=True)
class ShardedOptimizerLoad:
    """A stored optimizer on its way into a sharded one: every state in the type in which it was saved, every param group its own
    settings.

    Args:
        sharded: The live optimizer.
        stored: The checkpoint.
        slots: What is filled.
        values: What is stored once per parameter where it differs within a group: stored name → key → value.
    """

    sharded: ShardedOptimizer
    stored: ModuleSource
    slots: Mapping[str, Sequence[Slot[LocalShard]]]
    values: ParamValues = field(default_factory=dict)
    _groups: Sequence[ParamGroup] = ()

    @classmethod
    def of(cls, matching: Matching, load: Load[LocalShard]) -> ShardedOptimizerLoad | None:
        """The optimizer's part of a load; None where it has none."""
        slots: dict[str, list[Slot[LocalShard]]] = {}
        for slot in load.slots:
            if slot.state != PARAM:
                slots.setdefault(slot.owner.name, []).append(slot)
        optimizer, stored = matching.optimizer, matching.stored
        return None if optimizer is None else cls(optimizer, stored, slots, values_of(stored.source))

    def check(self, problems: Problems) -> None:
        """Match param groups, and see whether the stored states are those of this optimizer."""
        names = [[self.stored.stored_as(param.name) for param in params] for _, params in self.sharded.groups]
        source, optimizer = self.stored.source, self.sharded.optimizer
        self._groups = matched_groups(names, source.state.groups, problems)
        kept = {slot.state for slots in self.slots.values() for slot in slots}
        scalars = {key for group in self._groups for key in group.scalars}
        missing = [key for key in needed_keys(optimizer) if key not in kept | scalars]
        kind = type(optimizer).__qualname__
        if kept and missing:
            text = (
                f"the run's {kind} needs {', '.join(missing)}, the checkpoint has {', '.join(sorted(kept | scalars))}"
            )
            problems.add(LayoutMismatch, f"{source.root}: {text}", _ADVICE)
        live = {state.key for state in self.sharded.states if state.elementwise}
        if live and kept and live != kept:
            text = f"this run keeps {', '.join(sorted(live))}, the checkpoint has {', '.join(sorted(kept))}"
            problems.add(LayoutMismatch, f"optimizer states: {text}", _ADVICE)
        if self._torchs and len(self._groups) == len(self.sharded.groups):
            for number, (group, (fields, _)) in enumerate(zip(self._groups, self.sharded.groups, strict=True)):
                if said := unlike(optimizer, fields, group.fields):
                    text = f"the optimizer is of another class than the run's {kind}: group {number} {said}"
                    problems.add(LayoutMismatch, f"{source.root}: {text}", _ADVICE)

    @property
    def _torchs(self) -> bool:
        """Whether the fields of groups are those of torch's own optimizers."""
        return self.stored.source.format == FORMAT.name

    def install(self, undo: Undo) -> None:
        """Make groups and states anew, of live tensors that will be filled and of new ones, and hand them over."""
        state: defaultdict[object, object] = defaultdict(dict)
        groups: list[dict[str, object]] = []
        first = 0
        for group, (live, params) in zip(self._groups, self.sharded.groups, strict=True):
            fields = self._group(group, live)
            groups.append({**fields, "params": list(range(first, first + len(params)))})
            first += len(params)
            for param in params:
                slots = self.slots.get(param.name, ())
                if slots and not (isinstance(param.split, FlatSplit) and not param.local.numel()):
                    state[param.whole] = self._state(param, slots, group, fields)
        install_state(self.sharded.optimizer, state, groups, undo)

    def _group(self, stored: ParamGroup, live: Mapping[str, object]) -> dict[str, object]:
        fields: dict[str, object] = dict(live)
        for key, value in stored.fields.items():
            if key not in stored.scalars and (self._torchs or key in live or key in _CARRIED):
                fields[key] = _moved(value, live.get(key))
        return fields

    def _state(
        self, param: LocalShard, slots: Sequence[Slot[LocalShard]], group: ParamGroup, fields: Mapping[str, object]
    ) -> dict[str, object]:
        live, own = (
            self.sharded.optimizer.state.get(param.whole, {}),
            self.values.get(self.stored.stored_as(param.name), {}),
        )
        state: dict[str, object] = {}
        for key in group.scalars:
            state[key] = self._scalar(param, own.get(key, group.fields[key]), live.get(key), fields)
        return state | {slot.state: _kept_or_new(param, slot, live.get(slot.state)) for slot in slots}

    def _scalar(self, param: LocalShard, value: object, live: object, fields: Mapping[str, object]) -> object:
        """A number of its own for each parameter, since optimizers count in place, where torch puts it.

        Source: torch 2.13.0, ``optim/optimizer.py`` (``_process_value_according_to_param_policy``, special device hosting).
        """
        on_device = bool(fields.get("capturable") or fields.get("fused"))
        device = param.local.device if on_device else torch.device("cpu")
        if isinstance(value, torch.Tensor):
            return value.detach().clone().to(device)
        wanted = isinstance(live, torch.Tensor) or (live is None and bool(needed_keys(self.sharded.optimizer)))
        if wanted and isinstance(value, int | float):
            dtype = live.dtype if isinstance(live, torch.Tensor) else torch.float32
            return torch.tensor(float(value), dtype=dtype, device=device)
        return value


def _kept_or_new(param: LocalShard, slot: Slot[LocalShard], live: object) -> torch.Tensor:
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


_OWN = frozenset({SCHEDULER, SCHEDULERS, VERSION})


def schedules_of(source: Source) -> list[dict[str, object]]:
    """The state of every learning-rate schedule, in the order in which they were given to the engine."""
    own = DcpState.of(source)
    listed = own.rest.get(SCHEDULERS) if own else None
    if isinstance(listed, list) and all(isinstance(state, dict) for state in listed):
        return cast("list[dict[str, object]]", listed)
    return [source.state.scheduler] if source.state.scheduler else []


def values_of(source: Source) -> Mapping[str, Mapping[str, object]]:
    """What is stored once per parameter and is no tensor of its shape: parameter → key → value, such as ``step``."""
    own = DcpState.of(source)
    return own.scalars if own else {}


def settled_lines(source: Source) -> frozenset[str]:
    """Lines of the report that do not hold here: of steps that differ within a group, which others have one place for."""
    own = DcpState.of(source)
    return frozenset(own.differing if own else ())


def others_of(source: Source) -> dict[str, object]:
    """What the training script gave to the save; of another format, everything that it keeps at the top."""
    own = DcpState.of(source)
    kept = own.rest if own else source.state.other
    return {key: value for key, value in kept.items() if key not in _OWN}


def extra_states_of(source: Source, names: Mapping[str, object]) -> dict[str, object]:
    """The stored extra state of modules that have one.

    Args:
        source: The checkpoint.
        names: Their names in the state dict.
    """
    own = DcpState.of(source)
    kept = own.rest if own else {}
    return {name: kept[name] for name in names if name in kept}
