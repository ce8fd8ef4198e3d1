"""A load that was checked on this rank: nothing has been changed yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mcore_rlhf.core.execute import FileRun
from mcore_rlhf.errors import LayoutMismatch, Problems
from mcore_rlhf.formats.base import ParamGroup
from mcore_rlhf.formats.report import Fate, Report
from mcore_rlhf.storage.mapped import MappedFiles
from mcore_rlhf.storage.stubs import Stub

from ..memory import LiveMemory, Unchecked
from ..param_groups import matched_groups
from .optimizers import LiveOptimizer
from .origin import Origin
from .restoring import (
    fits_scaler,
    forget_states,
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

    def apply(self) -> None:
        """Overwrite the live engine. Called on all ranks: stage 3 gathers its small parameters again at the end."""
        wrapper = self.engine.optimizer
        sliced = self.live is not None and self.live.stage == 3
        with torch.no_grad():
            if sliced:
                wrapper.checkpoint_event_prologue()
            if self._restores and self.live is not None:
                load_groups(self.live, self._groups, self.origin.states)
            self._fill()
            self._finish_optimizer()
            if sliced:
                wrapper.checkpoint_event_epilogue()
        if self.optimizer:
            self._load_rest()
        self.done()

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

    def _finish_optimizer(self) -> None:
        """What follows from what was filled: weights from masters in stage 3, masters from weights without an optimizer."""
        live = self.live
        if live is None:
            return
        if not self._restores:
            forget_states(live)
            return
        round_slices(live)
        scaler = self.origin.state.grad_scaler
        load_wrapper(live, scaler if isinstance(scaler, Stub) else None, self.origin.wrapper)

    def _load_rest(self) -> None:
        state, scheduler = self.origin.state, self.engine.lr_scheduler
        if scheduler is not None and state.scheduler is not None:
            scheduler.load_state_dict(state.scheduler)
            if self._rateless:
                load_rates(scheduler)
        load_counters(self.engine, state.iteration, state.other)

    def _check_states(self, live: LiveOptimizer, problems: Problems) -> None:
        """An optimizer that has stepped says which states it keeps."""
        for flat in live.flats:
            own = {
                key for key, value in live.state_of(flat).items()
                if key != _STEP and isinstance(value, torch.Tensor) and value.dim()
            }  # fmt: skip
            if own and self.origin.states and own != set(self.origin.states):
                problems.add(
                    LayoutMismatch,
                    f"optimizer states: this run keeps {', '.join(sorted(own))}, "
                    f"the checkpoint has {', '.join(sorted(self.origin.states))}",
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
