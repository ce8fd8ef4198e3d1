"""Describing a new native DeepSpeed checkpoint from an opened source of the DeepSpeed family: its files, and the dictionaries around
their tensors, as DeepSpeed saves them.

Source: deepspeed 0.19.8, ``runtime/engine.py`` (``_save_checkpoint``, ``_save_zero_checkpoint``),
``runtime/pipe/module.py`` (``save_state_dict``), ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py``,
``runtime/bf16_optimizer.py``, ``runtime/fp16/unfused_optimizer.py``, ``runtime/fp16/fused_optimizer.py`` (``state_dict``).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mcore_rlhf.core.catalog import FLOAT32, FLOATING, MASTER, PARAM, DType, TensorName
from mcore_rlhf.core.facts import ANY, Fate, Inventory, Item, Kind, Reason, Rule, Values
from mcore_rlhf.core.shares import EITHER, FROM_MASTERS
from mcore_rlhf.errors import Incomplete, Problems, Unsupported
from mcore_rlhf.families.inventory import (
    COPIED_MASTERS,
    FROM_ZERO3,
    LEAVES_OUT,
    LEFT_OUT,
    NEVER_MADE,
    OF_OPTIMIZER,
    UNUSED,
    inventory_of,
)
from mcore_rlhf.families.lora.names import in_memory
from mcore_rlhf.families.module import MOMENTUM, USE_MUON, ModuleState, is_dynamic, loose_values, static_scaler
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.source import ParamGroup, Source
from mcore_rlhf.families.universal_info import INFO
from mcore_rlhf.formats.base import FileLayout, Target, TargetFile
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.zero import BorderGroup, FlatGroup
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage.stored import StoredTensor, new_stub, stub_class
from mcore_rlhf.storage.torch_values import SmallTensor, TorchSize

from .files import LATEST, expert_name, layer_name, model_name, model_name_of_rank, optim_name, section
from .layout import ModelRankParam, NewFile, NewFlatGroup, TagLayout, zero_config
from .reader import APART, DeepSpeedState

StateDict = dict[str, Any]
_ADDRESS = "deepspeed.utils.tensor_fragment.fragment_address"
_STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
_VERSION = "0.19.8"
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
    zero = zero_config(source, family, options)
    if not (
        source.carried and source.carried.of_model
    ):  # a source of which it was not read does not say that it has one
        report.through(LEAVES_OUT, options)
    if zero.optimizer:
        _check_masters(source)
    tag = TagLayout(
        source=source,
        family=family,
        zero=zero,
        model=source.model.having(_cast(spec, zero.dtype, family.buffers) for spec in source.model.params),
        states=(MASTER, *(state for state in source.states if state != MASTER)) if zero.optimizer else (),
        catalog=source.catalog.states(EITHER if zero.dtype is None else FROM_MASTERS),
    )
    report.through(_RULES, tag)
    if source.optimizer is None and not options.no_optimizer:
        report.through(UNUSED, source)
    parallel = ParallelConfig(tp=zero.tp, pp=zero.pp, etp=zero.tp, dp=zero.dp)
    files = tuple(_files(tag))
    return Target(
        format="deepspeed",
        parallel=parallel,
        source=tag.catalog,
        files=files,
        texts={LATEST: zero.tag},
        report=report,
        holds=_holds(tag),
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
    return TensorName(source.role, spec.name, state) in source.catalog


def _of_cut(tag: TagLayout) -> list[Item]:
    """What says how the source's own files were cut."""
    return [_KEYS] if tag.zero.tp == tag.source.parallel.tp else [_KEYS, Item(Kind.VALUE, INFO)]


def _holds(tag: TagLayout) -> Inventory:
    """Everything that is carried; ``ds_config`` says the stage that is written."""
    cut = _of_cut(tag)
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
    file = NewFile(path, tag=tag)
    return file.layout(make(file))  # which also notes the records


