"""A load that was checked on this rank: nothing has been changed yet."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.core.execute import FileRun
from mcore_rlhf.core.names import EXP_AVG, EXP_AVG_SQ
from mcore_rlhf.core.plan import Copy, FilePlan
from mcore_rlhf.errors import LayoutMismatch, Problems
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED, Arguments
from mcore_rlhf.storage.mapped import MappedFiles

from ..memory import LiveMemory, Unchecked
from ..undoing import Undo
from ..writable import copied
from .chunks import LiveModel
from .expected import other_attention
from .groups import continued
from .optimizers import Member, kind_of
from .origin import Origin
from .slots import LIVE, Slot, live_tensors
from .whole import WholeOptimizer

WINDOW_BYTES = 8 << 20
_MOST_PROBLEMS = 1000
"""A user who built another model wants to see every difference."""

_STATES = {EXP_AVG, EXP_AVG_SQ}


@dataclass(frozen=True, slots=True)
class _Filling:
    """Fills slots from the mapped files."""

    source: MappedFiles
    copies: Mapping[str, Sequence[Copy]]

    def fill(self, chosen: Sequence[Slot], tensors: Mapping[str, torch.Tensor]) -> None:
        memory = LiveMemory(tensors)
        plan = FilePlan(LIVE, [one for slot in chosen for one in self.copies.get(slot.record.key, ())])
        FileRun(plan, [slot.record for slot in chosen], self.source, memory, Unchecked(), WINDOW_BYTES).run()
        memory.finish()

    def convert(self, inside: Sequence[Slot]) -> None:
        """Of one parameter's states, through fp32 buffers, into the form in which the optimizer keeps them."""
        buffers = {slot.record.key: torch.empty(slot.stop - slot.start, dtype=torch.float32) for slot in inside}
        self.fill(inside, buffers)
        member, owned = inside[0].member, inside[0].owned
        assert member is not None
        assert owned is not None
        member.put(owned, {slot.state: buffers[slot.record.key] for slot in inside})


