"""Describing a new universal checkpoint: the superset that DeepSpeed loads in stages 1, 2 and 3.

Of every parameter ``zero/<name>/<state>.pt``, one tensor each; ``…model_states.pt`` in both flavours; ``zero/optimizer_state.pt``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from mcore_rlhf.core.catalog import (
    EXP_AVG,
    EXP_AVG_SQ,
    FLOAT32,
    FLOATING,
    MASTER,
    PARAM,
    Box,
    TensorEntry,
    TensorName,
)
from mcore_rlhf.core.facts import ANY, Fate, Inventory, Rule
from mcore_rlhf.errors import Incomplete, Problems
from mcore_rlhf.families.fsdp.groups import counted_of_each
from mcore_rlhf.families.inventory import COPIED_MASTERS, NEVER_MADE, OF_OPTIMIZER, UNUSED, inventory_of
from mcore_rlhf.families.module import MOMENTUM, USE_MUON, ModuleState
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.source import ParamGroup, Source
from mcore_rlhf.families.universal_info import VOCAB_TENSOR, UniversalCheckpointInfo
from mcore_rlhf.formats.base import FileLayout, PtLayout, Target, TargetFile
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage.stored import StoredTensor
from mcore_rlhf.storage.torch_values import SmallTensor, TorchSize

from .files import LATEST, OPTIMIZER_FILE, PARAM_KEY, STEP, SUFFIX, ZERO, model_file, stage3_model_file, state_key

_EXPERT = ".deepspeed_moe.experts.deepspeed_experts."
"""In the names of what DeepSpeed's own mixture-of-experts layer has. Source: DeepSpeed 0.19.8, ``moe/experts.py``."""
_RATE = "lr"
_VERSION = "0.19.8"
"""The DeepSpeed whose files these are like; written where the source does not say its own."""


@dataclass(frozen=True, slots=True)
class UniversalLayout:
    """Everything about a new universal checkpoint that its files have in common.

    Args:
        source: What is converted.
        family: What the source has of a module besides tensors.
        optimizer: Whether there is an optimizer to be written.
        info: How the run's tensors were cut.
        vocab_size: Rows that are kept of a padded vocabulary, where the user says it.
        left_out: Whether the user asked for no optimizer.
    """

    source: Source
    family: ModuleState
    optimizer: bool
    info: UniversalCheckpointInfo
    vocab_size: int | None
    left_out: bool = False

    @property
    def folder(self) -> str:
        """Name of the checkpoint's folder."""
        return f"{self.family.tag or f'global_step{self.source.state.iteration}'}{SUFFIX}"

    @property
    def states(self) -> tuple[str, ...]:
        """The optimizer's tensor states that are written, the master first."""
        return (MASTER, *(s for s in self.source.states if self.optimizer and s != MASTER))

    def entry(self, spec: ParamSpec, state: str) -> TensorEntry | None:
        """A state of a parameter, as the source has it."""
        return self.source.catalog.get(TensorName(self.source.role, spec.name, state))

    def keys(self, spec: ParamSpec) -> Mapping[str, object]:
        """What a file of a parameter says beside the tensor: that of a universal source is kept."""
        known = self.family.keys.get(spec.name)
        return (self.info.keys(spec.name) if known is None else known) if spec.trainable else {}

    def rows(self, spec: ParamSpec) -> int | None:
        """Rows that are kept of a vocabulary that is padded for tensor parallelism, or None."""
        size = self.info.stored.get("original_vocab_size")
        if not isinstance(size, int) or not self.keys(spec).get(VOCAB_TENSOR):
            return None
        return size if self.vocab_size is None else self.vocab_size

    def steps(self) -> dict[str, object]:
        """The step of every trained parameter: its group's, or that of all groups where members are not known."""
        groups = self.source.state.groups if self.optimizer else ()
        steps = {name: _group_step(group) for group in groups for name in group.params}
        if groups and not steps:
            steps = {spec.name: _group_step(groups[0]) for spec in self.source.model.params if spec.trainable}
        return {name: step for name, step in steps.items() if step is not None}


def _never_made(new: UniversalLayout) -> dict[str, list[str]]:
    """States of the optimizer that a parameter lacks and others of its group have, since it never took a step: by parameter.

    ZeRO has them, as zeros; without their files DeepSpeed would keep what it had before.
    """
    found: dict[str, list[str]] = {}
    there = frozenset(new.source.catalog) if new.optimizer else frozenset()
    for group in new.source.state.groups if new.optimizer else ():
        for state in new.states[1:]:
            without = [n for n in group.params if TensorName(new.source.role, n, state) not in there]
            for name in without if len(without) < len(group.params) else ():
                found.setdefault(name, []).append(state)
    return found


