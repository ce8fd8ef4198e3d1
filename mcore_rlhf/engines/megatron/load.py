"""Loading into a live Megatron model: its tensors as slots, any checkpoint as their source, and what Megatron's code is handed.

The live tensors' own names and shapes decide what is wanted; where their elements lie in the whole model is computed from
the source's own table of partitions and this run's degrees, and every shape is checked against the live one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import FLOAT32, MASTER, PARAM, Shape, TensorEntry, TensorName, dtype_of
from mcore_rlhf.core.chunks import CUT_ROWS, new_rows
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.core.plan import FilePlan
from mcore_rlhf.core.shares import EITHER, FROM_MASTERS
from mcore_rlhf.engines.stateful import torch_values
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.inventory import COPIED_MASTERS
from mcore_rlhf.families.megatron.arguments import LAYER_WISE, Arguments
from mcore_rlhf.families.megatron.remainders import has_remainders
from mcore_rlhf.families.megatron.state import MegatronState
from mcore_rlhf.families.source import Source, TrainingState
from mcore_rlhf.layouts.tensor import LocalLayout, local_layout
from mcore_rlhf.models.megatron import EMBEDDING, OUTPUT, is_routed_expert
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.stored import StoredTensor

from ..load import Load, Pair, Slot, Slots, fill_places, planned, range_chunks
from ..optimizers import OptimizerLoad
from ..stateful import Undo, copied
from .groups import continued
from .model import LiveModel, other_attention, unexpected
from .optimizers import ChainMember, Owned, is_whole, kind_of
from .parallel_state import ParallelRank
from .precision import note_precision

_ADVICE = "Build the model that the checkpoint holds, or load another checkpoint."


@dataclass(frozen=True, slots=True, eq=False)
class LocalPart:
    """A parameter or buffer of this rank, or the part of one whose optimizer states it has.

    Args:
        vpp_rank: The model chunk.
        name: Local name.
        shape: Local shape.
        member: The optimizer that has the states; None for the parameter or buffer itself.
        owned: The part.
    """

    vpp_rank: int
    name: str
    shape: Shape
    member: ChainMember | None = None
    owned: Owned | None = None


@dataclass(frozen=True, slots=True)
class MegatronStored:
    """What a checkpoint has for the live model besides tensors.

    Args:
        state: All of it, as every format gives it.
        states: Names of the optimizer's tensor states, without the master.
        kind: The optimizer that wrote it: ``distributed``, ``plain`` or None.
        scalars: Values that a plain optimizer keeps per parameter.
        opaque: By model chunk: values of the state dict that are no tensors.
    """

    state: TrainingState
    states: tuple[str, ...]
    kind: str | None
    scalars: Mapping[str, object] = field(default_factory=dict)
    opaque: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    apart: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """By member of a chain of several kinds: the states that there are of its parameters."""

    def of(self, member: ChainMember) -> tuple[str, ...]:
        """The states that a member is given."""
        return self.apart.get(member.number, self.states)


def slots_of(
    model: LiveModel,
    chain: Sequence[ChainMember | None],
    states: Sequence[str],
    apart: Mapping[int, Sequence[str]] | None = None,
    *,
    own: bool = False,
) -> list[Slot[LocalPart]]:
    """What is filled: parameters and buffers whole, of optimizer states the parts that this rank has.

    Args:
        model: The live model.
        chain: Its optimizers; empty to load weights only.
        states: Names of the stored states without the master; each becomes a slot of every trained parameter.
        apart: By member: its own, where its parameters have others than all.
        own: Whether what is filled in comes as the optimizer itself gave it; see :meth:`.optimizers.ChainMember.put`.

    Raises:
        Unsupported: A live tensor is not contiguous.
    """
    slots = Slots[LocalPart]()
    for chunk in model.chunks:
        for name, tensor in chunk.tensors().items():
            _check_contiguous(name, tensor)
            owner = LocalPart(chunk.vpp_rank, name, tuple(tensor.shape))
            slots.add(owner, PARAM, dtype_of(tensor.dtype), tensor.numel(), partial(_itself, tensor))
    names = {param: (chunk.vpp_rank, name) for chunk in model.chunks for name, param in chunk.parameters().items()}
    for member in filter(None, chain):
        for owned in member.owned():
            owner = LocalPart(*names[owned.param], tuple(owned.param.shape), member, owned)
            put = partial(member.put, owned, own=own) if member.converts else None
            for state in (*([MASTER] if member.has_master(owned) else []), *(apart or {}).get(member.number, states)):
                memory = partial(_state, member, owned, state)
                slots.add(owner, state, FLOAT32, owned.stop - owned.start, memory, owned.start, put)
    return slots.found


def states_apart(
    chain: Sequence[ChainMember | None], states: Sequence[str], is_stored: Callable[[torch.nn.Parameter, str], bool]
) -> dict[int, tuple[str, ...]]:
    """By member the states that are stored of its parameters, where optimizers of several kinds train one model.

    Args:
        chain: The live optimizers.
        states: All stored states.
        is_stored: Whether one is stored of a parameter.
    """
    if not is_whole(chain):
        return {}
    return {
        member.number: tuple(s for s in states if any(is_stored(owned.param, s) for owned in member.owned()))
        for member in filter(None, chain)
    }


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _state(member: ChainMember, owned: Owned, state: str) -> torch.Tensor:
    return member.tensors(owned)[state]


def _check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise Unsupported(
            f"{name}: the live tensor is not contiguous ({tuple(tensor.shape)}, strides {tensor.stride()})"
        )


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
class MegatronMatching:
    """A checkpoint of any layout or format, matched with the live model of this rank.

    Args:
        source: The opened checkpoint.
        place: This rank.
        model: Its model.
        chain: Its optimizers; empty to load weights only.
    """

    source: Source
    place: ParallelRank
    model: LiveModel
    chain: Sequence[ChainMember | None]
    problems: Problems = field(default_factory=Problems)
    report: Report = field(default_factory=Report)
    _live: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    _named: dict[tuple[int, str], Named] = field(default_factory=dict)

    def load(self) -> tuple[Load[LocalPart], MegatronStored]:
        """Plan the load; what does not fit is noted in the plan's problems."""
        source, own = self.source, MegatronState.of(self.source)
        states = tuple(state for state in source.states if state != MASTER)
        trained = self.chain if source.optimizer is not None else ()
        apart = states_apart(trained, states, self._is_stored())
        found = slots_of(self.model, trained, states, apart)
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
        order = FROM_MASTERS if self._from_masters() else EITHER
        plan = planned(
            found,
            self._holds,
            source.catalog.states(order).rows(source.model.with_vocabulary(self._rows())),
            self.problems,
        )
        self._note(plan)
        scalars = torch_values(own.scalars) if own else {}
        stored = MegatronStored(torch_values(source.state), states, source.optimizer, scalars, apart=apart)
        return Load.of(source, found, plan, self.report), stored

    def _is_stored(self) -> Callable[[torch.nn.Parameter, str], bool]:
        """Whether the source has a state of a live parameter."""
        at, ep = self.place.at, self.place.parallel.ep
        names = {
            param: self._stored_as(self.model.global_name(chunk, local, at.ep_rank, ep))
            for chunk in self.model.chunks
            for local, param in chunk.parameters().items()
        }
        catalog, role = self.source.catalog, self.source.role
        return lambda param, state: TensorName(role, names[param], state) in catalog

    def _holds(self, slot: Slot[LocalPart]) -> Iterator[TensorEntry]:
        named, stop = self._named.get((slot.owner.vpp_rank, slot.owner.name)), slot.start + slot.record.numel
        if named is not None and slot.record.numel:
            name = TensorName(self.source.role, named.name, slot.state)
            chunks = range_chunks(named.layout, slot.record, slot.start, stop)
            yield slot.entry(name, named.spec.global_shape, chunks)

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
        return replace(spec, global_shape=(rows, *spec.global_shape[1:]))

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
            report.add(Fate.CHANGED, new_rows(old, new))
        elif old is not None and new is not None and new < old:
            report.add(Fate.CHANGED, CUT_ROWS.format(first=new, last=old - 1))
        if _has_opaque(self.source):
            report.add(Fate.CHANGED, "opaque values (_extra_state) belong to ranks of the source and stay this run's")
        if self.chain and self.source.optimizer is not None and MASTER not in self.source.states:
            report.add(Fate.DERIVED, COPIED_MASTERS)
        if self.source.optimizer is not None:
            args, masters = Arguments(self.source.state.args), MASTER in self.source.states
            note_precision(report, self.chain, args, cut=True, masters=masters and not has_remainders(self.source))
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


