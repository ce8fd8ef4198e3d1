"""Opening a native DeepSpeed checkpoint: files, modules, flat groups and cuts become one Source.

Source: deepspeed 0.19.8, ``runtime/engine.py`` (``_save_checkpoint``, ``_load_checkpoint``, ``_save_zero_checkpoint``),
``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py`` (``state_dict``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import MASTER, PARAM
from mcore_rlhf.core.facts import Fate, Inventory, Item, Kind, Rule, Values, same
from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported
from mcore_rlhf.families.inventory import OPAQUE, Known, Unplaced, of_torch, state_dict_of
from mcore_rlhf.families.module import LAYOUT_KEYS, SHARDED_KEYS, ModuleState, leaves_out_frozen, scaler_of
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import ParamGroup, Source, TrainingState
from mcore_rlhf.families.universal_info import UniversalCheckpointInfo
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.zero import undealt
from mcore_rlhf.models.spec import ModelSpec, ParamSpec
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pt import PtFile
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.stored import StoredTensor, map_tensors

from .catalog import MpShard, Partitioned, StoredModule, ZeroTensors, read_module
from .files import is_round_robin, locate
from .groups import StoredFlatGroup, mappings, param_group_fields, read_groups
from .stage0 import Stage0Optimizer, read_plain
from .tag import OpenedTag, open_tag

_LAYER = re.compile(r"(?:^|\.)(?:layers|layer|blocks|block|h)\.(\d{1,18})\.")


APART: Rule[DeepSpeedState] = Rule(
    Fate.LOST, "of values that differ between the source's ranks, only rank 0's: {keys}",
    lambda own: own.of_first and {"keys": own.of_first, "of": [Item(kind, key) for key in own.of_first for kind in (Kind.VALUE, Kind.RNG)]},
)  # fmt: skip
"""What ranks of stage 3 have each their own of, and others once."""


@dataclass(slots=True)
class DeepSpeedState(ModuleState):
    """What only a native target needs of a native source.

    Args:
        opened: The files.
        modules: Each model-parallel rank's module.
        shards: For each parameter, the parts of it that ranks have, by model-parallel rank.
        apart: Keys of client state of which not all ranks have the same.
    """

    homeless: ClassVar[Sequence[Rule[Any]]] = (*ModuleState.homeless, APART)
    opened: OpenedTag | None = None
    modules: list[StoredModule] = field(default_factory=list)
    shards: Mapping[str, Mapping[int, MpShard]] = field(default_factory=dict)
    apart: tuple[str, ...] = ()

    def inventory(self) -> Inventory:
        """What all of the family have, and values of the module that are no tensors."""
        opaque = tuple(value for module in self.modules for value in module.opaque.values() if value is not None)
        return {**ModuleState.inventory(self), **({OPAQUE: opaque} if opaque else {})}

    @property
    def of_first(self) -> tuple[str, ...]:
        """Keys of which every rank of stage 3 has its own, where others have one."""
        return self.apart if self.opened is not None and self.opened.sliced else ()


@dataclass(frozen=True, slots=True)
class _StoredOptimizer:
    """The optimizer as its files have it: flat groups of every model-parallel rank, or, in stage 0, states by parameter."""

    flat: Sequence[Sequence[StoredFlatGroup]] = ()
    plain: Sequence[Stage0Optimizer] = ()
    groups: tuple[ParamGroup, ...] = ()


def read_deepspeed(path: ReadablePath, options: ReadOptions) -> Source:
    """Open a native checkpoint of any ZeRO stage.

    Args:
        path: A root with ``latest``, or the folder of a tag.
        options: Which step, which rules.

    Raises:
        CheckpointError: It is incomplete, damaged, or contradicts itself.
    """
    opened = open_tag(locate(path, options.step), options.stubs, optimizer=options.optimizer)
    modules = [read_module(opened, mp_rank) for mp_rank in range(opened.mp)]
    optimizer = _read_optimizer(opened, modules, options)
    shards, specs = _shards(opened, modules, optimizer, options)
    states = dict.fromkeys(s for of in shards.values() for shard in of.values() for s in shard.stored if s != PARAM)
    tied = any(module.shared for module in modules)
    model = ModelSpec(tuple(specs), _num_layers(specs), tied=tied, vocab_size=options.vocab_size)
    apart = _differing_keys(opened)
    notes = Report.of(_RULES, _Found(opened, modules, optimizer, apart))
    without = opened.sliced and not options.optimizer
    tensors = ZeroTensors(
        role=options.role or "actor",
        model=model,
        shards={name: list(of.values()) for name, of in shards.items()},
        states=() if without else tuple(sorted(states, key=lambda state: state != MASTER)),
        param_from_master=without,
    )
    return Source(
        format="deepspeed",
        root=opened.files.root,
        role=tensors.role,
        model=model,
        parallel=ParallelConfig(tp=opened.tp, pp=opened.pp, etp=opened.tp, dp=opened.dp),
        catalog=tensors.table(),
        state=_training_state(opened, optimizer.groups, notes),
        files=tuple(StoredFile.of_zip(pt.file, pt.directory, rank) for rank, pt in opened.all()),
        states=tensors.states,
        optimizer=f"zero{opened.stage}" if options.optimizer and (optimizer.flat or optimizer.plain) else None,
        notes=notes,
        family=_module_state(opened, modules, shards, apart),
        unplaced=unplaced_of(opened, with_optimizer=options.optimizer),
    )


def _read_optimizer(opened: OpenedTag, modules: list[StoredModule], options: ReadOptions) -> _StoredOptimizer:
    if opened.optim:
        return _read_partitions(opened, wanted=options.optimizer)
    if options.optimizer and opened.files.expert_optim:
        raise Unsupported(
            f"{opened.files.folder / opened.files.expert_optim[0]}: stage 0 stores no names for its optimizer's states, and with "
            "experts the order of the parameters is not known\n--no-optimizer reads the weights alone."
        )
    if not options.optimizer or opened.first.get("optimizer") is None:
        return _StoredOptimizer()
    _refuse_pipeline(opened)
    plain = [read_plain(opened.model[0, n], module, options.rules) for n, module in enumerate(modules)]
    for module, found in zip(modules, plain, strict=True):
        for name in found.stored:
            module.tensors[name].trained = True
    return _StoredOptimizer(plain=plain, groups=_same_groups(opened, plain))


def _read_partitions(opened: OpenedTag, *, wanted: bool) -> _StoredOptimizer:
    """Stages 1 to 3; stage 3 has its weights there, wherefore they are read also where the optimizer is not wanted."""
    problems = Problems()
    flat = [read_groups(opened, mp_rank, problems) for mp_rank in range(opened.mp)]
    problems.raise_if_any()
    round_robin = _in_round_robin(opened)
    if not round_robin:
        _check_mappings(opened, flat)
    groups = _joined_groups(opened, flat, round_robin)
    return _StoredOptimizer(flat, groups=groups if wanted else ())


def _joined_groups(
    opened: OpenedTag, flat: Sequence[Sequence[StoredFlatGroup]], round_robin: bool
) -> tuple[ParamGroup, ...]:
    """The param groups of what all model-parallel ranks have, in the optimizer's own order."""
    fields = param_group_fields(opened, 0)
    params: list[dict[str, None]] = [{} for _ in fields]
    scalars: list[dict[str, object]] = [{} for _ in fields]
    for group in (group for groups in flat for group in groups):
        number = group.param_group
        names = undealt(group.names, group.geometry.dp) if round_robin else group.names
        params[number].update(dict.fromkeys(names))
        for key, value in group.scalars.items():
            if not same(scalars[number].setdefault(key, value), value):
                where = opened.files.folder
                raise LayoutMismatch(f"{where}: {key} of param group {number} differs between parts of the group")
    return _param_groups(fields, [tuple(names) for names in params], scalars)


