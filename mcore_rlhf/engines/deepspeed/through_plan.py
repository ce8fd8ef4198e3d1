"""Loading any other stage, data-parallel size or a universal checkpoint: the live engine as the target of a plan.

What DeepSpeed's own universal load leaves out is done here: buffers and frozen parameters are restored, every flat tensor gets
a ``step`` of its own, every param group its own settings, and a rank whose part is all padding has nothing to look up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mcore_rlhf.core.catalog import TensorEntry
from mcore_rlhf.core.dtype import FLOATING, dtype_of
from mcore_rlhf.core.names import MASTER, TensorName
from mcore_rlhf.core.plan import FilePlan, plan_file
from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported
from mcore_rlhf.formats.base import Source
from mcore_rlhf.formats.deepspeed.view import TargetView
from mcore_rlhf.formats.module_state import ModuleState
from mcore_rlhf.formats.report import Fate, Report

from .optimizers import LiveOptimizer
from .origin import Origin
from .restoring import WRAPPER
from .slots import LIVE, Slot, Slots, Weight

_ADVICE = "Build the model that the checkpoint holds, or load another checkpoint."
_MOST = 5


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
    problems: Problems = field(default_factory=Problems)
    report: Report = field(default_factory=Report)

    def origin(self, *, optimizer: bool) -> tuple[Origin, list[Slot]]:
        """Plan the load; what does not fit is noted in the plan's problems.

        Raises:
            Unsupported: The checkpoint is of another family.
        """
        source, native = self.source, self.source.native
        if not isinstance(native, ModuleState):
            raise Unsupported(
                f"{source.root}: from {source.format} into a DeepSpeed engine: this pair is not supported yet"
            )
        self.report.extend(source.notes.lines)
        restored = optimizer and self.live is not None and source.optimizer is not None
        states = tuple(state for state in source.states if state != MASTER) if restored else ()
        missing = self._compare(native)
        weights = [weight for weight in self.weights if weight.name not in missing]
        slots = Slots(weights, self.live if restored else None, states, self.live).all()
        plan = self._plan(slots, native)
        self._note(restored, plan)
        files = dict.fromkeys(copy.source.file for copy in plan.copies)
        paths = tuple(source.root / file for file in files)
        wrapper = {key: value for key, value in native.optimizer.items() if key in WRAPPER}
        return Origin(source.root, paths, plan, source.state, restored, states, wrapper, self.report), slots

    def _stored_as(self, name: str, native: ModuleState) -> str:
        """The owner of a tied parameter, which may have another of its names here."""
        known = self.source.model
        if known.get(name) is None:
            for alias, owner in native.shared.items():
                if name == alias and known.get(owner) is not None:
                    return owner
        return name

    def _compare(self, native: ModuleState) -> set[str]:
        """Note what does not fit; returns the names of weights that stay as they are."""
        known, seen, missing = self.source.model, set[str](), set[str]()
        for weight in self.weights:
            stored = self._stored_as(weight.name, native)
            seen.add(stored)
            spec = known.get(stored)
            if spec is None and weight.trained:
                self.problems.add(LayoutMismatch, f"{weight.name}: live {weight.shape}, not in the checkpoint", _ADVICE)
            elif spec is None or not self._has(stored):
                missing |= set() if weight.trained else {weight.name}
            elif spec.global_shape != weight.shape:
                text = f"{weight.name}: live {weight.shape}, stored {spec.global_shape}"
                self.problems.add(LayoutMismatch, text, _ADVICE)
        for spec in known.params:
            if spec.name not in seen:
                text = f"{spec.name}: stored {spec.global_shape}, and this run has no such parameter"
                self.problems.add(LayoutMismatch, text, _ADVICE)
        if missing:
            self.report.add(
                Fate.LOST,
                f"not in the checkpoint, and left as this run has them: {len(missing)} buffers and frozen parameters "
                f"({', '.join(sorted(missing)[:_MOST])})",
            )
        return missing

    def _has(self, name: str) -> bool:
        view = TargetView(self.source.catalog, False)
        return view.get(TensorName(self.source.role, name)) is not None

    def _plan(self, slots: Sequence[Slot], native: ModuleState) -> FilePlan:
        if self.problems:
            plan = FilePlan(LIVE)
        else:
            view = TargetView(self.source.catalog, self._from_masters(native))
            plan = plan_file(LIVE, [entry for slot in slots for entry in self._entries(slot, native)], view)
        plan.problems.extend(self.problems.found)
        return plan

    def _entries(self, slot: Slot, native: ModuleState) -> list[TensorEntry]:
        role, dtype = self.source.role, slot.record.dtype
        return [
            TensorEntry(TensorName(role, self._stored_as(name, native), slot.state), shape, dtype, chunks)
            for name, shape, chunks in slot.chunks()
            if chunks
        ]

    def _from_masters(self, native: ModuleState) -> bool:
        """Whether weights are rounded from their masters, because the live model has another element type."""
        known = self.source.model
        for weight in self.weights if MASTER in self.source.states else ():
            spec = known.get(self._stored_as(weight.name, native))
            if weight.trained and spec is not None and spec.dtype != dtype_of(weight.tensor.dtype):
                return spec.dtype in FLOATING
        return False

    def _note(self, restored: bool, plan: FilePlan) -> None:
        source, stage = self.source, self.live.stage if self.live is not None else 0
        was = (source.optimizer or "weights alone").replace("zero", "ZeRO ")
        self.report.add(
            Fate.CHANGED,
            f"layout: {source.format} {was} on DP {source.parallel.dp} → ZeRO {stage} on {self.parallel}",
        )
        if restored and MASTER not in source.states:
            self.report.add(Fate.DERIVED, "fp32 master parameters: copies of the parameters")
        if not plan.lossless:
            self.report.add(Fate.DERIVED, "weights: converted to this run's element type")
