"""What a load has to fill on this rank: weights, buffers, masters and states, each a live tensor with its place in the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.core.box import Shape, row_major
from mcore_rlhf.core.catalog import Chunk, Record, TensorEntry
from mcore_rlhf.core.dtype import dtype_of
from mcore_rlhf.core.execute import FileRun
from mcore_rlhf.core.names import MASTER, PARAM, TensorName
from mcore_rlhf.core.plan import FilePlan, plan_file
from mcore_rlhf.errors import LayoutMismatch, Problems
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import ParamGroup, Source, TrainingState
from mcore_rlhf.formats.deepspeed.catalog import Partitioned, chunks_of
from mcore_rlhf.layouts.tensor import whole_layout
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.storage.stored import StoredTensor
from mcore_rlhf.storage.stubs import Stub

from ..load import LiveMemory, Unchecked
from ..module_source import LiveParam, ModuleSource, matched_groups
from ..stateful import Undo
from .model import Flat, LiveOptimizer, States, Weight
from .restoring import (
    WRAPPER,
    fits_scaler,
    forget_states,
    keep_wrapper,
    link_states,
    load_counters,
    load_groups,
    load_rates,
    load_wrapper,
    round_slices,
)

LIVE = "live"


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A live tensor to be filled.

    Args:
        state: ``param``, ``master``, or the name of an optimizer state.
        record: The live tensor as a record; its key is the slot's own.
        weight: The module's tensor that it is, or None.
        flat: The flat tensor that it belongs to, or None.
    """

    state: str
    record: Record
    weight: Weight | None = None
    flat: Flat | None = None

    @property
    def label(self) -> str:
        """What it is, for messages."""
        if self.weight is not None:
            return self.weight.name
        return ", ".join(self.flat.names[:3]) if self.flat is not None else ""

    def chunks(self) -> Iterator[tuple[str, Shape, tuple[Chunk, ...]]]:
        """Its parameters: (name, whole shape, which parts of it lie where in the slot)."""
        whole = StoredTensor(self.record, 0, (self.record.numel,), (1,))
        if self.flat is not None:
            flat, geometry = self.flat, self.flat.geometry_of(self.state)
            for index in flat.indices(self.state):
                cut = Partitioned(geometry, index, {flat.rank: whole})
                yield (
                    flat.names[index],
                    flat.shapes[index],
                    tuple(chunks_of(cut, whole_layout(flat.shapes[index]))),
                )
        elif self.weight is not None:
            weight = self.weight
            place: StoredTensor | Partitioned = StoredTensor(self.record, 0, weight.shape, row_major(weight.shape))
            if weight.sliced is not None:
                place = Partitioned(weight.sliced, 0, {weight.rank: whole})
            yield weight.name, weight.shape, tuple(chunks_of(place, whole_layout(weight.shape)))


@dataclass(slots=True)
class Slots:
    """All slots of a load.

    Args:
        weights: The module's tensors.
        optimizer: The optimizer; None to load weights alone.
        states: Of every flat tensor, the names of the states that the checkpoint has, without masters.
    """

    weights: Sequence[Weight]
    optimizer: LiveOptimizer | None
    states: States
    model: LiveOptimizer | None = None
    found: list[Slot] = field(default_factory=list)

    def all(self) -> list[Slot]:
        """The slots, in order: weights, then flat tensors."""
        for weight in self.weights:
            if not (weight.sliced is not None and weight.trained):
                self._add(PARAM, weight.tensor, weight=weight)
        if self.optimizer is not None:
            for flat in self.optimizer.flats:
                for state in ((MASTER,) if self.optimizer.masters else ()) + self.states.get(flat.number, ()):
                    self._add(state, flat.held, flat=flat)
        elif self.model is not None:  # weights alone, in stage 3: they are slices in flat tensors
            for flat in self.model.flats:
                if flat.model is not None:
                    self._add(PARAM, flat.model, flat=flat)
        return self.found

    def _add(self, state: str, like: torch.Tensor, weight: Weight | None = None, flat: Flat | None = None) -> None:
        numel = like.numel() if flat is None else flat.numel(state)
        record = Record(LIVE, str(len(self.found)), dtype_of(like.dtype), numel, 0)
        self.found.append(Slot(state, record, weight, flat))


def live_tensors(slots: Sequence[Slot], optimizer: LiveOptimizer | None) -> dict[str, torch.Tensor]:
    """The memory of the slots by key, once the optimizer has its states."""
    found: dict[str, torch.Tensor] = {}
    for slot in slots:
        if slot.weight is not None:
            found[slot.record.key] = slot.weight.tensor
        elif slot.flat is not None and slot.state == PARAM and slot.flat.model is not None:
            found[slot.record.key] = slot.flat.model
        elif slot.flat is not None and slot.state == MASTER:
            found[slot.record.key] = slot.flat.held
        elif slot.flat is not None and optimizer is not None:
            found[slot.record.key] = optimizer.state_of(slot.flat)[slot.state]
    return found