def _kind(tag: TagLayout) -> Values | None:
    """What the source is, and what is written, where these are two things."""
    was = (tag.source.optimizer or "weights alone").replace("zero", "ZeRO ")
    now = f"ZeRO {tag.zero.stage}" if tag.zero.optimizer else "weights alone"
    return None if (was, tag.source.parallel.dp) == (now, tag.zero.dp) else {"was": was, "now": now}


def _rounds(tag: TagLayout) -> bool:
    """Whether parameters are to be of another type than in the source."""
    dtype = tag.zero.dtype
    return dtype is not None and any(s.dtype != dtype for s in tag.source.model.params if s.trainable)


def _muon(tag: TagLayout) -> Values | None:
    """Two runs of one stage keep Muon's momenta in two ways, and DeepSpeed does not notice the other one."""
    if tag.zero.stage not in (1, 2) or not any(group.fields.get(USE_MUON) is True for group in tag.groups):
        return None
    kept = "cut as all other states" if tag.zero.flat_momentum else "in whole parameters"
    return {
        "kept": kept,
        "whose": "BF16_Optimizer or an" if tag.zero.flat_momentum else "neither BF16_Optimizer nor an",
    }


def _never_made(tag: TagLayout) -> list[str]:
    """States that some parameters have and others of their group do not: ZeRO has them all, as zeros."""
    missing = []
    for group in tag.groups if tag.zero.stage > 0 else ():
        members = [spec for name in group.params if (spec := tag.source.model.get(name)) is not None]
        for state in tag.states[1:]:
            without = [spec.name for spec in members if not _has(tag.source, spec, state)]
            if len(without) < len(members):  # else the group is trained without it
                missing += [f"{name} ({state})" for name in without]
    return missing


_RULES: tuple[Rule[TagLayout], ...] = (
    Rule(Fate.NOTE, "stage 0: ds_config asks for Adam, which is FusedAdam on a GPU: written as its flat groups",
         lambda t: t.zero.fused and t.source.optimizer != "zero0"),
    Rule(Fate.CHANGED, "{was} on DP {0.source.parallel.dp} becomes {now} on DP {0.zero.dp}", _kind),
    Rule(Fate.CHANGED, "TP {0.source.parallel.tp} becomes TP {0.zero.tp}; values of rank 0 stand for all",
         lambda t: t.zero.tp != t.source.parallel.tp),
    Rule(Fate.NOTE, "stage 3: sub-groups of {0.zero.sub_group_size:,} elements; the run that loads it needs the same sub_group_size",
         lambda t: t.zero.stage == 3 and t.source.optimizer != "zero3"),
    Rule(Fate.DERIVED, COPIED_MASTERS, lambda t: t.zero.optimizer and MASTER not in t.source.states),
    Rule(Fate.DERIVED, "fp32 masters: not kept apart, since stage 0 trains the fp32 parameters themselves",
         lambda t: t.zero.optimizer and t.zero.stage == 0 and not t.zero.half and MASTER in t.source.states, [Item(Kind.TENSOR, MASTER)]),
    Rule(Fate.DERIVED, FROM_ZERO3, lambda t: not _rounds(t) and t.source.optimizer == "zero3" and t.zero.stage < 3),
    Rule(Fate.NOTE, MOMENTUM + " of DeepSpeed's Muon: {kept}, for a run with {whose} offloaded optimizer, as ds_config says", _muon),
    Rule(Fate.DERIVED, NEVER_MADE, _never_made),
    APART.of_part(lambda t: None if t.same_ranks else DeepSpeedState.of(t.source)),
    Rule(Fate.LOST, LEFT_OUT, lambda t: not t.zero.optimizer and t.source.optimizer is not None, OF_OPTIMIZER),
    Rule(Fate.DERIVED, "with the stage that is written", of=[Item(Kind.ARGUMENT, "zero_optimization")], told=False),
    Rule(Reason.OF_LAYOUT, when=lambda t: {"of": _of_cut(t)}),
)  # fmt: skip
"""What becomes of a source, what is made, and what is left out."""