@dataclass(slots=True)
class MegatronHooks:
    """What Megatron's code takes in a load, and gives back when it is undone.

    Args:
        root: The checkpoint's folder.
        model: The live model.
        chain: Its optimizers.
        optimizer: Whether they are restored, and the schedule; otherwise they begin anew from the weights.
        scheduler: Its scheduler, or None.
        stored: What the checkpoint has besides tensors.
        report: Takes what becomes of it.
        done: Called when the live model is the loaded one.
        whole: The optimizer, where no plan can move it and it is given back as it was saved.
    """

    root: ReadablePath
    model: LiveModel
    chain: Sequence[ChainMember | None]
    optimizer: bool
    scheduler: Any | None
    stored: MegatronStored
    report: Report
    done: Callable[[], None]
    whole: OptimizerLoad | None = None
    _pairs: Sequence[Pair] = ()
    _fields: list[dict[str, object]] = field(default_factory=list)

    def check(self, problems: Problems) -> None:
        """Compare heads, param groups, states and the schedule."""
        problems.extend(other_attention(Arguments(self.stored.state.args), self.model))
        trained = [member for member in self.chain if member is not None]
        if self._restores and trained:
            live = [group for member in trained for group in member.groups]
            self._fields = continued(live, self.stored.state.groups, problems)
            self._check_states(trained, problems)
        self._check_scheduler(problems)
        self._note(trained)

    def install(self, undo: Undo) -> None:
        """Hand over param groups, loss scale, opaque values, the schedule."""
        for member in filter(None, self.chain):
            if not member.opaque:
                undo.optimizer(member.inner)  # the schedule sets learning rates in any case
        self._load_groups(undo)
        if self.whole is not None:
            self._pairs = self.whole.install(undo)
        self._load_opaque(undo)
        self._load_scheduler(undo)

    def fill(self, copy: Callable[[], None]) -> None:
        """Fill; without an optimizer's, masters and moments begin anew from the weights."""
        copy()
        for member in filter(None, self.chain if self._restores else ()):
            member.settle()
        if self.whole is not None:
            fill_places(self.root, self._pairs)
        elif not self._restores:
            for member in filter(None, self.chain):
                member.forget()
        self.done()

    @property
    def _restores(self) -> bool:
        return self.optimizer and self.stored.kind is not None

    def _load_groups(self, undo: Undo) -> None:
        fields, state = iter(self._fields), self.stored.state
        for member in filter(None, self.chain if self._restores else ()):
            own = [next(fields) for _ in member.groups]
            member.load(own, self.stored.of(member), self.stored.scalars)
            if isinstance(state.grad_scaler, dict) and member.scaler is not None:
                undo.handed(member.scaler, state.grad_scaler)

    def _load_opaque(self, undo: Undo) -> None:
        for chunk in self.model.chunks:
            stored, live = self.stored.opaque.get(chunk.vpp_rank, {}), chunk.opaque()
            wanted = {name: stored[name] for name in live if stored.get(name) is not None}
            if wanted:
                before = copied({name: live[name] for name in wanted})
                undo.note(partial(chunk.module.load_state_dict, before, strict=False))
                chunk.module.load_state_dict(wanted, strict=False)

    def _load_scheduler(self, undo: Undo) -> None:
        stored = self.stored.state.scheduler
        if self.scheduler is not None and self.optimizer and stored is not None:
            undo.attributes(self.scheduler, [name for name in vars(self.scheduler) if name != "optimizer"])
            if hasattr(self.scheduler, "num_steps"):
                self.scheduler.num_steps = 0  # Megatron's adds to it
            self.scheduler.load_state_dict(stored)

    def _check_scheduler(self, problems: Problems) -> None:
        """Megatron compares the stored schedule with the live one by assertions: let it do so with a copy."""
        stored = self.stored.state.scheduler
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

    def _check_states(self, trained: Sequence[ChainMember], problems: Problems) -> None:
        for member in trained:
            found = set(self.stored.of(member))
            if member.owned() and not member.may_keep(found):
                problems.add(
                    LayoutMismatch,
                    f"optimizer states: this run's {member.label}, {member.kind}, keeps {sorted(member.states())}, the checkpoint "
                    f"has {sorted(found)} of its parameters",
                    "Load with optimizer=False to begin with fresh optimizer states.",
                )

    def _note(self, trained: Sequence[ChainMember]) -> None:
        for fate, text in self._notes(trained):
            self.report.add(fate, text)

    def _notes(self, trained: Sequence[ChainMember]) -> Iterator[tuple[Fate, str]]:
        state, live = self.stored.state, LAYER_WISE if any(one.layer_wise for one in trained) else kind_of(trained)
        if self.whole is not None:
            yield (
                Fate.KEPT,
                f"optimizer, whole, as this rank saved it: {', '.join(sorted(self.whole.states())) or 'its own'}",
            )
        elif live is not None and self.stored.kind is None:
            yield (
                Fate.DERIVED,
                "no optimizer state in the checkpoint: masters are copies of the weights, moments begin at zero",
            )
        elif live is not None:
            yield Fate.KEPT, "optimizer states and param groups"
            if self.stored.kind != live:
                yield Fate.CHANGED, f"optimizer: {self.stored.kind} → {live}"
        if self.scheduler is not None and self.optimizer:
            kept = state.scheduler is not None
            yield (Fate.KEPT, "learning-rate schedule") if kept else (Fate.NOTE, "no scheduler state in the checkpoint")
        scaled = any(member.scaler is not None for member in trained)
        if scaled and state.grad_scaler is None:
            yield Fate.NOTE, "no loss scale in the checkpoint; this run's stays"
