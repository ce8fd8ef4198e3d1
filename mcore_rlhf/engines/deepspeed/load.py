"""Loading into a live DeepSpeed engine: its tensors as slots, any checkpoint as their source, and what DeepSpeed's code is handed.

What DeepSpeed's own universal load leaves out is done here: buffers and frozen parameters are restored, every flat tensor gets
a ``step`` of its own, every param group its own settings, and a rank whose part is all padding has nothing to look up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import MASTER, PARAM, Chunk, Shape, TensorEntry, TensorName, dtype_of, row_major
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.core.plan import FilePlan
from mcore_rlhf.engines.stateful import torch_values
from mcore_rlhf.errors import LayoutMismatch, Problems
from mcore_rlhf.families.inventory import COPIED_MASTERS
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import ParamGroup, Source, TrainingState
from mcore_rlhf.formats.deepspeed import FORMAT
from mcore_rlhf.formats.deepspeed.catalog import Partitioned, chunks_of
from mcore_rlhf.layouts.tensor import whole_layout
from mcore_rlhf.storage.stored import StoredTensor, Stub

from ..load import Load, Slot, Slots, planned
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

LiveOwner = Weight | Flat
_FRESH = "Load with optimizer=False to begin with fresh optimizer states."


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint has for the live engine besides tensors.

    Args:
        state: All of it, as every format gives it.
        optimizer: Whether it holds the optimizer, and that was asked for.
        states: Of every flat tensor, by number, the names of its states, without the master.
        wrapper: What DeepSpeed's optimizer keeps besides: ``clip_grad``, ``overflow``.
    """

    state: TrainingState
    optimizer: bool
    states: States
    wrapper: Mapping[str, object]


def slots_of(
    weights: Sequence[Weight], live: LiveOptimizer | None, states: States, *, optimizer: bool
) -> list[Slot[LiveOwner]]:
    """What is filled: weights, then flat tensors.

    Args:
        weights: The module's tensors.
        live: The optimizer.
        states: Of every flat tensor, the names of the states that the checkpoint has, without masters.
        optimizer: Whether it is restored; otherwise only its weights are, which in stage 3 are slices in flat tensors.
    """
    slots = Slots[LiveOwner]()
    for weight in weights:
        if not (weight.sliced is not None and weight.trained):
            slots.add(weight, PARAM, dtype_of(weight.tensor.dtype), weight.tensor.numel(), partial(_tensor, weight))
    for flat in live.flats if live is not None else ():
        dtype = dtype_of(flat.tensor.dtype)
        if live is not None and optimizer:
            masters = (MASTER,) if live.masters else ()
            for state in masters + states.get(flat.number, ()):
                slots.add(flat, state, dtype, flat.numel(state), partial(_state, live, flat, state))
        elif flat.model is not None:
            slots.add(flat, PARAM, dtype_of(flat.model.dtype), flat.numel(PARAM), partial(_slices, flat))
    return slots.found


def _tensor(weight: Weight) -> torch.Tensor:
    return weight.tensor


def _slices(flat: Flat) -> torch.Tensor:
    assert flat.model is not None
    return flat.model


def _state(live: LiveOptimizer, flat: Flat, state: str) -> torch.Tensor:
    tensor: torch.Tensor = flat.tensor if state == MASTER else live.state_of(flat)[state]
    return tensor


def _parts(slot: Slot[LiveOwner]) -> Iterator[tuple[str, Shape, tuple[Chunk, ...]]]:
    """The parameters in a slot: (name, whole shape, which parts of it lie where)."""
    whole, owner = StoredTensor(slot.record, 0, (slot.record.numel,), (1,)), slot.owner
    if isinstance(owner, Flat):
        geometry = owner.geometry_of(slot.state)
        for index in owner.indices(slot.state):
            cut = Partitioned(geometry, index, {owner.rank: whole})
            yield owner.names[index], owner.shapes[index], tuple(chunks_of(cut, whole_layout(owner.shapes[index])))
        return
    place: StoredTensor | Partitioned = StoredTensor(slot.record, 0, owner.shape, row_major(owner.shape))
    if owner.sliced is not None:
        place = Partitioned(owner.sliced, 0, {owner.rank: whole})
    yield owner.name, owner.shape, tuple(chunks_of(place, whole_layout(owner.shape)))


def load_from(
    source: Source, live: LiveOptimizer | None, weights: Sequence[Weight], parallel: str, *, optimizer: bool
) -> tuple[Load[LiveOwner], Restored]:
    """Plan any other stage, data-parallel size or a universal checkpoint into the live engine of this rank.

    Args:
        source: The opened checkpoint.
        live: The live optimizer.
        weights: The live module's tensors.
        parallel: How this run is cut, for people.
        optimizer: Whether the optimizer is to be restored.

    Raises:
        Unsupported: The checkpoint is of another family.
    """
    params = [LiveParam(one.name, one.shape, dtype_of(one.tensor.dtype), one.trained) for one in weights]
    stored = ModuleSource.of(source, params, {}, "a DeepSpeed engine")
    stored.report.extend(source.notes.lines)
    restored = optimizer and live is not None and source.optimizer is not None
    states = _states(stored, live) if restored and live is not None else {}
    missing = stored.compare()
    found = slots_of([one for one in weights if one.name not in missing], live, states, optimizer=restored)

    def holds(slot: Slot[LiveOwner]) -> Iterator[TensorEntry]:
        for name, shape, chunks in _parts(slot):
            yield slot.entry(TensorName(source.role, stored.stored_as(name), slot.state), shape, chunks)

    plan = planned(found, holds, stored.view(), stored.problems)
    _note(stored.report, source, live, parallel, plan, restored=restored)
    kept = torch_values(ModuleState.needed(source, FORMAT.name).optimizer)
    wrapper = {key: value for key, value in kept.items() if key in WRAPPER}
    return Load.of(source, found, plan, stored.report), Restored(torch_values(source.state), restored, states, wrapper)