def _same_groups(opened: OpenedTag, plain: list[Stage0Optimizer]) -> tuple[ParamGroup, ...]:
    """Stage 0: every tensor-parallel rank lists the same parameters, each its own parts of them."""
    first = plain[0]
    for mp_rank, other in enumerate(plain):
        if other.params != first.params or not same(other.scalars, first.scalars):
            where = opened.model[0, mp_rank].directory.path
            raise LayoutMismatch(
                f"{where}: its optimizer's param groups or steps are not those of tensor-parallel rank 0\n"
                "Files of different runs are mixed in one tag: copy the checkpoint again from where it came from."
            )
    return _param_groups(first.fields, first.params, first.scalars)


def _param_groups(
    fields: Sequence[Mapping[str, object]], params: Sequence[tuple[str, ...]], scalars: Sequence[Mapping[str, object]]
) -> tuple[ParamGroup, ...]:
    return tuple(
        ParamGroup({**own, **once}, params=names, scalars=tuple(once))
        for own, names, once in zip(fields, params, scalars, strict=True)
    )


def _check_mappings(opened: OpenedTag, flat: Sequence[Sequence[StoredFlatGroup]]) -> None:
    """DeepSpeed's own account of who holds what, against ours."""
    problems = Problems()
    for mp_rank, groups in enumerate(flat):
        if any(any(getattr(group.geometry, "gaps", ())) for group in groups):
            continue
        for dp_rank in range(opened.dp):
            mine = {group.number: (group, group.ranks.index(dp_rank)) for group in groups if dp_rank in group.ranks}
            for number, name, start, numel in mappings(opened, mp_rank, dp_rank):
                group, at = mine[number]
                runs = group.geometry.runs(group.stored.index(name)) if name in group.stored else ()
                if not any((run.rank, run.at, run.numel) == (at, start, numel) for run in runs):
                    where = opened.optim[dp_rank, mp_rank].directory.path
                    text = f"{where}: param_slice_mappings puts {name} at {start}:{start + numel} of group {number}"
                    advice = "By the order of 'param_shapes' it lies elsewhere: the files are of different runs."
                    problems.add(LayoutMismatch, text, advice)
    problems.raise_if_any()


