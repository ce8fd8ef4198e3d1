"""Describing a new native DeepSpeed checkpoint from an opened source of the DeepSpeed family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from mcore_rlhf.core.account import ANY, Fate, Inventory, Item, Kind, Reason, Report
from mcore_rlhf.core.catalog import FLOAT32, FLOATING, MASTER, PARAM, DType, TensorName
from mcore_rlhf.core.views import EITHER, FROM_MASTERS, Remembered, StateOrder
from mcore_rlhf.errors import Incomplete, Problems, Unsupported
from mcore_rlhf.families.inventory import LEFT_OUT, OF_OPTIMIZER, inventory_of
from mcore_rlhf.families.module import MOMENTUM, USE_MUON, ModuleState
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.families.universal_info import INFO
from mcore_rlhf.formats.base import FileLayout, Target, TargetFile
from mcore_rlhf.formats.carried import AT_THE_TOP
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage.pt import Pt

from .files import LATEST, layer_name, model_name, model_name_of_rank, optim_name
from .layout import NewFile, TagLayout, zero_config
from .reader import DeepSpeedState, only_of_the_first
from .state_dicts import StateDict, layer_states, model_states, optim_states
from .tag import expert_name

_Content = Callable[[NewFile], StateDict]
_KEYS = Item(Kind.MODEL, "keys")
"""How a universal checkpoint's tensors were cut."""


def deepspeed_target(source: Source, options: WriteOptions) -> Target:
    """Describe the native checkpoint of a stage and data-parallel degree that holds what the source has.

    Args:
        source: An opened checkpoint of DeepSpeed's, native or universal.
        options: What the user asked for.

    Raises:
        CheckpointError: It cannot be done; all problems together.
    """
    family = ModuleState.needed(source, "deepspeed")
    if any(expert_name(spec.name) is not None for spec in source.model.params):
        raise Unsupported(
            f"{source.root}: native files of a model with DeepSpeed's own experts are read, and not written\n"
            "Convert it --to universal, which has every expert under its global number."
        )
    report = source.notes.for_target()
    zero = zero_config(source, family, options, report)
    if options.no_optimizer and source.format not in AT_THE_TOP:
        report.add(Fate.LOST, LEFT_OUT, *OF_OPTIMIZER)  # a source of which it was not read does not say that it has one
    if zero.optimizer:
        _check_masters(source)
    tag = TagLayout(
        source=source,
        family=family,
        zero=zero,
        model=source.model.having(_cast(spec, zero.dtype, family.buffers) for spec in source.model.params),
        states=(MASTER, *(state for state in source.states if state != MASTER)) if zero.optimizer else (),
        catalog=Remembered(StateOrder(source.catalog, EITHER if zero.dtype is None else FROM_MASTERS)),
    )
    _note(tag, report)
    parallel = ParallelConfig(tp=zero.tp, pp=zero.pp, etp=zero.tp, dp=zero.dp)
    files = tuple(_files(tag))
    return Target(
        format="deepspeed",
        parallel=parallel,
        source=tag.catalog,
        files=files,
        texts={LATEST: zero.tag},
        report=report,
        holds=_holds(tag, report),
    )


def _cast(spec: ParamSpec, dtype: DType | None, buffers: tuple[str, ...]) -> ParamSpec:
    """A parameter with the target's dtype, which buffers and integers do not take."""
    return spec if dtype is None or spec.name in buffers or spec.dtype not in FLOATING else replace(spec, dtype=dtype)


def _check_masters(source: Source) -> None:
    """16-bit weights are not as exact as the masters that ZeRO needs."""
    problems = Problems()
    for spec in source.model.params:
        if spec.trainable and not _has(source, spec, MASTER):
            param = source.catalog.get(TensorName(source.role, spec.name, PARAM))
            if param is None or param.dtype != FLOAT32:
                text = f"{spec.name}: has no fp32 master weights in {source.root}"
                problems.add(Incomplete, text, "--no-optimizer --zero-stage 0 converts the weights alone.")
    problems.raise_if_any()


def _has(source: Source, spec: ParamSpec, state: str) -> bool:
    return source.catalog.get(TensorName(source.role, spec.name, state)) is not None


def _holds(tag: TagLayout, report: Report) -> Inventory:
    """Everything that is carried; ``ds_config`` says the stage that is written."""
    report.settle(Fate.DERIVED, "with the stage that is written", Item(Kind.ARGUMENT, "zero_optimization"))
    cut = [_KEYS] if tag.zero.tp == tag.source.parallel.tp else [_KEYS, Item(Kind.VALUE, INFO)]
    report.leave(Reason.OF_LAYOUT, *cut)
    held = {item: value for item, value in inventory_of(tag.source).items() if item not in cut}
    if tag.zero.optimizer:
        return held
    return {item: value for item, value in held.items() if item._replace(name=ANY) not in OF_OPTIMIZER}


