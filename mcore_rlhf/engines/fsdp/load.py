"""Loading: the live parts of this rank as the target of a plan, whatever wrote the checkpoint and on however many ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch.distributed.tensor import DTensor

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.core.box import row_major
from mcore_rlhf.core.catalog import Catalog, Chunk, Record, TensorEntry
from mcore_rlhf.core.dtype import DType, dtype_of
from mcore_rlhf.core.execute import FileRun
from mcore_rlhf.core.names import MASTER, PARAM, TensorName
from mcore_rlhf.core.plan import FilePlan, plan_file
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, Problems
from mcore_rlhf.families.source import ParamGroup, Source
from mcore_rlhf.formats.dcp.state import SCHEDULER, SCHEDULERS, VERSION, DcpState
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.reading import OpenFiles

from ..load import LiveMemory, Unchecked
from ..module_source import LiveParam, ModuleSource, matched_groups
from ..optimizers import install_state, needed_keys, unlike
from ..stateful import Stateful, Undo, copied, not_writable
from .geometry import FlatSplit, Split
from .model import Held, HeldModule, HeldOptimizer

LIVE = "live"


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A live tensor to be filled.

    Args:
        held: The parameter or buffer that it is, or belongs to.
        state: ``param``, or the name of an optimizer state.
        stored: What the checkpoint calls the parameter.
        split: Which part of the whole tensor it is.
        record: The live memory as a record; its key is the slot's own.
    """

    held: Held
    state: str
    stored: str
    split: Split
    record: Record

    def entry(self, role: str, rank: int) -> TensorEntry:
        """The logical tensor, with this rank's parts as chunks of the live memory."""
        chunks, at = [], 0
        for box in self.split.boxes(rank):
            chunks.append(Chunk(box, self.record, at, row_major(box.shape)))
            at += box.numel
        name = TensorName(role, self.stored, self.state)
        return TensorEntry(name, self.split.global_shape, self.record.dtype, tuple(chunks))


@dataclass(slots=True)
class Planned:
    """A load as one rank sees it.

    Args:
        source: The checkpoint.
        slots: What is filled.
        plan: What fills it; its problems are those of the whole load.
        files: The files that this rank reads.
        stored_as: What the checkpoint calls each live parameter.
        optimizer: Whether the optimizer is restored.
        report: What is kept, derived, changed and lost.
    """

    source: Source
    slots: list[Slot]
    plan: FilePlan
    files: tuple[ReadablePath, ...]
    stored_as: dict[str, str]
    optimizer: bool
    report: Report

    def states_of(self, param: str) -> list[Slot]:
        """The slots of a parameter's optimizer states."""
        return [slot for slot in self.slots if slot.state != PARAM and slot.held.name == param]


@dataclass(slots=True)
class LivePlan:
    """Plans a source into the live parts of this rank.

    Args:
        source: The opened checkpoint, of the module family.
        module: The live module's tensors.
        optimizer: The live optimizer; None to load weights alone.
        rank: This global rank.
        ranks: All that the model is dealt out to.
    """

    source: Source
    module: HeldModule
    optimizer: HeldOptimizer | None
    rank: int
    ranks: tuple[int, ...]
    slots: list[Slot] = field(default_factory=list)

    def planned(self) -> Planned:
        """Plan the load; what does not fit is noted in the plan's problems.

        Raises:
            Unsupported: The checkpoint is of another family.
        """
        live = [_live(one) for one in self.module.tensors]
        stored = ModuleSource.of(self.source, live, self.module.shared, "an FSDP model")
        settled = settled_lines(self.source)
        stored.report.extend((fate, text) for fate, text in self.source.notes.lines if text not in settled)
        missing = stored.compare()
        restored = self.optimizer is not None and self.source.optimizer is not None
        view = stored.view()
        self._add_weights(stored, missing)
        if restored:
            self._add_states(stored, view)
        plan = self._plan(stored.problems, view)
        self._note(stored.report, plan, restored=restored)
        files = tuple(self.source.root / file for file in dict.fromkeys(copy.source.file for copy in plan.copies))
        names = {one.name: stored.stored_as(one.name) for one in live}
        return Planned(self.source, self.slots, plan, files, names, restored, stored.report)

    def _add_weights(self, stored: ModuleSource, missing: set[str]) -> None:
        for one in self.module.tensors:
            if one.name not in missing:
                self._add(one, PARAM, stored.stored_as(one.name), dtype_of(one.local.dtype))

    def _add_states(self, stored: ModuleSource, view: Catalog) -> None:
        """Every state that the checkpoint has of a parameter; one that never got a gradient has none."""
        assert self.optimizer is not None
        for _, params in self.optimizer.groups:
            for param in params:
                name = stored.stored_as(param.name)
                for state in self.source.states:
                    entry = view.get(TensorName(self.source.role, name, state)) if state != MASTER else None
                    if entry is not None:
                        self._add(param, state, name, self._dtype(param, name, entry.dtype))

    def _dtype(self, param: Held, stored: str, dtype: DType) -> DType:
        """A state keeps the type in which it was stored, unless what it belongs to is of another here, or is a master beside a
        parameter, which no optimizer of torch's has.
        """
        live, name = dtype_of(param.local.dtype), TensorName(self.source.role, stored)
        held = [self.source.catalog.get(name._replace(state=state)) for state in (PARAM, MASTER)]
        kept = [entry for entry in held if entry is not None]
        return dtype if len(kept) == 1 and kept[0].dtype == live else live

    def _add(self, held: Held, state: str, stored: str, dtype: DType) -> None:
        record = Record(LIVE, str(len(self.slots)), dtype, held.local.numel(), 0)
        self.slots.append(Slot(held, state, stored, held.split, record))

    def _plan(self, problems: Problems, view: Catalog) -> FilePlan:
        if problems:
            plan = FilePlan(LIVE)
        else:
            entries = (slot.entry(self.source.role, self.rank) for slot in self.slots)
            plan = plan_file(LIVE, [entry for entry in entries if entry.chunks], view)
        plan.problems.extend(problems.found)
        return plan

    def _note(self, report: Report, plan: FilePlan, *, restored: bool) -> None:
        source, ranks = self.source, len(self.ranks)
        if (source.format, source.parallel.dp) != ("dcp", ranks):
            report.add(Fate.CHANGED, f"layout: {source.format} on DP {source.parallel.dp} → FSDP on {ranks} ranks")
        report.add(Fate.KEPT, "weights, optimizer states and param groups" if restored else "weights")
        if self.optimizer is not None and not restored:
            report.add(Fate.LOST, "optimizer: not in the checkpoint; this run's is left as it is")
        if not plan.lossless:
            report.add(Fate.DERIVED, "tensors: converted to this run's element types")


