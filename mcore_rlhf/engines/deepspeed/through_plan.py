"""Loading any other stage, data-parallel size or a universal checkpoint: the live engine as the target of a plan.

What DeepSpeed's own universal load leaves out is done here: buffers and frozen parameters are restored, every flat tensor gets
a ``step`` of its own, every param group its own settings, and a rank whose part is all padding has nothing to look up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.core.catalog import TensorEntry
from mcore_rlhf.core.dtype import dtype_of
from mcore_rlhf.core.names import MASTER, TensorName
from mcore_rlhf.core.plan import FilePlan, plan_file
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import Source

from ..module_source import LiveParam, ModuleSource
from .optimizers import LiveOptimizer
from .origin import Origin, States
from .restoring import WRAPPER
from .slots import LIVE, Slot, Slots, Weight


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
        assert isinstance(source.native, ModuleState)
        wrapper = {key: value for key, value in source.native.optimizer.items() if key in WRAPPER}
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
