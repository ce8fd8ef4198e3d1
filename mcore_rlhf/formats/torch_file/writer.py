"""Describing a new ``state.pt``: a state dict of the model, ``optimizer.state_dict()`` with the names of its numbers, the schedule.

``TorchEngine`` takes the optimizer by name, and a loop's own ``optimizer.load_state_dict`` by position: numbers are dealt by group, and
inside one in the module's order. How many groups a loop has, and who is in which, ``--like`` says with a file that the loop itself saved.
What is neither a number nor a text, nor a tensor or a nest of them, lies beside: ``torch.load(…, weights_only=True)`` would refuse it.
Source: torch 2.13.0, ``optim/optimizer.py`` (``load_state_dict``), ``_weights_only_unpickler.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import (
    FLOATING,
    MASTER,
    PARAM,
    DType,
    TensorName,
    dtype_of,
)
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, Inventory, Item, Kind, Rule
from mcore_rlhf.core.shares import EITHER, FROM_MASTERS
from mcore_rlhf.errors import Incomplete, LayoutMismatch, NotACheckpoint, Problems, Unsupported, UsageError
from mcore_rlhf.families.crossing.schedule import with_fitting_schedule
from mcore_rlhf.families.fsdp.dealing import OF_MEGATRON, dealt
from mcore_rlhf.families.fsdp.groups import PARAMS, STEP, check_groups, completed, own_scalars, torch_class
from mcore_rlhf.families.fsdp.masters import NO_OTHER_PLACE
from mcore_rlhf.families.fsdp.order import ordered
from mcore_rlhf.families.fsdp.state import EPOCH, MADE, scheduler_state
from mcore_rlhf.families.inventory import LEAVES_OUT, inventory_of
from mcore_rlhf.families.module import USE_MUON, ModuleState
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.sidecar import UNHELD, Sidecar
from mcore_rlhf.families.source import ParamGroup, Source, scheduled_groups
from mcore_rlhf.formats.base import FileLayout, PtLayout, Target, TargetFile
from mcore_rlhf.storage.stored import StoredTensor
from mcore_rlhf.storage.torch_values import SmallTensor

from .files import FILE, GROUPS, ITERATION, MODEL, NAME, OPTIMIZER, PARTS, RECORD, SCHEDULER, STATE
from .reader import read_saved

_ADAM = {"exp_avg", "exp_avg_sq"}


def torch_target(source: Source, options: WriteOptions) -> Target:
    """Describe the file that holds what a source of module names has.

    Args:
        source: Of any format under a module's names.
        options: What the user asked for.

    Raises:
        CheckpointError: It cannot be done; all problems together.
    """
    module, report = ModuleState.needed(source, NAME), source.notes.for_target()
    optimizer = source.optimizer is not None and not options.no_optimizer
    like = None if options.like is None else _like(options.like, source.role)
    groups = _dealt(source, module, like, report) if optimizer else ()
    names = {spec.name: spec.name for spec in source.model.params} | dict(module.shared)
    view = source.catalog.renamed(source.role, names).states({PARAM: (FROM_MASTERS if optimizer else EITHER)[PARAM]})
    dtype = None if options.dtype is None else dtype_of(options.dtype)
    described = _TorchTarget(source, module, groups, view, dtype, like)
    described.check()
    report.through(_RULES, described)
    report.lines += [line for line in described.scheduled.notes.lines if line not in report.lines]
    report.through(LEAVES_OUT, options)
    texts, lost = described.sidecar().texts()
    report.through(UNHELD, lost)
    return Target(
        format=NAME,
        source=view,
        files=(TargetFile(FILE, described.layout),),
        texts=texts,
        report=report,
        holds=described.holds(),
    )


def _like(folder: str, role: str) -> Source:
    """The file that a run's own loop saved.

    Raises:
        UsageError: There is none.
    """
    try:
        return read_saved(Path(folder).expanduser(), ReadOptions(role=role))
    except NotACheckpoint:
        raise UsageError(f"--like: {folder} has no {FILE}\nGive the folder of one that the run itself saved.") from None


def _check_same(source: Source, like: Source) -> None:
    """A run's optimizer has the same parameters, of the same shapes.

    Raises:
        UsageError: It has none at all.
        LayoutMismatch: Others; all that differ.
    """
    theirs = [name for group in like.state.groups for name in group.params]
    if not theirs:
        raise UsageError(
            f"--like: {like.root} has no optimizer\nGive the folder of a {FILE} that the run saved with one."
        )
    ours, problems = {name for group in source.state.groups for name in group.params}, Problems()
    for name in sorted(ours.symmetric_difference(theirs)):
        where, lacks = (source.root, like.root) if name in ours else (like.root, source.root)
        problems.add(LayoutMismatch, f"--like: the optimizer of {where} trains {name}, that of {lacks} does not")
    for name in sorted(ours.intersection(theirs)):
        shape, other = source.model.shapes[name], like.model.shapes[name]
        if shape != other:
            problems.add(LayoutMismatch, f"--like: {name} has the shape {list(shape)}, in {like.root} {list(other)}")
    problems.raise_if_any()


def _dealt(source: Source, module: ModuleState, like: Source | None, report: Report) -> tuple[ParamGroup, ...]:
    """The target's param groups: those of the run that is named; or the source's, with parameters as the module has them.

    Raises:
        CheckpointError: Nobody knows their members, or the run has others.
    """
    check_groups(source)
    if source.format == NAME and like is None:
        return source.state.groups
    order, strange = ordered([spec.name for spec in source.model.params], module.config, module.order)
    order += strange
    if like is not None:
        _check_same(source, like)
        return dealt(source, order, like.state.groups, report, ())
    report.through([_NO_ORDER], strange)
    places = {name: at for at, name in enumerate(order)}
    return tuple(
        replace(group, params=tuple(sorted(group.params, key=places.__getitem__))) for group in source.state.groups
    )


@dataclass
class _TorchTarget:
    source: Source
    module: ModuleState
    groups: tuple[ParamGroup, ...]
    view: Chunks
    dtype: DType | None
    like: Source | None

    @property
    def optimizer(self) -> bool:
        """Whether there is to be one."""
        return bool(self.groups)

    def check(self) -> None:
        """Everything that torch could not load.

        Raises:
            Incomplete: The source lacks a tensor.
            Unsupported: No optimizer of torch's keeps such states.
        """
        problems = Problems()
        for name in self._names():
            if self.view.get(TensorName(self.source.role, name)) is None:
                problems.add(Incomplete, f"{self.source.root}: {name} of the model is nowhere in it")
        if self.optimizer and not self.kind:
            states = ", ".join(state for state in self.source.states if state != MASTER) or "no states"
            muon = " of Muon's parameters and of Adam's" if self._of_muon() else ""
            problems.add(
                Unsupported,
                f"{self.source.root}: its optimizer keeps {states}{muon}, and no class of torch's is known that does",
                f"--like FOLDER, with a {FILE} that the run itself saved, says which it has; --no-optimizer writes the weights alone.",
            )
        problems.raise_if_any()

    @cached_property
    def kind(self) -> str:
        """The class of the run's optimizer; empty where nobody knows one."""
        for known in (self.like, self.source):
            if known is not None and (known.optimizer or "").startswith(f"{NAME} "):
                return str(known.optimizer).removeprefix(f"{NAME} ")
        fields = [completed(group.fields, group.scalars) for group in self.source.state.groups]
        shown = {torch_class(group.fields) for group in self.source.state.groups}
        begun = {*self.source.states} - {MASTER}  # before the first step there are no states
        adam = shown <= {"", "Adam"} if begun >= _ADAM else not begun and shown == {"Adam"}
        if adam and not self._of_muon():
            return "AdamW" if all(of.get("decoupled_weight_decay") for of in fields) else "Adam"
        return "".join(shown - {"Adam"}) if len(shown) == 1 else ""

    def _of_muon(self) -> bool:
        return any(USE_MUON in group.fields for group in self.source.state.groups)

    def layout(self) -> FileLayout:
        """The whole file, laid out when it is written."""
        file = PtLayout(FILE)
        tree: dict[str, object] = {MODEL: self._model(file)}
        if self.optimizer:
            tree[OPTIMIZER], tree[RECORD] = self._optimizer(file), self._record()
        return file.layout({**tree, **self.parts})

    def _names(self) -> list[str]:
        """Keys of the state dict, second names among them, in the module's order as far as it is known."""
        there = [*(spec.name for spec in self.source.model.params), *self.module.shared]
        return list(dict.fromkeys([*(name for name in self.module.order if name in set(there)), *there]))

    def _model(self, file: PtLayout) -> dict[str, StoredTensor]:
        """The state dict; what is tied is stored once."""
        found: dict[str, StoredTensor] = {}
        for name in self._names():
            owner = self.module.shared.get(name, name)
            if name != owner and owner in found:
                found[name] = found[owner]
                continue
            tensor = self.view.tensor(TensorName(self.source.role, name))
            found[name] = file.add(TensorName(self.source.role, name), tensor.shape, self._dtype(owner, tensor.dtype))
        return found

    def _dtype(self, name: str, stored: DType) -> DType:
        """What is trained is written as the optimizer trains it: in fp32 where there are masters."""
        spec = self.source.model.get(name)
        if spec is None or spec.dtype not in FLOATING or not spec.trainable:
            return stored
        return self.dtype or (stored if self.optimizer else spec.dtype)

    def _optimizer(self, file: PtLayout) -> dict[str, object]:
        states: dict[int, object] = {}
        groups: list[dict[str, object]] = []
        scalars = {name: own_scalars(group) for group in self.source.state.groups for name in group.params}
        number = 0
        for group in self.groups:
            first = number
            for name in group.params:
                held = dict(self._states(file, name))
                if held or (scalars.get(name) and self.source.format == NAME):
                    states[number] = {**scalars.get(name, {}), **held}
                number += 1
            groups.append({**self._fields(group), PARAMS: list(range(first, number))})
        return {STATE: states, GROUPS: groups}

    def _states(self, file: PtLayout, name: str) -> Iterator[tuple[str, StoredTensor]]:
        for state in self.source.states:
            key = TensorName(self.source.role, name, state)
            if state != MASTER and key in self.view:
                tensor = self.view.tensor(key)
                yield state, file.add(key, tensor.shape, tensor.dtype)

    def _fields(self, group: ParamGroup) -> dict[str, object]:
        """A group's fields, with those that torch's Adam asks for; its step is of each parameter."""
        if self.source.format == NAME or not {*self.source.states} >= _ADAM:
            fields = {key: value for key, value in group.fields.items() if key not in group.scalars}
        else:
            fields = completed(group.fields, (*group.scalars, STEP))
        return {key: value for key, value in fields.items() if key not in OF_MEGATRON and _is_loadable(value)}

    def _record(self) -> dict[str, object]:
        shapes = self.source.model.shapes
        return {
            "class": self.kind,
            "names": [list(group.params) for group in self.groups],
            "shapes": [[list(shapes[name]) for name in group.params] for group in self.groups],
        }

    @cached_property
    def scheduled(self) -> Source:
        """The source with a schedule that has a learning rate for each of the groups."""
        seen = replace(self.source, state=replace(self.source.state, groups=self.groups))
        rates = scheduled_groups(seen.state.scheduler)
        return seen if not self.optimizer or rates in (None, 0, len(self.groups)) else with_fitting_schedule(seen)

    @cached_property
    def parts(self) -> dict[str, object]:
        """Everything besides model and optimizer: the schedule, and what the source has under keys of its own."""
        found: dict[str, object] = {}
        stored = self.source.state.scheduler
        if self.optimizer:
            own = self.scheduled.state.scheduler or {}
            state = own if EPOCH in own else scheduler_state(self.scheduled)
            made = {key: value for key, value in state.items() if _is_loadable(value)}
            run = {} if self.like is None else dict(self.like.state.scheduler or {})
            found[SCHEDULER] = {**run, **made}
        elif stored is not None and self.source.format == NAME:
            found[SCHEDULER] = {key: value for key, value in stored.items() if _is_loadable(value)}
        return {**found, ITERATION: self.source.state.iteration, **self.own}

    @cached_property
    def own(self) -> dict[str, object]:
        """Values under keys of their own that any script can read."""
        other = self.source.state.other.items()
        return {key: value for key, value in other if key not in PARTS and _is_loadable(value)}

    def sidecar(self) -> Sidecar:
        """What the file has no place for."""
        other = {key: value for key, value in self.source.state.other.items() if key not in self.own}
        state = replace(self.source.state, other=other)
        specs, dtype = self.source.model.params, self.dtype
        dtypes = {s.name: dtype if dtype is not None and s.trainable else s.dtype for s in specs}
        return Sidecar.of(state, self.module.base(), specs, self.source.origin, dtypes=dtypes if self.optimizer else {})

    def holds(self) -> Inventory:
        """Everything: what the file has no place for lies beside it."""
        return inventory_of(self.source)