def _in_round_robin(opened: OpenedTag) -> bool:
    """Whether files of partitions have their parameters in turn."""
    return bool(opened.optim) and not opened.sliced and is_round_robin(opened.first.get("ds_config"))


class _Found(NamedTuple):
    """What is asked about files that were read: besides them, which keys of client state ranks have each their own of."""

    opened: OpenedTag
    modules: Sequence[StoredModule]
    optimizer: _StoredOptimizer
    apart: Sequence[str]

    def unreduced(self) -> Values | None:
        """Parameters whose momentum is not the same where two ranks have it."""
        groups = [group for of in self.optimizer.flat for group in of if group.unreduced]
        names = [name for group in groups for name in group.at_borders()]
        return {"names": names, "count": len(names), "version": self.opened.first.get("ds_version")} if names else None


_RULES: tuple[Rule[_Found], ...] = (
    Rule(Fate.LOST, "of buffers that differ between the source's ranks, only rank 0's: {found}",
         lambda f: [name for module in f.modules for name in module.apart]),
    Rule(Fate.NOTE, "round_robin_gradients: param_slice_mappings are wrong in such files; param_shapes has the order",
         lambda f: _in_round_robin(f.opened)),
    Rule(Fate.LOST, "momentum_buffer of {count} parameters at borders of partitions such as {names:1}: DeepSpeed {version} computed it of "
         "gradients that were reduced only where a rank's own elements lie, which are taken; the ranks' further elements, on which they do "
         "not agree, are left out", _Found.unreduced),
    Rule(Fate.NOTE, "differs between ranks, and goes with them only into the same layout: {found}", lambda f: f.apart),
)  # fmt: skip
"""What a reader should know."""


def _refuse_pipeline(opened: OpenedTag) -> None:
    if opened.pp > 1:
        raise Unsupported(
            f"{opened.files.folder}: the optimizer of stage 0 with PP {opened.pp} is not supported: its states have no names, and "
            "nothing says which stage had which layer\n"
            "Load it with DeepSpeed at ZeRO stage 1 and save it again."
        )