def universal_target(source: Source, options: WriteOptions) -> Target:
    """Describe the universal checkpoint that holds what a DeepSpeed source has, under the same names.

    Args:
        source: An opened checkpoint of DeepSpeed's, in either format.
        options: What the user asked for.

    Raises:
        CheckpointError: It cannot be done; all problems together.
    """
    family = ModuleState.needed(source, "universal")
    report = source.notes.for_target()
    info = UniversalCheckpointInfo.of(source.state.other)
    optimizer = source.optimizer is not None and not options.no_optimizer
    new = UniversalLayout(source, family, optimizer, info, options.vocab_size, options.no_optimizer)
    _check_masters(new)
    if not family.keys and not options.unused_patterns:
        info.check_patterns([spec.name for spec in source.model.params])
    report.through((*_RULES, *(_OF_OPTIMIZER if optimizer else ())), new)
    return Target(
        format="universal",
        parallel=source.parallel,
        source=source.catalog.states({MASTER: (MASTER, PARAM)}),
        files=tuple(_files(new)),
        texts={LATEST: new.folder},
        report=report,
        holds=_holds(new),
    )


def _check_masters(new: UniversalLayout) -> None:
    """Every trained parameter needs a master."""
    problems = Problems()
    for spec in new.source.model.params if new.optimizer else ():
        if spec.trainable and new.entry(spec, MASTER) is None:
            param = new.entry(spec, PARAM)
            if param is None or param.dtype != FLOAT32:
                problems.add(
                    Incomplete,
                    f"{spec.name}: has no fp32 master weights in {new.source.root}, and {spec.dtype} weights are not as exact",
                    "A universal checkpoint is made of masters. --no-optimizer converts the weights alone.",
                )
    problems.raise_if_any()


def _holds(new: UniversalLayout) -> Inventory:
    """Everything that is carried."""
    held = inventory_of(new.source)
    return held if new.optimizer else {i: v for i, v in held.items() if i._replace(name=ANY) not in OF_OPTIMIZER}


def _files(new: UniversalLayout) -> Iterator[TargetFile]:
    """The large ones first: a worker that begins late with one holds up all others."""
    for mp_rank in range(new.source.parallel.tp * new.source.parallel.pp):
        for name, whole in ((model_file(mp_rank), mp_rank == 0), (stage3_model_file(mp_rank), False)):
            path = f"{new.folder}/{name}"
            yield TargetFile(path, partial(_model_layout, new, path, mp_rank, whole))
    steps, zeros = new.steps(), _never_made(new)
    for spec in new.source.model.params:
        yield from _param_files(new, spec, steps.get(spec.name), zeros.get(spec.name, ()))
    if new.optimizer:
        yield TargetFile(f"{new.folder}/{ZERO}/{OPTIMIZER_FILE}", partial(_optimizer_layout, new))


def _param_files(
    new: UniversalLayout, spec: ParamSpec, step: object | None, zeros: Sequence[str]
) -> Iterator[TargetFile]:
    """The files of one parameter or buffer; none of a buffer that fp32 cannot hold."""
    if not spec.trainable and spec.dtype not in FLOATING:
        return
    for state in new.states if spec.trainable else (MASTER,):
        if state == MASTER or state in zeros or new.entry(spec, state) is not None:
            path = f"{new.folder}/{ZERO}/{spec.name}/{state_key(state)}.pt"
            yield TargetFile(path, partial(_param_layout, new, path, spec, state))
    if step is not None and spec.trainable:
        yield TargetFile(f"{new.folder}/{ZERO}/{spec.name}/{STEP}.pt", partial(FileLayout.of_tree, step))


def _param_layout(new: UniversalLayout, path: str, spec: ParamSpec, state: str) -> FileLayout:
    """One state of a parameter, without the padding of a vocabulary. States keep their type; what has no master becomes one."""
    rows, whole, entry = new.rows(spec), spec.global_shape, new.entry(spec, state)
    file = PtLayout(path)
    first = None if rows is None else Box.whole((min(rows, whole[0]), *whole[1:]))
    name = TensorName(new.source.role, spec.name, state)
    stored = file.add(name, whole, entry.dtype if entry is not None else FLOAT32, first)
    if entry is None and state != MASTER:  # what nothing fills reads as zeros
        file.entries.clear()
    return file.layout({**new.keys(spec), PARAM_KEY: stored})


def _optimizer_layout(new: UniversalLayout) -> FileLayout:
    return FileLayout.of_tree(_optimizer_state(new))