def model_states(file: NewFile, dp_rank: int, mp_rank: int) -> StateDict:
    """The content of a ``…model_states.pt``.

    Args:
        file: Takes down its records.
        dp_rank: Data-parallel rank; 0 outside of stage 3.
        mp_rank: Model-parallel rank.
    """
    tag = file.tag
    family, state, zero = tag.family, tag.source.state, tag.zero
    local, other = tag.local(mp_rank), tag.other_values(dp_rank, mp_rank)
    tensors = {} if family.pipeline else _module_tensors(file, local)
    frozen = [param for param in local if not param.spec.trainable and param.spec.name not in family.buffers]
    fragments = _frozen_fragments(file, frozen, tensors, dp_rank)
    alone = not frozen and any(in_memory(param.spec.name) is not None for param in local)  # adapters without their base
    stored = (
        zero.stage >= 2 and not family.without_frozen and not alone
    )  # in a dictionary that is there it looks for each
    first = zero.stage > 0 and dp_rank == 0 and mp_rank == 0
    content: StateDict = {
        "module": None if family.pipeline else _module(tag, tensors, mp_rank),
        "buffer_names": [param.spec.name for param in local if param.spec.name in family.buffers],
        "optimizer": _stage0_optimizer(file, mp_rank) if zero.optimizer and zero.stage == 0 else None,
        "param_shapes": [_shapes(group.params) for group in tag.flat_groups(mp_rank)] if zero.optimizer else None,
        "frozen_param_shapes": _shapes(frozen) if stored else None,
        "shared_params": (dict(family.shared) if first else {}) if zero.stage > 0 else None,
        "frozen_param_fragments": fragments if stored else None,
        "lr_scheduler": copy.deepcopy(state.scheduler),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": state.iteration,
        "global_samples": other.get("global_samples", 0),
        "dp_world_size": zero.dp,
        "mp_world_size": zero.mp,
        "checkpoint_parallel_dimensions": {"pp_degree": zero.pp, "tp_degree": zero.tp},
        "ds_config": _config(tag),
        "ds_version": _VERSION,
    }
    content.update(other)
    return content


def layer_states(file: NewFile, keys: Mapping[str, str], mp_rank: int) -> StateDict:
    """The content of a ``layer_XX-model_states.pt``.

    Args:
        file: Takes down its records.
        keys: Global name by key.
        mp_rank: A model-parallel rank that has the layer.
    """
    local = {param.spec.name: param for param in file.tag.local(mp_rank)}
    opaque = file.tag.modules[mp_rank].opaque
    return OrderedDict(
        (key, file.whole(local[name], PARAM, local[name].spec.dtype) if name in local else opaque[name])
        for key, name in keys.items()
    )


def optim_states(file: NewFile, dp_rank: int, mp_rank: int) -> StateDict:
    """The content of an ``…optim_states.pt`` of stages 1 to 3.

    Args:
        file: Takes down its records.
        dp_rank, mp_rank: The rank.
    """
    groups = file.tag.flat_groups(mp_rank)
    partitioned = _stage3_optimizer if file.tag.zero.stage == 3 else _stage_1_and_2_optimizer
    return {
        "optimizer_state_dict": partitioned(file, groups, dp_rank),
        "ds_config": _config(file.tag),
        "ds_version": _version(file.tag),
    }


def _config(tag: TagLayout) -> StateDict:
    """The run's own ``ds_config``, with the stage that is written."""
    config = copy.deepcopy(dict(tag.source.state.args))
    config["zero_optimization"] = {**section(config, "zero_optimization"), "stage": tag.zero.stage}
    return config


def _version(tag: TagLayout) -> object:
    """The version of DeepSpeed that the run had."""
    return tag.source.state.other.get("ds_version", _VERSION)


def _module_tensors(file: NewFile, local: Sequence[ModelRankParam]) -> StateDict:
    """Stage 3 has buffers only; its parameters are empty."""
    tensors: StateDict = {}
    for param in local:
        kept = file.tag.zero.stage < 3 or param.spec.name in file.tag.family.buffers
        tensors[param.spec.name] = file.whole(param, PARAM, param.spec.dtype) if kept else _empty(param)
    return tensors


