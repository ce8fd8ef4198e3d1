"""A load that was checked on this rank: nothing has been changed yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.core.execute import FileRun
from mcore_rlhf.errors import LayoutMismatch, Problems
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.storage.mapped import MappedFiles
from mcore_rlhf.storage.stubs import Stub

from ..memory import LiveMemory, Unchecked
from ..param_groups import matched_groups
from ..undoing import Undo
from .optimizers import LiveOptimizer
from .origin import Origin
from .restoring import (
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
from .slots import Slot, live_tensors

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
    def files(self) -> Sequence[Path]:
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
        with MappedFiles(self.origin.root) as source:
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
