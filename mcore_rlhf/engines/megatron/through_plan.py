"""Loading any other layout, or any other format: the live model as the target of a plan.

The live tensors' own names and shapes decide what is wanted; where their elements lie in the whole model is computed from
the source's own table of partitions and this run's degrees, and every shape is checked against the live one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.core.box import Shape
from mcore_rlhf.core.catalog import TensorEntry
from mcore_rlhf.core.dtype import dtype_of
from mcore_rlhf.core.names import MASTER, TensorName
from mcore_rlhf.core.plan import FilePlan, plan_file
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, Problems
from mcore_rlhf.families.megatron.buffers import EMBEDDING, OUTPUT
from mcore_rlhf.families.megatron.native import MegatronNative
from mcore_rlhf.families.megatron.view import TargetView
from mcore_rlhf.families.source import Source
from mcore_rlhf.layouts.tensor import LocalLayout, local_layout
from mcore_rlhf.models.megatron import is_routed_expert
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage.stored import StoredTensor

from .chunks import LiveModel
from .expected import unexpected
from .geometry import range_chunks
from .optimizers import Member
from .origin import Origin
from .place import Place
from .slots import LIVE, Slot, slots

_ADVICE = "Build the model that the checkpoint holds, or load another checkpoint."


@dataclass(frozen=True, slots=True)
class Named:
    """What a live tensor is in the whole model.

    Args:
        name: Global name of the stored parameter.
        layout: The part that this rank holds.
        spec: The parameter, with this run's rows where it counts words.
    """

    name: str
    layout: LocalLayout
    spec: ParamSpec


@dataclass(slots=True)
class LivePlan:
    """Plans a source into the live model of this rank.

    Args:
        source: The opened checkpoint.
        place: This rank.
        model: Its model.
        chain: Its optimizers; empty to load weights only.
    """

    source: Source
    place: Place
    model: LiveModel
    chain: Sequence[Member | None]
    problems: Problems = field(default_factory=Problems)
    report: Report = field(default_factory=Report)
    _live: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    _named: dict[tuple[int, str], Named] = field(default_factory=dict)

    def origin(self) -> tuple[Origin, list[Slot]]:
        """Plan the load; what does not fit is noted in the plan's problems."""
        source = self.source
        states = tuple(state for state in source.states if state != MASTER)
        wanted = slots(self.model, self.chain if source.optimizer is not None else (), states)
        self.report.extend(source.notes.lines)
        known: set[str] = set()
        for chunk in self.model.chunks:
            for local, tensor in chunk.tensors().items():
                at, parallel = self.place.at, self.place.parallel
                name = self._stored_as(self.model.global_name(chunk, local, at.ep_rank, parallel.ep))
                known.add(name)
                self._live[chunk.vpp_rank, local] = tensor
                self._name(chunk.vpp_rank, local, name, tuple(tensor.shape))
        self.problems.extend(unexpected(source.model, self.model, self.place, known))
        plan = self._plan(wanted)
        self._note(plan)
        files = dict.fromkeys(copy.source.file for copy in plan.copies)
        native = source.native
        scalars = native.scalars if isinstance(native, MegatronNative) else {}
        return Origin(
            source.root, tuple(source.root / file for file in files), plan, source.state, states, source.optimizer,
            self.report, scalars,
        ), wanted  # fmt: skip

    def _plan(self, wanted: Sequence[Slot]) -> FilePlan:
        entries = list(self._entries(wanted))
        view = TargetView(self.source.catalog, self.source.model, self._rows(), self._from_masters())
        plan = FilePlan(LIVE) if self.problems else plan_file(LIVE, entries, view)
        plan.problems.extend(self.problems.found)
        return plan

    def _entries(self, wanted: Sequence[Slot]) -> Iterator[TensorEntry]:
        for slot in wanted:
            named = self._named.get((slot.vpp_rank, slot.name))
            if named is not None and slot.stop > slot.start:
                chunks = tuple(range_chunks(named.layout, slot.record, slot.start, slot.stop))
                name = TensorName(self.source.role, named.name, slot.state)
                yield TensorEntry(name, named.spec.global_shape, slot.record.dtype, chunks)

    def _name(self, vpp_rank: int, local: str, name: str, shape: Shape) -> None:
        """Note where a live tensor lies in the whole model, or why it does not fit."""
        spec = self.source.model.get(name)
        if spec is None:
            self.problems.add(LayoutMismatch, f"{name}: live {shape}, not in the checkpoint", _ADVICE)
            return
        whole, routed, here = self._with_rows(spec, shape), is_routed_expert(name), self.place.file_rank
        split, stack = here.split(self.place.parallel, routed), here.stack(self.place.parallel)
        stored = f"the stored {spec.global_shape} ({spec.partition})"
        try:
            layout = local_layout(whole.partition, whole.global_shape, split, stack)
        except CheckpointError as error:
            self.problems.add(LayoutMismatch, f"{name}: live {shape}, {stored} does not fit: {error}", _ADVICE)
            return
        if layout.shape != shape:
            text = f"{name}: live {shape}, expected {layout.shape} of {stored}"
            self.problems.add(LayoutMismatch, text, _ADVICE)
            return
        self._check_known(name)
        self._named[vpp_rank, local] = Named(name, layout, whole)

    def _stored_as(self, name: str) -> str:
        """The embedding, for the copy of it that the last stage of a tied model has as its output layer."""
        known = self.source.model
        return EMBEDDING if name == OUTPUT and known.tied and known.get(OUTPUT) is None else name

    def _with_rows(self, spec: ParamSpec, shape: Shape) -> ParamSpec:
        """A vocabulary may be padded otherwise, as long as no word of it is cut."""
        words = self.source.model.vocab_size
        if not spec.partition.vocabulary or not shape:
            return spec
        rows = shape[0] * self.place.parallel.tp
        if words is not None and rows < words:
            return spec
        return ParamSpec(spec.name, (rows, *spec.global_shape[1:]), spec.dtype, spec.partition, spec.trainable)

    def _rows(self) -> int | None:
        """Rows of the live vocabulary, of which all vocabulary-shaped tensors have the same number."""
        rows = {named.spec.global_shape[0] for named in self._named.values() if named.spec.partition.vocabulary}
        if len(rows) > 1:
            self.problems.add(
                LayoutMismatch, f"vocabulary-shaped tensors of this run have different rows: {sorted(rows)}"
            )
        return max(rows, default=None)

    def _from_masters(self) -> bool:
        """Whether parameters are rounded from their masters, because the live model has another element type."""
        return MASTER in self.source.states and any(
            named.spec.trainable and dtype_of(self._live[at].dtype) != named.spec.dtype
            for at, named in self._named.items()
        )

    def _check_known(self, name: str) -> None:
        native = self.source.native
        if isinstance(native, MegatronNative) and name in native.unknown and self.place.parallel.tp > 1:
            self.problems.add(
                LayoutMismatch,
                f"{name}: no table says how it is cut, and the checkpoint has one tensor-parallel rank only",
                "Convert the checkpoint with --rules, which say it.",
            )

    def _note(self, plan: FilePlan) -> None:
        report, old, new = self.report, self.source.model.padded_vocab_size, self._rows()
        report.add(Fate.CHANGED, f"layout: {self.source.format} {self.source.parallel} → {self.place.parallel}")
        if old is not None and new is not None and new > old:
            report.add(
                Fate.CHANGED,
                f"vocabulary rows {old}–{new - 1} are new padding and repeat row {old - 1}, in every state",
            )
        elif old is not None and new is not None and new < old:
            report.add(Fate.CHANGED, f"vocabulary rows {new}–{old - 1} are padding that this layout does not have")
        if _has_opaque(self.source):
            report.add(Fate.CHANGED, "opaque values (_extra_state) belong to ranks of the source and stay this run's")
        if self.chain and self.source.optimizer is not None and MASTER not in self.source.states:
            report.add(Fate.DERIVED, "fp32 master parameters: copies of the parameters")
        if not plan.lossless:
            kept = self._from_masters() and self.chain
            report.add(
                Fate.DERIVED,
                "parameters: rounded from their fp32 masters" if kept else "values: converted to the live type",
            )


def _has_opaque(source: Source) -> bool:
    native = source.native
    if not isinstance(native, MegatronNative):
        return False
    values = (value for shard in native.shards for part in shard.parts for value in part.opaque.values())
    return any(value is not None and not (isinstance(value, StoredTensor) and 0 in value.shape) for value in values)