def _model_layout(new: UniversalLayout, path: str, mp_rank: int, whole: bool) -> FileLayout:
    """One ``…model_states.pt``.

    DeepSpeed restores only counters, scheduler and client state from it. The module is there for people, for the way back to
    native files, and because DeepSpeed's own restore leaves out frozen parameters and buffers.

    Args:
        new: The checkpoint.
        path: The file's, relative to the target's root.
        mp_rank: Which model-parallel rank's client state it has.
        whole: Whether it has the module: that of the first rank has, whole; all others, and stage 3's, only its buffers and
            names.
    """
    file = PtLayout(path)
    module = _module(new, file, whole)
    return file.layout(_model_states(new, module, mp_rank, whole))


def _module(new: UniversalLayout, file: PtLayout, whole: bool) -> OrderedDict[str, object]:
    """The module in the order of its own state dict; aliases share the storage of their owners."""
    params = new.source.model.params
    values = {spec.name: _module_tensor(new, file, spec, whole) for spec in params}
    shared = new.family.shared
    order = dict.fromkeys([*new.family.order, *(spec.name for spec in params)])
    found = ((name, values.get(shared.get(name, name))) for name in order)
    return OrderedDict((name, value) for name, value in found if value is not None)


def _module_tensor(new: UniversalLayout, file: PtLayout, spec: ParamSpec, whole: bool) -> StoredTensor | SmallTensor:
    """Where the tensor will lie, or an empty placeholder of its type, as stage 3 has it."""
    entry = new.entry(spec, PARAM) if whole or spec.name in new.family.buffers else None
    if entry is None:
        return SmallTensor.empty(spec.dtype)
    return file.add(entry.name, entry.global_shape, entry.dtype)


def _model_states(new: UniversalLayout, module: Mapping[str, object], mp_rank: int, whole: bool) -> dict[str, object]:
    family, state, parallel = new.family, new.source.state, new.source.parallel
    frozen = [s for s in new.source.model.params if not s.trainable and s.name not in family.buffers]
    stored = not family.without_frozen
    other = dict(family.per_rank[mp_rank] if mp_rank < len(family.per_rank) else state.other)
    return {
        "module": module,
        "buffer_names": list(family.buffers),
        "optimizer": None,
        "param_shapes": _param_shapes(new.source),
        "frozen_param_shapes": _shapes(frozen) if stored else None,
        "shared_params": dict(family.shared),
        "frozen_param_fragments": OrderedDict((s.name, module[s.name]) for s in frozen) if stored and whole else None,
        "lr_scheduler": state.scheduler,
        "data_sampler": other.pop("data_sampler", None),
        "random_ltd": other.pop("random_ltd", None),
        "skipped_steps": other.pop("skipped_steps", 0),
        "global_steps": state.iteration,
        **{key: other.pop(key) for key in ("global_samples",) if key in other},
        "dp_world_size": parallel.dp,
        "mp_world_size": parallel.tp * parallel.pp,
        "checkpoint_parallel_dimensions": {"pp_degree": parallel.pp, "tp_degree": parallel.tp},
        "ds_config": state.args,
        "ds_version": other.pop("ds_version", _VERSION),
        **other,
    }


def _param_shapes(source: Source) -> list[OrderedDict[str, object]]:
    """Members of the param groups with their shapes, in flat order."""
    specs = {spec.name: spec for spec in source.model.params}
    groups = [[specs[name] for name in group.params if name in specs] for group in source.state.groups]
    if not any(groups):
        groups = [[spec for spec in specs.values() if spec.trainable]]
    return [_shapes(group) for group in groups]


def _shapes(specs: Sequence[ParamSpec]) -> OrderedDict[str, object]:
    return OrderedDict((spec.name, TorchSize(spec.global_shape)) for spec in specs)


def _optimizer_state(new: UniversalLayout) -> dict[str, object]:
    """What stages 1 and 2 read under ``param_groups``, stage 3 under ``optimizer_state_dict``.

    Stage 3 copies its first group over every other. So it gets only the fields in which all groups agree: the engine keeps
    its own values of the others. But where a scheduler goes on, an engine's rates are what the scheduler began with, often 0, until
    its first step, which sets every group's: there the first group's rate is nearer.
    Source: DeepSpeed 0.19.8, ``runtime/base_optimizer.py`` and ``runtime/zero/stage3.py``
    (``load_hp_checkpoint_state_from_checkpoint_dir_stage3``).
    """
    state, optimizer = new.source.state, new.family.optimizer
    groups = [_settings(group) | {"params": [number]} for number, group in enumerate(state.groups)]
    differing = _left_to_the_run(new)
    first = {key: value for key, value in groups[0].items() if key not in differing} if groups else {}
    step = _group_step(state.groups[0]) if state.groups else None
    scaler = {} if state.grad_scaler is None else {"loss_scaler": state.grad_scaler}
    return {
        **scaler,
        **optimizer,
        "ds_version": optimizer.get("ds_version") or state.other.get("ds_version") or _VERSION,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {} if step is None else {STEP: step}}, "param_groups": [first]},
    }