@dataclass(slots=True)
class PreparedMegatronLoad:
    """Everything that is needed to overwrite the live model of this rank.

    Args:
        model: The live model.
        chain: Its optimizers.
        optimizer: Whether they are restored, and the schedule; otherwise they begin anew from the weights.
        scheduler: Its scheduler, or None.
        origin: Where everything comes from.
        slots: What is to be filled.
        done: Called when the live model is the loaded one.
        whole: The optimizer, where no plan can move it and it is given back as it was saved.
    """

    model: LiveModel
    chain: Sequence[Member | None]
    optimizer: bool
    scheduler: Any | None
    origin: Origin
    slots: Sequence[Slot]
    done: Callable[[], None]
    whole: WholeOptimizer | None = None
    _fields: list[dict[str, object]] = field(default_factory=list)

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
        """Random states that this rank's own file holds: Megatron stores those of the first data-parallel rank."""
        return self.origin.rng

    def check(self) -> None:
        """Find everything that could go wrong.

        Raises:
            CheckpointError: All problems together.
        """
        problems = Problems(list(self.origin.plan.problems.found))
        problems.extend(other_attention(Arguments(self.origin.state.args), self.model))
        trained = [member for member in self.chain if member is not None]
        if self._restores and trained:
            live = [group for member in trained for group in member.groups]
            self._fields = continued(live, self.origin.state.groups, problems)
            self._check_states(trained, problems)
        self._check_scheduler(problems)
        self._note(trained)
        problems.raise_if_any(limit=_MOST_PROBLEMS)

    def install(self, undo: Undo) -> None:
        """Hand Megatron's own code what it takes: param groups, loss scale, opaque values, the schedule."""
        with torch.no_grad():
            for member in filter(None, self.chain):
                undo.optimizer(member.optimizer.optimizer)  # the schedule sets learning rates in any case
            self._load_groups(undo)
            if self.whole is not None:
                self.whole.install(undo)
            self._load_opaque(undo)
            self._load_scheduler(undo)

    def fill(self) -> None:
        """Copy all tensors; without an optimizer's, masters and moments begin anew from the weights."""
        with torch.no_grad():
            self._fill()
            if self.whole is not None:
                self.whole.fill()
            elif not self._restores:
                for member in filter(None, self.chain):
                    member.forget()
        self.done()

    @property
    def _restores(self) -> bool:
        return self.optimizer and self.origin.kind is not None

    def _load_groups(self, undo: Undo) -> None:
        fields, state = iter(self._fields), self.origin.state
        for member in filter(None, self.chain if self._restores else ()):
            own = [next(fields) for _ in member.groups]
            member.load(own, self.origin.states, self.origin.scalars)
            if isinstance(state.grad_scaler, dict) and member.scaler is not None:
                undo.handed(member.scaler, state.grad_scaler)

    def _fill(self) -> None:
        """Copy all tensors; states in another form take the way through a buffer, one parameter at a time."""
        by_slot: dict[str, list[Copy]] = {}
        for one in self.origin.plan.copies:
            by_slot.setdefault(one.target.key, []).append(one)
        with MappedFiles(self.origin.root) as source:
            run = _Filling(source, by_slot)
            plain = [slot for slot in self.slots if slot.member is None or not slot.member.converts]
            run.fill(plain, live_tensors(self.model, plain))
            others = [slot for slot in self.slots if slot.member is not None and slot.member.converts]
            for _, inside in groupby(others, key=lambda slot: (slot.vpp_rank, slot.name)):
                run.convert(list(inside))

    def _load_opaque(self, undo: Undo) -> None:
        for chunk in self.model.chunks:
            stored, live = self.origin.opaque.get(chunk.vpp_rank, {}), chunk.opaque()
            wanted = {name: stored[name] for name in live if stored.get(name) is not None}
            if wanted:
                before = copied({name: live[name] for name in wanted})
                undo.note(partial(chunk.module.load_state_dict, before, strict=False))
                chunk.module.load_state_dict(wanted, strict=False)

    def _load_scheduler(self, undo: Undo) -> None:
        stored = self.origin.state.scheduler
        if self.scheduler is not None and self.optimizer and stored is not None:
            undo.attributes(self.scheduler, [name for name in vars(self.scheduler) if name != "optimizer"])
            if hasattr(self.scheduler, "num_steps"):
                self.scheduler.num_steps = 0  # Megatron's adds to it
            self.scheduler.load_state_dict(stored)

    def _check_scheduler(self, problems: Problems) -> None:
        """Megatron compares the stored schedule with the live one by assertions: let it do so with a copy."""
        stored = self.origin.state.scheduler
        if self.scheduler is None or not self.optimizer or stored is None:
            return
        trial = copy.copy(self.scheduler)
        trial.optimizer = SimpleNamespace(param_groups=[])
        try:
            trial.load_state_dict(dict(stored))
        except (AssertionError, KeyError) as error:
            problems.add(
                LayoutMismatch,
                f"learning-rate schedule: {error}",
                "Use the checkpoint's (use_checkpoint_opt_param_scheduler) or this run's (override_opt_param_scheduler).",
            )

    def _check_states(self, trained: Sequence[Member], problems: Problems) -> None:
        flat = any(member.kind == DISTRIBUTED for member in trained)
        found = set(self.origin.states)
        if flat and found != _STATES:
            problems.add(
                LayoutMismatch,
                f"optimizer states: this run's distributed optimizer keeps {sorted(_STATES)}, the checkpoint has {sorted(found)}",
                "Load with optimizer=False to begin with fresh optimizer states.",
            )

    def _note(self, trained: Sequence[Member]) -> None:
        for fate, text in self._notes(trained):
            self.report.add(fate, text)

    def _notes(self, trained: Sequence[Member]) -> Iterator[tuple[Fate, str]]:
        state, live = self.origin.state, kind_of(trained)
        if self.whole is not None:
            yield Fate.KEPT, f"optimizer, whole, as this rank saved it: {self.whole.states()}"
        elif live is not None and self.origin.kind is None:
            yield (
                Fate.DERIVED,
                "no optimizer state in the checkpoint: masters are copies of the weights, moments begin at zero",
            )
        elif live is not None:
            yield Fate.KEPT, "optimizer states and param groups"
            if self.origin.kind != live:
                yield Fate.CHANGED, f"optimizer: {self.origin.kind} → {live}"
        if self.scheduler is not None and self.optimizer:
            kept = state.scheduler is not None
            yield (Fate.KEPT, "learning-rate schedule") if kept else (Fate.NOTE, "no scheduler state in the checkpoint")
        scaled = any(member.scaler is not None for member in trained)
        if scaled and state.grad_scaler is None:
            yield Fate.NOTE, "no loss scale in the checkpoint; this run's stays"