def _module(tag: TagLayout, tensors: Mapping[str, object], mp_rank: int) -> StateDict:
    """The state dict, in the module's own order where that is known."""
    opaque = tag.modules[mp_rank].opaque if tag.modules else {}
    shared = {alias: tensors[owner] for alias, owner in tag.family.shared.items() if owner in tensors}
    values = {**tensors, **shared, **opaque}
    return OrderedDict((name, values[name]) for name in dict.fromkeys([*tag.family.order, *values]) if name in values)


def _frozen_fragments(
    file: NewFile, frozen: Sequence[ModelRankParam], tensors: Mapping[str, object], dp_rank: int
) -> StateDict:
    if file.tag.zero.stage < 3:
        return OrderedDict((param.spec.name, tensors.get(param.spec.name)) for param in frozen)
    return OrderedDict((param.spec.name, file.frozen_slice(param, dp_rank)) for param in frozen)


def _shapes(params: Sequence[ModelRankParam]) -> StateDict:
    return OrderedDict((param.spec.name, TorchSize(param.layout.shape)) for param in params)


def _empty(param: ModelRankParam) -> object:
    return SmallTensor.empty(param.spec.dtype)


def _stage_1_and_2_optimizer(file: NewFile, groups: Sequence[NewFlatGroup], rank: int) -> StateDict:
    tag = file.tag
    own = tag.zero.bf16_optimizer
    parts = _partitions(file, groups, rank, lean=not own)
    content: StateDict = {} if own else _loss_scaler(tag)
    if (clip_grad := _clip_grad(tag)) is not None:  # without it, the engine keeps its own configuration's
        content["clip_grad"] = clip_grad
    content["base_optimizer_state"] = _torch_optimizer(tag, groups, parts)
    content["single_partition_of_fp32_groups"] = [part[MASTER] for part in parts]
    if not own:
        content["zero_stage"] = stub_class(_STAGE)(tag.zero.stage)
    content["group_paddings"] = [group.geometry.padding(rank) for group in groups]
    if not own:
        content["param_alignment_paddings"] = [_gaps(group) for group in groups]
    content["partition_count"] = [tag.zero.dp] * len(groups)
    content["ds_version"] = _version(tag)
    content["param_slice_mappings"] = [_param_slice_mapping(group, rank) for group in groups]
    return content


def _stage3_optimizer(file: NewFile, groups: Sequence[NewFlatGroup], rank: int) -> StateDict:
    parts = _partitions(file, groups, rank, lean=False)
    return {
        "zero_stage": stub_class(_STAGE)(3),
        **_loss_scaler(file.tag),
        "partition_count": file.tag.zero.dp,
        "optimizer_state_dict": _torch_optimizer(file.tag, groups, parts),
        "fp32_flat_groups": [part[MASTER] for part in parts],
    }


def _stage0_optimizer(file: NewFile, mp_rank: int) -> StateDict:
    """Torch's own state dict, wrapped where there are masters."""
    tag = file.tag
    if tag.zero.fused:
        return _fused_optimizer(file, tag.flat_groups(mp_rank))
    states: dict[int, StateDict] = {}
    masters: list[list[StoredTensor]] = []
    numbers: list[list[int]] = []
    for group, params in zip(tag.groups, tag.params_of(mp_rank), strict=True):
        numbers.append(list(range(len(states), len(states) + len(params))))
        masters.append([])
        for index, param in zip(numbers[-1], params, strict=True):
            own = [state for state in tag.states if state != MASTER and tag.has(param.spec, state)]
            stored = {state: file.whole(param, state, tag.state_dtype(state)) for state in own}
            states[index] = {**_scalars(group), **stored}
            if tag.zero.half:
                masters[-1].append(file.whole(param, MASTER, tag.state_dtype(MASTER)))
    inner: StateDict = {"state": states, "param_groups": _param_groups(tag, numbers)}
    return {**_loose_scaler(tag), "optimizer_state_dict": inner, "fp32_groups": masters} if tag.zero.half else inner