def _states(stored: ModuleSource, live: LiveOptimizer) -> States:
    """Of every flat tensor, the states that the checkpoint has of its parameters; all where it has none of it at all."""
    source, known = stored.source, set(stored.source.catalog)
    names = [state for state in source.states if state != MASTER]
    found: dict[int, tuple[str, ...]] = {}
    for flat in live.flats:
        params = [TensorName(source.role, stored.stored_as(name)) for name in flat.names]
        own = [s for s in names if any(param._replace(state=s) in known for param in params)] or names
        found[flat.number] = tuple(state for state in own if flat.indices(state) or state not in flat.whole)
    return found


def _note(
    report: Report, source: Source, live: LiveOptimizer | None, parallel: str, plan: FilePlan, *, restored: bool
) -> None:
    was = (source.optimizer or "weights alone").replace("zero", "ZeRO ")
    stage = live.stage if live is not None else 0
    report.add(Fate.CHANGED, f"layout: {source.format} {was} on DP {source.parallel.dp} → ZeRO {stage} on {parallel}")
    if restored and MASTER not in source.states:
        report.add(Fate.DERIVED, COPIED_MASTERS)
    if not plan.lossless:
        report.add(Fate.DERIVED, "weights: converted to this run's element type")


@dataclass(slots=True)
class DeepSpeedHooks:
    """What DeepSpeed and torch take in a load, and give back when it is undone.

    Args:
        engine: DeepSpeed's engine.
        live: Its optimizer, or None.
        optimizer: Whether it is restored, and with it the schedule and the counters.
        restored: What the checkpoint has besides tensors.
        report: Takes what becomes of it.
        done: Called when the live engine is the loaded one.
    """

    engine: Any
    live: LiveOptimizer | None
    optimizer: bool
    restored: Restored
    report: Report
    done: Callable[[], None]
    _groups: list[ParamGroup] = field(default_factory=list)

    def check(self, problems: Problems) -> None:
        """Match param groups, and states with those that an optimizer which has stepped keeps."""
        if self._restores and self.live is not None:
            names = [self.live.names_of(number) for number in range(self.live.groups)]
            self._groups = matched_groups(names, self.restored.state.groups, problems)
            self._check_states(self.live, problems)
        self._note()

    def install(self, undo: Undo) -> None:
        """Hand over param groups, loss scale, the schedule, counters."""
        live, state = self.live, self.restored.state
        if live is not None:
            undo.note(partial(link_states, live))
            undo.optimizer(live.inner)  # the schedule sets learning rates in any case
        if self._restores and live is not None:
            load_groups(live, self._groups, self.restored.states)
            scaler = state.grad_scaler
            keep_wrapper(live, undo)
            load_wrapper(live, scaler if isinstance(scaler, Stub) else None, self.restored.wrapper)
        if self.optimizer:
            self._load_rest(undo)

    def fill(self, copy: Callable[[], None]) -> None:
        """Fill, and derive the rest. Called on all ranks: stage 3 gathers its small parameters again at the end."""
        with self._parts_alone():
            copy()
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
        return self.optimizer and self.live is not None and self.restored.optimizer

    @property
    def _rateless(self) -> bool:
        """Whether the checkpoint has no settings of param groups: ``elastic_checkpoint`` leaves them out."""
        return self._restores and any("lr" not in group.fields for group in self._groups)

    def _load_rest(self, undo: Undo) -> None:
        state, scheduler = self.restored.state, self.engine.lr_scheduler
        if scheduler is not None and state.scheduler is not None:
            undo.handed(scheduler, state.scheduler)
            if self._rateless:
                load_rates(scheduler)
        load_counters(self.engine, state.iteration, state.other, undo)

    def _check_states(self, live: LiveOptimizer, problems: Problems) -> None:
        for flat in live.flats:
            own, stored = set(live.elementwise(flat)), self.restored.states.get(flat.number, ())
            if own and any(self.restored.states.values()) and own != set(stored):
                text = f"this run keeps {', '.join(sorted(own))}, the checkpoint has {', '.join(sorted(stored))}"
                problems.add(LayoutMismatch, f"optimizer states: {text}", _FRESH)
                return

    def _note(self) -> None:
        state, report = self.restored.state, self.report
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
            text = "learning-rate schedule" if kept else "no scheduler state in the checkpoint"
            report.add(Fate.KEPT if kept else Fate.NOTE, text)

    def _note_rates(self) -> None:
        scheduled = self.engine.lr_scheduler is not None and self.restored.state.scheduler is not None
        self.report.add(
            Fate.NOTE, "the checkpoint has no settings of param groups (elastic_checkpoint); this run's stay"
        )
        if scheduled:
            self.report.add(Fate.DERIVED, "learning rates: from the schedule")
        else:
            self.report.add(Fate.LOST, "learning rates: this run's own are used")