def _live(one: Held) -> LiveParam:
    return LiveParam(one.name, one.split.global_shape, dtype_of(one.local.dtype), one.trained)


def memory_of(slots: Sequence[Slot], states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The live memory of slots by key.

    Args:
        slots: The slots.
        states: Memory of optimizer states, by key.
    """
    return {slot.record.key: slot.held.local if slot.state == PARAM else states[slot.record.key] for slot in slots}


WINDOW_BYTES = 8 << 20


@dataclass(slots=True)
class PreparedFsdpLoad:
    """Everything that is needed to overwrite the live parts on this rank.

    Args:
        planned: The load.
        optimizer: The optimizer's part of it, or None.
        handed: What others' code takes back: a scheduler with its state.
        extra: Modules that have an extra state, with the stored one.
        more: Files that were read already, while the load was prepared.
        done: Called when the live model is the loaded one.
    """

    planned: Planned
    optimizer: ShardedOptimizerLoad | None
    handed: Sequence[tuple[Stateful, dict[str, object]]]
    extra: Sequence[tuple[torch.nn.Module, object]]
    more: Sequence[ReadablePath]
    done: Callable[[], None]
    rng: Mapping[str, object] | None = None
    files: Sequence[ReadablePath] = field(init=False)

    def __post_init__(self) -> None:
        self.files = tuple(dict.fromkeys((*self.more, *self.planned.files)))

    @property
    def report(self) -> Report:
        """What is kept, derived, changed and lost."""
        return self.planned.report

    def install(self, undo: Undo) -> None:
        """All that may refuse: the optimizer, the schedules, extra states.

        Raises:
            CheckpointError: A part refused its state.
        """
        if self.optimizer is not None:
            with self._saying("optimizer"):
                self.optimizer.read()
                self.optimizer.install(undo)
        for scheduler, state in self.handed:
            with self._saying("lr_scheduler"):
                undo.handed(scheduler, state)
        for module, value in self.extra:
            with self._saying(f"the extra state of {type(module).__name__}"):
                undo.note(partial(module.set_extra_state, copied(module.get_extra_state())))
                module.set_extra_state(value)

    def fill(self) -> None:
        """The tensors, in place.

        Raises:
            StorageError: A file cannot be read any more.
        """
        self._fill()
        self.done()

    def _fill(self) -> None:
        slots = self.planned.slots
        states = self.optimizer.memory if self.optimizer is not None else {}
        wanted = [slot for slot in slots if slot.record.numel and (slot.state == "param" or slot.record.key in states)]
        memory = LiveMemory(memory_of(wanted, states))
        with OpenFiles(self.planned.source.root) as files, torch.no_grad():
            records = [slot.record for slot in wanted]
            FileRun(self.planned.plan, records, files, memory, Unchecked(), WINDOW_BYTES).run()
        memory.finish()

    @contextmanager
    def _saying(self, part: str) -> Iterator[None]:
        """Others' code may raise anything; the user is to hear whose state it was, and that nothing has changed."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self.planned.source.root}: {part} refused its state: {type(error).__name__}: {error}\n"
                "What had been loaded was put back. Build this part as it was when it was saved, or load the weights alone: "
                "load(optimizer=False)."
            ) from error


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
    held = own.rest if own else source.state.other
    return {key: value for key, value in held.items() if key not in _OWN}


def extra_states_of(source: Source, names: Mapping[str, object]) -> dict[str, object]:
    """The stored extra state of modules that have one.

    Args:
        source: The checkpoint.
        names: Their names in the state dict.
    """
    own = DcpState.of(source)
    held = own.rest if own else {}
    return {name: held[name] for name in names if name in held}