@dataclass(frozen=True, slots=True)
class Origin:
    """A checkpoint, seen from one rank.

    Args:
        root: Folder to which the plan's files are relative.
        files: The files that this rank reads.
        plan: What fills the slots.
        state: What the checkpoint holds besides tensors.
        optimizer: Whether it holds the optimizer, and that was asked for.
        states: Of every flat tensor, by number, the names of its states, without the master.
        wrapper: What DeepSpeed's optimizer keeps besides: ``clip_grad``, ``overflow``.
        report: What is kept, derived, changed and lost.
    """

    root: ReadablePath
    files: tuple[ReadablePath, ...]
    plan: FilePlan
    state: TrainingState
    optimizer: bool
    states: States
    wrapper: Mapping[str, object]
    report: Report = field(default_factory=Report)


WINDOW_BYTES = 8 << 20
_MOST_PROBLEMS = 1000
_STEP = "step"


@dataclass(slots=True)
class PreparedDeepSpeedLoad:
    """Everything that is needed to overwrite the live engine on this rank.

    Args:
        engine: DeepSpeed's engine.
        live: Its optimizer, or None.
        optimizer: Whether it is restored, and with it the schedule and the counters.
        origin: Where everything comes from.
        slots: What is to be filled.
        done: Called when the live engine is the loaded one.
    """

    engine: Any
    live: LiveOptimizer | None
    optimizer: bool
    origin: Origin
    slots: Sequence[Slot]
    done: Callable[[], None]
    _groups: list[ParamGroup] = field(default_factory=list)

    @property
    def files(self) -> Sequence[ReadablePath]:
        """The files that this rank will read."""
        return self.origin.files

    @property
    def report(self) -> Report:
        """What is kept, derived, changed and lost."""
        return self.origin.report

    @property
    def rng(self) -> Mapping[str, object] | None:
        """DeepSpeed stores no random states."""
        return None

    def check(self) -> None:
        """Find everything that could go wrong.

        Raises:
            CheckpointError: All problems together.
        """
        problems = Problems(list(self.origin.plan.problems.found))
        if self._restores and self.live is not None:
            names = [self.live.names_of(number) for number in range(self.live.groups)]
            self._groups = matched_groups(names, self.origin.state.groups, problems)
            self._check_states(self.live, problems)
        self._note()
        problems.raise_if_any(limit=_MOST_PROBLEMS)

    def install(self, undo: Undo) -> None:
        """Hand DeepSpeed and torch what they take: param groups, loss scale, the schedule, counters."""
        live, state = self.live, self.origin.state
        if live is not None:
            undo.note(partial(link_states, live))
            undo.optimizer(live.inner)  # the schedule sets learning rates in any case
        with torch.no_grad():
            if self._restores and live is not None:
                load_groups(live, self._groups, self.origin.states)
                scaler = state.grad_scaler
                keep_wrapper(live, undo)
                load_wrapper(live, scaler if isinstance(scaler, Stub) else None, self.origin.wrapper)
        if self.optimizer:
            self._load_rest(undo)

    def fill(self) -> None:
        """Copy all tensors. Called on all ranks: stage 3 gathers its small parameters again at the end."""
        with torch.no_grad(), self._parts_alone():
            self._fill()
            if self.live is not None and self._restores:
                round_slices(self.live)
            elif self.live is not None:
                forget_states(self.live)
        self.done()

    @contextmanager
    def _parts_alone(self) -> Iterator[None]:
        """Stage 3 keeps small parameters whole between steps. They are gathered again even after an error: others wait."""
        if self.live is None or self.live.stage != 3:
            yield
            return
        self.live.wrapper.checkpoint_event_prologue()
        try:
            yield
        finally:
            self.live.wrapper.checkpoint_event_epilogue()

    @property
    def _restores(self) -> bool:
        return self.optimizer and self.live is not None and self.origin.optimizer

    @property
    def _rateless(self) -> bool:
        """Whether the checkpoint has no settings of param groups: ``elastic_checkpoint`` leaves them out."""
        return self._restores and any("lr" not in group.fields for group in self._groups)

    def _fill(self) -> None:
        """Copy all tensors, one window at a time."""
        tensors = live_tensors(self.slots, self.live)
        memory = LiveMemory(tensors)
        with OpenFiles(self.origin.root) as source:
            records = [slot.record for slot in self.slots]
            FileRun(self.origin.plan, records, source, memory, Unchecked(), WINDOW_BYTES).run()
        memory.finish()

    def _load_rest(self, undo: Undo) -> None:
        state, scheduler = self.origin.state, self.engine.lr_scheduler
        if scheduler is not None and state.scheduler is not None:
            undo.handed(scheduler, state.scheduler)
            if self._rateless:
                load_rates(scheduler)
        load_counters(self.engine, state.iteration, state.other, undo)

    def _check_states(self, live: LiveOptimizer, problems: Problems) -> None:
        """An optimizer that has stepped says which states it keeps."""
        for flat in live.flats:
            own = {
                key for key, value in live.state_of(flat).items()
                if key != _STEP and isinstance(value, torch.Tensor) and value.dim()
            }  # fmt: skip
            stored = self.origin.states.get(flat.number, ())
            if own and any(self.origin.states.values()) and own != set(stored):
                problems.add(
                    LayoutMismatch,
                    f"optimizer states: this run keeps {', '.join(sorted(own))}, "
                    f"the checkpoint has {', '.join(sorted(stored))}",
                    "Load with optimizer=False to begin with fresh optimizer states.",
                )
                return

    def _note(self) -> None:
        state, report = self.origin.state, self.report
        if self._restores:
            report.add(Fate.KEPT, "optimizer states and param groups")
            if self._rateless:
                self._note_rates()
            scaler = state.grad_scaler
            if self.live is not None and scaler is not None and not fits_scaler(self.live, scaler):
                report.add(Fate.NOTE, "the stored loss scaler is of another kind; this run's stays")
        elif self.live is not None:
            report.add(Fate.DERIVED, "fp32 masters are copies of the weights, and states begin at zero")
        if self.engine.lr_scheduler is not None and self.optimizer:
            kept = state.scheduler is not None
            line = (
                (Fate.KEPT, "learning-rate schedule") if kept else (Fate.NOTE, "no scheduler state in the checkpoint")
            )
            report.add(*line)

    def _note_rates(self) -> None:
        scheduled = self.engine.lr_scheduler is not None and self.origin.state.scheduler is not None
        self.report.add(
            Fate.NOTE, "the checkpoint has no settings of param groups (elastic_checkpoint); this run's stay"
        )
        if scheduled:
            self.report.add(Fate.DERIVED, "learning rates: from the schedule")
        else:
            self.report.add(Fate.LOST, "learning rates: this run's own are used")