_PLAIN = (bool, int, float, str, bytes, type(None))


def _is_loadable(value: object) -> bool:
    """Whether ``torch.load(…, weights_only=True)`` reads it in any release, and any script understands it."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(map(_is_loadable, value)) and all(map(_is_loadable, value.values()))
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_is_loadable, value))
    return type(value) in _PLAIN or isinstance(value, SmallTensor)


def _halves(t: _TorchTarget) -> list[DType]:
    """Types of parameters that their model computes in, where their masters are written."""
    if not t.optimizer or t.dtype is not None or MASTER not in t.source.states:
        return []
    return [s.dtype for s in t.source.model.params if s.trainable and s.dtype in FLOATING and s.dtype.itemsize == 2]


_NO_ORDER: Rule[Sequence[str]] = Rule(
    Fate.NOTE,
    "the optimizer's numbers: nobody knows where the module has {found:3}; TorchEngine takes them by name, a loop's own "
    "load_state_dict by position: --like FOLDER gives the run's own order",
    list,
)
_RULES: tuple[Rule[_TorchTarget], ...] = (
    MADE.of_part(lambda t: t.scheduled if t.optimizer and EPOCH not in (t.scheduled.state.scheduler or {}) else None),
    Rule(Fate.LOST, NO_OTHER_PLACE,
         lambda t: t.optimizer and t.dtype is not None and t.dtype.itemsize != 4 and MASTER in t.source.states and t.dtype,
         [Item(Kind.TENSOR, MASTER)]),
    Rule(Fate.DERIVED, "parameters: the fp32 masters, which a loop trains and rounds as it computes (autocast); {found[0]} is written "
         "nowhere; --dtype gives a model of that type, without masters", _halves),
    Rule(Fate.NOTE, "param groups, their order and the schedule's own fields: as in {0.like.root}", lambda t: t.optimizer and t.like),
)  # fmt: skip
