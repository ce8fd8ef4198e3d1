"""What goes into a DCP folder: every key with its path, and either where its elements come from or its bytes.

``dcp.load`` stops at a key that its caller has and the folder lacks, so that what RLinf's loader asks for and other formats do not have
is made up: a scheduler's state, RNG states, FSDP's version.
Source: RLinf, ``hybrid_engines/fsdp/strategy/checkpoint.py`` (``Checkpoint.state_dict``), ``utils/utils.py`` (``get_rng_state``);
torch 2.13.0, ``optim/lr_scheduler.py`` (``LambdaLR.state_dict``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mcore_rlhf.core.catalog import FLOATING, MASTER, PARAM, DType, Shape, TensorEntry, TensorName, dtype_of
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.errors import Incomplete, Unsupported
from mcore_rlhf.families.crossing.schedule import PER_GROUP
from mcore_rlhf.families.fsdp.groups import PARAMS, check_groups, completed, own_scalars
from mcore_rlhf.families.fsdp.state import (
    BESIDE_OPTIMIZER,
    EPOCH,
    IN_OPTIMIZER,
    RNG,
    SCHEDULERS,
    VERSION,
    counted_at,
    of_iteration,
    placed,
    scheduler_state,
)
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.run_folders import RLINF_FOLDER
from mcore_rlhf.families.source import BASE_LRS, ParamGroup, Source
from mcore_rlhf.storage.dcp.metadata import Path_
from mcore_rlhf.storage.dcp.writer import saved
from mcore_rlhf.storage.torch_values import SmallTensor

from .folders import NEMO_APART, NEMO_RL, NEMO_V2_APART
from .fused import FUSED, FusedParam, fused_again
from .keys import AREAL, KEYS_OF, LAYOUTS, NEMO_V2, RLINF, KeyLayout, Style, flattened, joined
from .state import DcpState

_FSDP2 = "fsdp2"


def for_run(source: Source, options: WriteOptions) -> Source:
    """The source without the keys that it had in another trainer's DCP folder, where one is to load it that knows its own alone.

    Args:
        source: Any source of module names.
        options: Whose run it is for.
    """
    own = DcpState.of(source)
    layout, wanted = own.layout if own else _former_layout(source), LAYOUTS.get(options.run_of.name)
    if wanted is None or layout is None or layout.rest == wanted.rest:
        return source
    return replace(source, family=replace(ModuleState.needed(source, "dcp").base(), laid_out={}))


def rest_of(source: Source, choices: Choices) -> dict[str, object]:
    """Everything beside model and optimizer, as the nested dict that is saved.

    Args:
        source: The source.
        choices: What the target is to be.
    """
    own = DcpState.of(source)
    if choices.bare:
        return {}
    if own is not None:
        return _with_rng(dict(own.rest), source, choices)
    former = _former_layout(source)
    if former is not None:
        return _with_rng(_as_before(source, choices), source, choices)
    rest: dict[str, object] = {}
    if choices.optimizer:
        rest[SCHEDULERS] = [scheduler_state(source)]
    rest[VERSION] = source.state.other.get(VERSION, _FSDP2)
    stored = source.state.other.get(RNG)
    if isinstance(stored, Mapping):
        rest[RNG] = dict(stored)
    return _with_rng(rest, source, choices)


def _former_layout(source: Source) -> KeyLayout | None:
    """How the keys of the DCP folder were made that a source of another format once was; RLinf's are those of any new folder."""
    module = ModuleState.of(source)
    found = None if module is None else KeyLayout.noted(module.laid_out)
    return None if found is None or found.rest == RLINF.rest else found


def _as_before(source: Source, choices: Choices) -> dict[str, object]:
    """What the run kept beside model and optimizer, without what its stay in another format has added."""
    rest = {
        key: value for key, value in counted_at(source.state.other, source.state.iteration).items() if key not in _ADDED
    }
    if choices.optimizer and source.state.scheduler is not None:
        laid_out = ModuleState.needed(source, "dcp").laid_out
        groups = laid_out.get("groups")
        known = isinstance(groups, int) and groups <= len(source.model.params)  # no group is without a parameter
        own = dict(source.state.scheduler) if _keeps_schedule(source) else scheduler_state(source)
        rest |= placed(laid_out.get("scheduler"), _of_run(own, groups if known else None))
    return rest