def _shards(
    opened: OpenedTag, modules: list[StoredModule], optimizer: _StoredOptimizer, options: ReadOptions
) -> tuple[dict[str, dict[int, MpShard]], list[ParamSpec]]:
    """For every parameter the parts of it that ranks have, and what it is, in the order of the modules."""
    info = UniversalCheckpointInfo.of(opened.first)
    buffers = {name for module in modules for name in module.buffers}
    shards: dict[str, dict[int, MpShard]] = {}
    specs, problems = list[ParamSpec](), Problems()
    for name in dict.fromkeys(name for module in modules for name in module.tensors):
        having = [mp_rank for mp_rank, module in enumerate(modules) if name in module.tensors]
        of_stage = [rank for rank in having if rank // opened.tp == having[0] // opened.tp]
        if len(of_stage) != opened.tp:
            problems.add(LayoutMismatch, f"{name}: only {len(of_stage)} of {opened.tp} tensor-parallel ranks have it")
            continue
        first = modules[having[0]].tensors[name]
        shapes = [modules[rank].tensors[name].shape for rank in of_stage]
        cut = info.cut(name, shapes, options.rules, buffer=name in buffers)
        shards[name] = {}
        for mp_rank in having:
            layout = cut.layouts[mp_rank % opened.tp]
            for copy, stored in enumerate(modules[mp_rank].tensors[name].stored or [None]):
                shards[name][mp_rank + copy * opened.mp] = MpShard(layout, {} if stored is None else {PARAM: stored})
        specs.append(ParamSpec(name, cut.global_shape, first.dtype, cut.partition, first.trained))
    problems.raise_if_any()
    _add_states(shards, optimizer)
    return shards, specs


def _add_states(shards: dict[str, dict[int, MpShard]], optimizer: _StoredOptimizer) -> None:
    for mp_rank, groups in enumerate(optimizer.flat):
        for group in groups:
            for state, parts in group.parts.items():
                geometry = group.geometry_of(state)
                for index, name in enumerate(group.names):
                    shards[name][mp_rank].stored[state] = Partitioned(geometry, index, parts)
    for mp_rank, plain in enumerate(optimizer.plain):
        for name, stored in plain.stored.items():
            shards[name][mp_rank].stored.update(stored)


def _num_layers(specs: list[ParamSpec]) -> int:
    """As far as names tell."""
    return max((1 + int(match[1]) for spec in specs if (match := _LAYER.search(spec.name))), default=0)


def _training_state(opened: OpenedTag, groups: tuple[ParamGroup, ...], notes: Report) -> TrainingState:
    """The state that all ranks share, taken from the first; values that differ between ranks are noted."""
    top, pt = opened.first, opened.model[0, 0]
    other = other_values(opened, 0, 0)
    scheduler, config = state_dict_of(top.get("lr_scheduler"), "lr_scheduler", notes), top.get("ds_config")
    return TrainingState(
        iteration=int(top.get("global_steps") or 0),
        args=pt.materialize(dict(config)) if isinstance(config, Mapping) else {},
        groups=groups,
        scheduler=pt.materialize(dict(scheduler)) if scheduler is not None else None,
        grad_scaler=scaler_of(_optimizer_values(opened)),
        other=other,
    )


def _module_state(
    opened: OpenedTag, modules: list[StoredModule], shards: Mapping[str, Mapping[int, MpShard]], apart: Sequence[str]
) -> DeepSpeedState:
    values = _optimizer_values(opened)
    pt = opened.optim[0, 0] if opened.optim else opened.model[0, 0]
    placed = SHARDED_KEYS | {"state", "fp32_groups_flat"}
    ranks = [other_values(opened, 0, mp_rank) for mp_rank in range(opened.mp)] if opened.mp > 1 else []
    frozen = any(module.frozen for module in modules)
    return DeepSpeedState(
        tag=opened.files.tag,
        order=tuple(dict.fromkeys(name for module in modules for name in module.order)),
        buffers=tuple(dict.fromkeys(name for module in modules for name in module.buffers)),
        shared={alias: owner for module in modules for alias, owner in module.shared.items()},
        optimizer={key: pt.materialize(value) for key, value in values.items() if key not in placed},
        per_rank=tuple(ranks),
        pipeline=opened.first["module"] is None,
        without_frozen=opened.first.get("frozen_param_shapes") is None and not frozen,
        left_out=leaves_out_frozen(opened.first, opened.stage) and not frozen,
        opened=opened,
        modules=modules,
        shards=shards,
        apart=tuple(apart),
    )


def other_values(opened: OpenedTag, dp_rank: int, mp_rank: int) -> dict[str, object]:
    """What a rank's model file has at the top that neither has a place of its own nor follows from the layout."""
    pt = opened.model[dp_rank if opened.sliced else 0, mp_rank]
    return {key: pt.materialize(value) for key, value in pt.tree.items() if key not in LAYOUT_KEYS}


def _outline(opened: OpenedTag, dp_rank: int, mp_rank: int) -> dict[str, object]:
    """The same with every tensor's shape and checksum in its place: to compare hundreds of ranks without reading them."""
    pt = opened.model[dp_rank, mp_rank]

    def stand_in(stored: StoredTensor) -> object:
        if not pt.directory.checksummed:
            return pt.load(stored)
        return stored.shape, stored.start, str(stored.record.dtype), pt.directory.members[stored.record.key].crc32

    return {key: map_tensors(value, stand_in) for key, value in pt.tree.items() if key not in LAYOUT_KEYS}


def _differing_keys(opened: OpenedTag) -> list[str]:
    """Which of these values are not the same on all ranks."""
    first = _outline(opened, 0, 0)
    outlines = [_outline(opened, *at) for at in opened.model]
    return sorted({key for outline in outlines for key, v in outline.items() if not same(v, first.get(key))})


def _optimizer_values(opened: OpenedTag) -> Mapping[str, Any]:
    """The state dict of the optimizer of rank 0."""
    if opened.optim:
        return opened.optimizer(0, 0)
    stored = opened.first.get("optimizer")
    return stored if isinstance(stored, Mapping) else {}


_TOP: Known = {"optimizer_state_dict": None, "ds_config": None, "ds_version": None}
_FRAGMENTS = "frozen_param_fragments"
_DEGREES = "checkpoint_parallel_dimensions"
_WRAPPED = ("optimizer_state_dict", "base_optimizer_state")
_OF_RANKS = SHARDED_KEYS - {"loss_scaler"} | {"state", "fp32_groups_flat"}
"""Keys that each rank has its own value of, or that are compared where they are read."""


def unplaced_of(opened: OpenedTag, *, with_optimizer: bool) -> tuple[str, ...]:
    """What is found in the files of all ranks.

    Args:
        opened: The files.
        with_optimizer: Whether the optimizer is read at all.
    """
    found, first = Unplaced(), opened.model[0, 0]
    for pt in opened.model.values():
        found.compare(pt.file, _scheduler(pt), _scheduler(first))
        found.look(pt.file, pt.tree.get(_DEGREES), {"pp_degree": None, "tp_degree": None}, _DEGREES)
        frozen = pt.tree.get("frozen_param_shapes")
        found.look(pt.file, pt.tree.get(_FRAGMENTS), dict.fromkeys(map(str, frozen or ())), _FRAGMENTS)
    if not with_optimizer:
        return found.names
    for pt in opened.optim.values():
        found.look(pt.file, pt.tree, _TOP)
    files = [*opened.optim.values()] or [*opened.model.values()]
    for pt in files:
        _look_inside(found, pt, files[0], "optimizer_state_dict" if opened.optim else "optimizer")
    return found.names


def _scheduler(pt: PtFile) -> dict[str, object]:
    return {"lr_scheduler": pt.materialize(pt.tree.get("lr_scheduler"))}


def _look_inside(found: Unplaced, pt: PtFile, first: PtFile, key: str) -> None:
    """The optimizer's own state dict: its settings are taken from the first rank, its states by the numbers of its groups."""
    mine, others = (_mapping(file.tree.get(key)) for file in (pt, first))
    found.compare(pt.file, _settings(pt, mine), _settings(first, others), key)
    for name in _WRAPPED:
        inner = _mapping(mine.get(name))
        found.look(pt.file, inner, of_torch(inner), f"{key}.{name}")
        groups = inner.get("param_groups") or []
        _compare_groups(found, pt, groups, _mapping(others.get(name)).get("param_groups") or [], f"{key}.{name}")


def _compare_groups(found: Unplaced, pt: PtFile, mine: list[Any], others: list[Any], inside: str) -> None:
    for number, (group, other) in enumerate(zip(mine, others, strict=False)):
        fields, known = ({k: v for k, v in of.items() if k != "params"} for of in (group, other))
        found.compare(pt.file, fields, known, f"{inside}.param_groups.{number}")


def _settings(pt: PtFile, state: Mapping[str, Any]) -> dict[str, object]:
    return {key: pt.materialize(value) for key, value in state.items() if key not in _OF_RANKS}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
