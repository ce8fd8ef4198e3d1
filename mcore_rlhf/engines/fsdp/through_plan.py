"""Loading: the live parts of this rank as the target of a plan, whatever wrote the checkpoint and on however many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.core.box import row_major
from mcore_rlhf.core.catalog import Chunk, Record, TensorEntry
from mcore_rlhf.core.dtype import DType, dtype_of
from mcore_rlhf.core.names import MASTER, PARAM, TensorName
from mcore_rlhf.core.plan import FilePlan, plan_file
from mcore_rlhf.errors import Problems
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.deepspeed.view import TargetView

from ..module_source import LiveParam, ModuleSource
from .geometry import Split
from .held import Held, HeldModule
from .optimizers import HeldOptimizer
from .stored import settled_lines

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
    files: tuple[Path, ...]
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

    def _add_states(self, stored: ModuleSource, view: TargetView) -> None:
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

    def _plan(self, problems: Problems, view: TargetView) -> FilePlan:
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