def _keeps_schedule(source: Source) -> bool:
    """Whether a schedule of several goes back to the trainer that has such ones."""
    at = ModuleState.needed(source, "dcp").laid_out.get("scheduler")
    return at in (IN_OPTIMIZER, BESIDE_OPTIMIZER) and EPOCH in (source.state.scheduler or {})


def _of_run(scheduler: Mapping[str, object], groups: object) -> dict[str, object]:
    """A scheduler of as many groups as the run has whose keys do not say them: Megatron deals them by weight decay."""
    found = scheduler.get(BASE_LRS)
    if not isinstance(groups, int) or not isinstance(found, list) or any(rate != found[0] for rate in found):
        return dict(scheduler)
    return {
        key: value[:1] * groups if isinstance(value, list) and len(value) == len(found) and key in PER_GROUP else value
        for key, value in scheduler.items()
    }


_ADDED = ("skipped_steps", "global_samples")
"""Counters of DeepSpeed's, which every source has that was Megatron's."""


def _with_rng(rest: dict[str, object], source: Source, choices: Choices) -> dict[str, object]:
    if choices.rng == "drop":
        rest.pop(RNG, None)
    elif choices.rng == "derive":
        rest[RNG] = of_iteration(source.state.iteration)
    return rest


@dataclass(frozen=True, slots=True)
class Choices:
    """Decisions about a DCP target.

    Args:
        dp: Parts that every tensor is cut into along its first dimension, and files.
        layout: How keys are made.
        inner: The DCP folder below the target's: ``dcp_checkpoint``, or empty.
        weights: Whether RLinf's plain weights are written beside it.
        optimizer: Whether the optimizer is written.
        masters: Whether the model's tensors are the fp32 masters, as FSDP trains them.
        dtype: What trained parameters become, or None to leave them.
        rng: ``keep``, ``derive`` or ``drop``.
        made: Whether a scheduler of torch's is made up.
        bare: Whether nothing but model and optimizer is in it, as AReaL has it.
        apart: The folders of model and optimizer, where each is a DCP folder of its own; empty where both are in one.
    """

    dp: int
    layout: KeyLayout
    inner: str
    weights: bool
    optimizer: bool
    masters: bool
    dtype: DType | None = None
    rng: str = "keep"
    made: bool = False
    bare: bool = False
    apart: tuple[str, ...] = ()

    def folder_of(self, path: Path_) -> str:
        """The DCP folder, below the target's, in which a key lies."""
        if not self.apart:
            return self.inner
        return self.apart[self.optimizer and self.layout.parse(path).kind != "model"]


def choose(source: Source, options: WriteOptions) -> Choices:
    """Decide what the target is to be.

    Args:
        source: Any source of module names.
        options: What the user asked for.

    Raises:
        Unsupported: The source is of another family.
        Incomplete: Nobody knows the members of the param groups.
    """
    ModuleState.needed(source, "dcp")
    own = DcpState.of(source)
    optimizer = source.optimizer is not None and not options.no_optimizer
    if optimizer:
        check_groups(source)
    former = _former_layout(source)
    usual = LAYOUTS.get(options.run_of.name, RLINF)
    layout, bare = own.layout if own else former or usual, usual is AREAL
    if not optimizer:
        layout = replace(layout, optimizer=None)
    elif layout.optimizer is None:
        layout = replace(layout, optimizer=usual.optimizer)
    known, wanted = own.layout if own else former, KEYS_OF.get(options.run_of.name)
    if wanted is not None and (known is None or not any(known.spells(one) for one in wanted)):
        raise Unsupported(
            f"{source.root}: has not the keys of a run of {options.run_of.name}, which asks for every one of its own when it loads\n"
            + (
                "--like FOLDER, a checkpoint that the run itself wrote, gives them."
                if options.like is None
                else f"Those of --like {options.like} are of another kind, and such runs are read, and not written."
            )
        )
    apart: tuple[str, ...] = ()
    if options.run_of.name == NEMO_RL and known is not None:
        apart = NEMO_V2_APART if known.spells(NEMO_V2) else NEMO_APART
    dtype = None if options.dtype is None else dtype_of(options.dtype)
    dp = options.dp or source.parallel.dp
    was = DcpState.of(source), _former_layout(source)
    anew = was[1] is None or (source.state.scheduler is not None and not _keeps_schedule(source))
    made = was[0] is None and optimizer and anew and not bare
    kept = bare or any(was) or isinstance(source.state.other.get(RNG), Mapping)
    return Choices(
        dp, layout, apart[0] if apart else own.inner if own else RLINF_FOLDER if former is None and not bare else "",
        own.weights if own else former is None and not bare, optimizer, optimizer, dtype,
        options.rng or ("keep" if kept else "derive"), made, bare, apart,
    )  # fmt: skip


