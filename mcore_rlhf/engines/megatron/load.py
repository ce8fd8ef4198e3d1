"""Loading any other layout, or any other format: the live model as the target of a plan.

The live tensors' own names and shapes decide what is wanted; where their elements lie in the whole model is computed from
the source's own table of partitions and this run's degrees, and every shape is checked against the live one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.core.box import Shape
from mcore_rlhf.core.catalog import TensorEntry
from mcore_rlhf.core.dtype import dtype_of
from mcore_rlhf.core.execute import FileRun
from mcore_rlhf.core.names import EXP_AVG, EXP_AVG_SQ, MASTER, TensorName
from mcore_rlhf.core.plan import Copy, FilePlan, plan_file
from mcore_rlhf.core.views import EITHER, FROM_MASTERS, Rows, StateOrder
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, Problems
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED, Arguments
from mcore_rlhf.families.megatron.state import MegatronState
from mcore_rlhf.families.source import Source
from mcore_rlhf.layouts.tensor import LocalLayout, local_layout
from mcore_rlhf.models.megatron import EMBEDDING, OUTPUT, is_routed_expert
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.storage.stored import StoredTensor

from ..load import LiveMemory, Unchecked, range_chunks
from ..stateful import Undo, copied
from .groups import continued
from .model import LiveModel, other_attention, unexpected
from .optimizers import Member, kind_of
from .parallel_state import Place
from .slots import LIVE, Origin, Slot, live_tensors, slots
from .whole import WholeOptimizer

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
        own = MegatronState.of(source)
        scalars = own.scalars if own else {}
        return Origin(
            source.root, tuple(source.root / file for file in files), plan, source.state, states, source.optimizer,
            self.report, scalars,
        ), wanted  # fmt: skip

    def _plan(self, wanted: Sequence[Slot]) -> FilePlan:
        entries = list(self._entries(wanted))
        states = StateOrder(self.source.catalog, FROM_MASTERS if self._from_masters() else EITHER)
        view = Rows(states, self.source.model.with_vocabulary(self._rows()))
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
        own = MegatronState.of(self.source)
        if own and name in own.unknown and self.place.parallel.tp > 1:
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
    own = MegatronState.of(source)
    values = (value for shard in (own.shards if own else ()) for part in shard.parts for value in part.opaque.values())
    return any(value is not None and not (isinstance(value, StoredTensor) and 0 in value.shape) for value in values)


WINDOW_BYTES = 8 << 20
_MOST_PROBLEMS = 1000
"""A user who built another model wants to see every difference."""

_STATES = {EXP_AVG, EXP_AVG_SQ}


@dataclass(frozen=True, slots=True)
class _Filling:
    """Fills slots from the mapped files."""

    source: OpenFiles
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
    def files(self) -> Sequence[ReadablePath]:
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
        with OpenFiles(self.origin.root) as source:
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