@dataclass(slots=True)
class LivePlan:
    """Plans a source into the live engine of this rank.

    Args:
        source: The opened checkpoint.
        live: The live optimizer.
        weights: The live module's tensors.
        parallel: How this run is cut, for people.
    """

    source: Source
    live: LiveOptimizer | None
    weights: Sequence[Weight]
    parallel: str

    def origin(self, *, optimizer: bool) -> tuple[Origin, list[Slot]]:
        """Plan the load; what does not fit is noted in the plan's problems.

        Raises:
            Unsupported: The checkpoint is of another family.
        """
        source = self.source
        params = [LiveParam(one.name, one.shape, dtype_of(one.tensor.dtype), one.trained) for one in self.weights]
        stored = ModuleSource.of(source, params, {}, "a DeepSpeed engine")
        stored.report.extend(source.notes.lines)
        restored = optimizer and self.live is not None and source.optimizer is not None
        states = self._states(stored) if restored else {}
        missing = stored.compare()
        weights = [weight for weight in self.weights if weight.name not in missing]
        slots = Slots(weights, self.live if restored else None, states, self.live).all()
        plan = self._plan(slots, stored)
        self._note(stored.report, restored, plan)
        files = dict.fromkeys(copy.source.file for copy in plan.copies)
        paths = tuple(source.root / file for file in files)
        kept = ModuleState.needed(source, "deepspeed").optimizer
        wrapper = {key: value for key, value in kept.items() if key in WRAPPER}
        return Origin(source.root, paths, plan, source.state, restored, states, wrapper, stored.report), slots

    def _states(self, stored: ModuleSource) -> States:
        """Of every flat tensor, the states that the checkpoint has of its parameters; all where it has none of it at all."""
        source, known = self.source, set(self.source.catalog)
        names = [state for state in source.states if state != MASTER]
        found: dict[int, tuple[str, ...]] = {}
        for flat in self.live.flats if self.live is not None else ():
            params = [TensorName(source.role, stored.stored_as(name)) for name in flat.names]
            own = [s for s in names if any(param._replace(state=s) in known for param in params)] or names
            found[flat.number] = tuple(state for state in own if flat.indices(state) or state not in flat.whole)
        return found

    def _plan(self, slots: Sequence[Slot], stored: ModuleSource) -> FilePlan:
        if stored.problems:
            plan = FilePlan(LIVE)
        else:
            holds = [entry for slot in slots for entry in self._entries(slot, stored)]
            plan = plan_file(LIVE, holds, stored.view())
        plan.problems.extend(stored.problems.found)
        return plan

    def _entries(self, slot: Slot, stored: ModuleSource) -> list[TensorEntry]:
        role, dtype = self.source.role, slot.record.dtype
        return [
            TensorEntry(TensorName(role, stored.stored_as(name), slot.state), shape, dtype, chunks)
            for name, shape, chunks in slot.chunks()
            if chunks
        ]

    def _note(self, report: Report, restored: bool, plan: FilePlan) -> None:
        source, stage = self.source, self.live.stage if self.live is not None else 0
        was = (source.optimizer or "weights alone").replace("zero", "ZeRO ")
        report.add(
            Fate.CHANGED,
            f"layout: {source.format} {was} on DP {source.parallel.dp} → ZeRO {stage} on {self.parallel}",
        )
        if restored and MASTER not in source.states:
            report.add(Fate.DERIVED, "fp32 master parameters: copies of the parameters")
        if not plan.lossless:
            report.add(Fate.DERIVED, "weights: converted to this run's element type")