def model_dtype(source: Source, choices: Choices, name: str, entry: TensorEntry) -> DType:
    """The type that a tensor of the model is written in.

    Args:
        source: The source.
        choices: What the target is to be.
        name: The parameter, not an alias of it.
        entry: Where its elements come from.
    """
    spec = source.model.get(name)
    if spec is None or spec.dtype not in FLOATING:
        return entry.dtype
    if choices.dtype is not None and spec.trainable:
        return choices.dtype
    return entry.dtype if choices.masters else spec.dtype


@dataclass(frozen=True, slots=True)
class Planned:
    """A tensor that is copied from the source.

    Args:
        path: Its path in the nested state dict.
        name: Its name in the view of the source.
        dtype: What it is written in.
        shape: Its whole shape.
        sharded: Whether it is cut; buffers are not.
    """

    path: Path_
    name: TensorName
    dtype: DType
    shape: Shape
    sharded: bool


@dataclass(frozen=True, slots=True)
class Constant:
    """A small tensor whose bytes are known: a step, a random state."""

    path: Path_
    dtype: DType
    shape: Shape
    data: bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """Something that is not a tensor, as a zip of ``torch.save``."""

    path: Path_
    data: bytes


Part = Planned | Constant | Stored


@dataclass(frozen=True, slots=True)
class Content:
    """Makes the parts of a target, in the order in which torch lists them: model, optimizer, everything else.

    Args:
        source: The source.
        module: Its own view.
        choices: What the target is to be.
        view: The source's catalogue as FSDP sees it.
        rest: Schedulers, RNG states, counters: a nested dict.
        fused: Parameters that the run trains as one with others, and what it calls that.
    """

    source: Source
    module: ModuleState
    choices: Choices
    view: Chunks
    rest: Mapping[str, object]
    fused: Mapping[str, FusedParam] = field(default_factory=dict)

    def parts(self) -> Iterator[Part]:
        """Everything that is written."""
        yield from self.model()
        if self.choices.optimizer:
            yield from self._states()
            yield from self._groups()
        layout = self.choices.layout
        for path, value in flattened(self.rest):
            yield _leaf((*layout.rest, *path), value)

    def model(self) -> Iterator[Planned]:
        """The model's tensors, second names of tied ones too.

        Raises:
            Incomplete: The source lacks one.
        """
        for name in self._names():
            owner = self.module.shared.get(name, name)
            spec = self.source.model.get(owner)
            entry = self.view.get(TensorName(self.source.role, owner, PARAM))
            if spec is None or entry is None:
                raise Incomplete(f"{self.source.root}: {name} of the model is nowhere in it")
            dtype = model_dtype(self.source, self.choices, owner, entry)
            sharded = owner not in self.module.buffers and spec.dtype in FLOATING and entry.global_shape != ()
            wanted = TensorName(self.source.role, name, PARAM)
            yield Planned(self.choices.layout.model_path(name), wanted, dtype, entry.global_shape, sharded)

    def _names(self) -> list[str]:
        """In the module's order, where somebody knows it."""
        there = {spec.name for spec in self.source.model.params} | set(self.module.shared)
        known = [name for name in self.module.order if name in there]
        return list(dict.fromkeys([*known, *(spec.name for spec in self.source.model.params), *self.module.shared]))

    def _states(self) -> Iterator[Part]:
        numbers = {name: n for n, name in enumerate(name for g in self.source.state.groups for name in g.params)}
        scalars = self._scalars()
        for spec in self.source.model.params:
            if spec.trainable and not self._is_later_part(spec.name):
                yield from self._states_of(self._trained_as(spec.name), numbers[spec.name], scalars.get(spec.name, {}))

    def _trained_as(self, name: str) -> str:
        """What the optimizer calls a parameter, or that of which it is a part."""
        return self.fused[name].name if name in self.fused else name

    def _is_later_part(self, name: str) -> bool:
        """Whether another part of the same stands for it."""
        return name in self.fused and name != next(iter(self.fused[name].parts))

    def _states_of(self, param: str, number: int, scalars: Mapping[str, object]) -> Iterator[Part]:
        names = [TensorName(self.source.role, param, state) for state in self.source.states if state != MASTER]
        entries = [entry for name in names if (entry := self.view.get(name)) is not None]
        layout = self.choices.layout
        if entries or DcpState.of(self.source):
            for key, value in scalars.items():
                yield _leaf(layout.state_path(param, key, number), value)
        for entry in entries:
            path = layout.state_path(param, entry.name.state, number)
            yield Planned(path, entry.name, entry.dtype, entry.global_shape, entry.global_shape != ())

    def _scalars(self) -> Mapping[str, Mapping[str, object]]:
        """Every parameter's own, as torch's optimizers keep them."""
        own = DcpState.of(self.source)
        if own and own.scalars:
            return own.scalars
        return {name: own_scalars(group) for group in self.source.state.groups for name in group.params}

    def _groups(self) -> Iterator[Part]:
        layout, counted = self.choices.layout, 0
        cache: dict[str, bytes] = {}
        for number, group in enumerate(self._of_torch()):
            fields = {key: value for key, value in group.fields.items() if key not in group.scalars}
            if layout.style is Style.FLAT:
                for name in dict.fromkeys(map(self._trained_as, group.params)):
                    for key, value in fields.items():
                        yield _leaf(layout.group_path(number, key, name), value, cache)
                continue
            numbers = list(range(counted, counted + len(group.params)))
            members = numbers if layout.style is Style.NUMBERED else list(group.params)
            counted += len(numbers)
            for key, value in {**fields, PARAMS: members}.items():
                yield _leaf(layout.group_path(number, key), value)

    def _of_torch(self) -> Sequence[ParamGroup]:
        """The groups with all fields that torch's loader asks for."""
        own = DcpState.of(self.source)
        if own:
            return own.groups
        groups = self.source.state.groups
        return [ParamGroup(completed(g.fields, g.scalars), g.expert, g.params) for g in groups]


def fused_of(source: Source, choices: Choices) -> dict[str, FusedParam]:
    """By part, the parameters that the run that goes on trains in the place of several; none where it has each by itself."""
    groups = ModuleState.needed(source, "dcp").laid_out.get(FUSED)
    if type(groups) is not int or choices.layout.style is not Style.FLAT or not choices.optimizer:
        return {}
    shapes = {spec.name: spec.global_shape for spec in source.model.params if spec.trainable}
    return {part: fused for fused in fused_again(shapes, groups) if fused.fits for part in fused.parts}


def _leaf(path: Path_, value: object, cache: dict[str, bytes] | None = None) -> Part:
    """A value that is known: a tensor among torch's items for tensors, everything else pickled."""
    if isinstance(value, SmallTensor):
        return Constant(path, value.dtype, value.shape, value.contiguous())
    if cache is None or not isinstance(value, bool | int | float | str | tuple | None):
        return Stored(path, saved(value, joined(path)))
    key = repr(value)  # a learning rate for each parameter: pickled once
    if key not in cache:
        cache[key] = saved(value, joined(path))
    return Stored(path, cache[key])