def _files(tag: TagLayout) -> Iterator[TargetFile]:
    """Optimizer files first: they are the large ones."""
    zero = tag.zero
    ranks = [(dp_rank, mp_rank) for mp_rank in range(zero.mp) for dp_rank in range(zero.dp)]
    for dp_rank, mp_rank in ranks if zero.optimizer and zero.stage > 0 else ():
        name = optim_name(dp_rank, mp_rank, zero.prefix)
        yield _file(tag, name, partial(optim_states, dp_rank=dp_rank, mp_rank=mp_rank))
    for dp_rank, mp_rank in ranks if zero.stage == 3 else [(0, mp_rank) for mp_rank in range(zero.mp)]:
        name = model_name_of_rank(dp_rank, mp_rank) if zero.stage == 3 else model_name(mp_rank)
        yield _file(tag, name, partial(model_states, dp_rank=dp_rank, mp_rank=mp_rank))
    layers: dict[str, TargetFile] = {}
    for mp_rank, module in enumerate(tag.modules):
        for layer, keys in module.layers.items():
            name = layer_name(layer, mp_rank % zero.tp, zero.tp)
            layers.setdefault(name, _file(tag, name, partial(layer_states, keys=keys, mp_rank=mp_rank)))
    yield from layers.values()


def _file(tag: TagLayout, name: str, content: _Content) -> TargetFile:
    path = f"{tag.zero.tag}/{name}"
    return TargetFile(path, partial(_lay_out, tag, path, content))


def _lay_out(tag: TagLayout, path: str, make: _Content) -> FileLayout:
    file = NewFile(path, tag)
    content = make(file)  # which also notes the records
    return FileLayout(file.holds, file.records, Pt.of(content))


def _note(tag: TagLayout, report: Report) -> None:
    """Say what changes, what is made and what is left out."""
    source, zero = tag.source, tag.zero
    was = (source.optimizer or "weights alone").replace("zero", "ZeRO ")
    now = f"ZeRO {zero.stage}" if zero.optimizer else "weights alone"
    if (was, source.parallel.dp) != (now, zero.dp):
        report.add(Fate.CHANGED, f"{was} on DP {source.parallel.dp} becomes {now} on DP {zero.dp}")
    if zero.tp != source.parallel.tp:
        report.add(Fate.CHANGED, f"TP {source.parallel.tp} becomes TP {zero.tp}; values of rank 0 stand for all")
    if zero.stage == 3 and source.optimizer != "zero3":
        size = f"{zero.sub_group_size:,} elements"
        report.add(Fate.NOTE, f"stage 3: sub-groups of {size}; the run that loads it needs the same sub_group_size")
    if zero.optimizer and MASTER not in source.states:
        report.add(Fate.DERIVED, "fp32 masters: copies of the fp32 parameters")
    if zero.optimizer and zero.stage == 0 and not zero.half and MASTER in source.states:
        text = "fp32 masters: not kept apart, since stage 0 trains the fp32 parameters themselves"
        report.add(Fate.DERIVED, text)
    _note_parameters(tag, report)
    _note_momenta(tag, report)
    _note_missing_states(tag, report)
    _note_ranks(tag, report)
    if not zero.optimizer and source.optimizer is not None:
        report.add(Fate.LOST, LEFT_OUT, *OF_OPTIMIZER)


def _note_parameters(tag: TagLayout, report: Report) -> None:
    dtype, masters = tag.zero.dtype, MASTER in tag.source.states
    if dtype is not None and any(s.dtype != dtype for s in tag.source.model.params if s.trainable):
        kept = masters and tag.zero.optimizer
        text = f"parameters: converted to {dtype}" + (" from their fp32 masters, which are kept" if kept else "")
        report.add(Fate.DERIVED if kept else Fate.LOST, text)
    elif tag.source.optimizer == "zero3" and tag.zero.stage < 3:
        report.add(Fate.DERIVED, "parameters: rounded from their fp32 masters, since stage 3 does not store them")


def _note_momenta(tag: TagLayout, report: Report) -> None:
    """Two runs of one stage keep Muon's momenta in two ways, and DeepSpeed does not notice the other one."""
    if tag.zero.stage in (1, 2) and any(group.fields.get(USE_MUON) is True for group in tag.groups):
        kept = "cut as all other states" if tag.zero.flat_momentum else "in whole parameters"
        whose = "BF16_Optimizer or an" if tag.zero.flat_momentum else "neither BF16_Optimizer nor an"
        report.add(
            Fate.NOTE,
            f"{MOMENTUM} of DeepSpeed's Muon: {kept}, for a run with {whose} offloaded optimizer, as ds_config says",
        )


def _note_missing_states(tag: TagLayout, report: Report) -> None:
    """States that some parameters have and others of their group do not: ZeRO has them all, as zeros."""
    missing = []
    for group in tag.groups:
        members = [spec for name in group.params if (spec := tag.source.model.get(name)) is not None]
        for state in tag.states[1:]:
            without = [spec.name for spec in members if not _has(tag.source, spec, state)]
            if len(without) < len(members):  # else the group is trained without it
                missing += [f"{name} ({state})" for name in without]
    if missing and tag.zero.stage > 0:
        report.add(Fate.DERIVED, f"zeros for states that were never made: {', '.join(missing[:3])}")


def _note_ranks(tag: TagLayout, report: Report) -> None:
    """Stage 3 has client state of every rank, which other ranks have no use for."""
    own = DeepSpeedState.of(tag.source)
    if own is None or own.opened is None or not own.opened.sliced or tag.same_ranks:
        return
    if own.apart:
        report.add(Fate.LOST, only_of_the_first(own.apart), *(Item(Kind.VALUE, key) for key in own.apart))