def _settings(group: ParamGroup) -> dict[str, object]:
    """What a param group stores of itself."""
    return {key: value for key, value in group.fields.items() if key not in group.scalars}


def _differing_fields(new: UniversalLayout) -> list[str]:
    """The fields in which the groups are not all equal."""
    fields = [_settings(group) for group in new.source.state.groups]
    return [key for key in fields[0] if any(other.get(key) != fields[0][key] for other in fields[1:])] if fields else []


def _left_to_the_run(new: UniversalLayout) -> list[str]:
    """The fields that stage 3 does not get."""
    scheduled = new.source.state.scheduler is not None
    return [key for key in _differing_fields(new) if not (key == _RATE and scheduled)]


def _group_step(group: ParamGroup) -> object | None:
    """The group's step as it is stored: a tensor where the source has a float, since torch's optimizers count in one."""
    step = group.fields.get(STEP) if STEP in group.scalars else None
    return SmallTensor.of(step, FLOAT32) if isinstance(step, float) else step


def _without(new: UniversalLayout) -> Source | None:
    """The source, where it has no optimizer, though nobody left it out."""
    return None if new.optimizer or new.left_out else new.source


_ALONE = "DeepSpeed loads such a checkpoint in stage 3 only, with load_module_only=True"
_RULES: tuple[Rule[UniversalLayout], ...] = (
    Rule(Fate.KEPT, "client state, counters and the learning-rate scheduler of every model-parallel rank"),
    Rule(Fate.NOTE, "DeepSpeed's own experts have their global numbers; its loader looks for each rank's local ones, and so finds the "
         "right ones only in a run without expert parallelism (ep_size 1)",
         lambda n: any(_EXPERT in s.name for s in n.source.model.params)),
    Rule(Fate.LOST, f"no optimizer, as asked for: {_ALONE}", lambda n: n.left_out, OF_OPTIMIZER),
    Rule(Fate.NOTE, f"no optimizer, the source has none: {_ALONE}", lambda n: not (n.optimizer or n.left_out)),
    *(rule.of_part(_without) for rule in UNUSED),
)  # fmt: skip
"""What becomes of a source."""
_OF_OPTIMIZER: tuple[Rule[UniversalLayout], ...] = (
    Rule(Fate.DERIVED, COPIED_MASTERS, lambda n: any(s.trainable and n.entry(s, MASTER) is None for s in n.source.model.params)),
    Rule(Fate.LOST, "{names}: DeepSpeed restores no other number of a parameter than its step from here (convert --to deepspeed for those)",
         lambda n: counted_of_each(n.source)),
    Rule(Fate.DERIVED, NEVER_MADE, lambda n: [f"{name} ({state})" for name, of in _never_made(n).items() for state in of]),
    Rule(Fate.NOTE, "the source has no settings of param groups (elastic_checkpoint): those of the new run's configuration stay",
         lambda n: any(not set(group.fields) - set(group.scalars) for group in n.source.state.groups)),
    Rule(Fate.NOTE, _RATE + " differs between groups: the first step in stage 3 takes the first one's in all of them, and then the "
         "scheduler sets each its own; stages 1 and 2 restore them",
         lambda n: _RATE in {*_differing_fields(n)}.difference(_left_to_the_run(n))),
    Rule(Fate.NOTE, "stage 3 gives every param group the first one's values: {found} differ between groups, are left out there, and stay "
         "as the new run's configuration has them; stages 1 and 2 restore them", _left_to_the_run),
    Rule(Fate.NOTE, "stage 3 restores one step tensor that all sub-groups share: give each its own after loading", lambda n: n.steps()),
    Rule(Fate.NOTE, MOMENTUM + " of DeepSpeed's Muon ({found} parameters): DeepSpeed restores it from here at DP 1, with BF16_Optimizer or "
         "an offloaded optimizer; elsewhere stages 1 and 2 keep whole parameters, and stage 3 looks for exp_avg: convert --to deepspeed "
         "for those", lambda n: sum(len(group.params) for group in n.source.state.groups if group.fields.get(USE_MUON) is True)),
    Rule(Fate.NOTE, "stage 3 restores Adam's states only; stages 1 and 2 restore any",
         lambda n: not {EXP_AVG, EXP_AVG_SQ} <= set(n.source.states)),
)  # fmt: skip
"""What becomes of its optimizer, and what DeepSpeed makes of the result."""