def _fused_optimizer(file: NewFile, groups: Sequence[NewFlatGroup]) -> StateDict:
    parts = _partitions(file, groups, 0, lean=False)
    return {
        **_loose_scaler(file.tag),
        "optimizer_state_dict": _torch_optimizer(file.tag, groups, parts),
        "fp32_groups_flat": [part[MASTER] for part in parts],
        "clip_grad": _clip_grad(file.tag) or 0.0,
    }


def _partitions(
    file: NewFile, groups: Sequence[NewFlatGroup], rank: int, *, lean: bool
) -> list[dict[str, StoredTensor]]:
    """Every group's states of a rank; masters are lean or not, all others have the padding at their end."""
    return [
        {
            state: file.partition(group, state, rank, lean=lean and state == MASTER)
            for state in _states_of(file.tag, group, rank)
        }
        for group in groups
    ]


def _states_of(tag: TagLayout, group: NewFlatGroup, rank: int) -> list[str]:
    """A group trained without momentum, say, has no state of that name; nor has a rank that has nothing to keep in it."""
    own = [s for s in tag.states if s == MASTER or any(tag.has(param.spec, s) for param in group.params)]
    geometry = {state: group.geometry_of(state) for state in own}
    return [state for state, at in geometry.items() if not isinstance(at, BorderGroup) or at.held(rank)]


def _torch_optimizer(
    tag: TagLayout, groups: Sequence[NewFlatGroup], parts: Sequence[Mapping[str, StoredTensor]]
) -> StateDict:
    """The state dict of the torch optimizer, to which a flat group is a parameter: scalars first, as torch has them."""
    numbers = [[i for i, group in enumerate(groups) if group.number == n] for n in range(len(tag.groups))]
    states = {
        index: {**_scalars(tag.groups[group.number]), **{state: v for state, v in part.items() if state != MASTER}}
        for index, (group, part) in enumerate(zip(groups, parts, strict=True))
    }
    return {"state": states, "param_groups": _param_groups(tag, numbers)}


def _param_groups(tag: TagLayout, numbers: Sequence[Sequence[int]]) -> list[StateDict]:
    return [{**_settings(group), "params": list(members)} for group, members in zip(tag.groups, numbers, strict=True)]


def _settings(group: ParamGroup) -> StateDict:
    """What a param group stores of itself."""
    return copy.deepcopy({key: value for key, value in group.fields.items() if key not in group.scalars})


def _scalars(group: ParamGroup) -> StateDict:
    """What the optimizer keeps beside a parameter's tensors: objects of its own, since ``step`` is counted in place."""
    return copy.deepcopy({key: group.fields[key] for key in group.scalars})


def _loss_scaler(tag: TagLayout) -> StateDict:
    scaler = tag.source.state.grad_scaler if tag.source.state.grad_scaler is not None else static_scaler()
    overflow = tag.family.optimizer.get("overflow", False)
    return {"loss_scaler": scaler, "dynamic_loss_scale": is_dynamic(scaler), "overflow": overflow}


def _loose_scaler(tag: TagLayout) -> StateDict:
    state = tag.source.state
    values = loose_values(state.grad_scaler)
    if not is_dynamic(state.grad_scaler):
        values["cur_iter"] = tag.family.optimizer.get("cur_iter", state.iteration)
    return values


def _clip_grad(tag: TagLayout) -> object:
    return tag.family.optimizer.get("clip_grad", tag.source.state.args.get("gradient_clipping"))


def _gaps(group: NewFlatGroup) -> list[int]:
    gaps = group.geometry.gaps if isinstance(group.geometry, FlatGroup) else ()
    return list(gaps or (0,) * len(group.params))


def _param_slice_mapping(group: NewFlatGroup, rank: int) -> StateDict:
    """Where a rank has what of a group; starts count in its own partition."""
    found: StateDict = OrderedDict()
    for index in group.geometry.indices(rank):
        run = group.geometry.run(index, rank)
        if run is not None:
            found[group.params[index].spec.name] = new_stub(_ADDRESS, {"numel": run.numel, "start": run.at})
    return found
