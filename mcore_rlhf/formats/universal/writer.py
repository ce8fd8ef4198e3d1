"""Describing a new universal checkpoint: the superset that DeepSpeed loads in stages 1, 2 and 3.

Of every parameter ``zero/<name>/<state>.pt``, one tensor each; ``…model_states.pt`` in both flavours; ``zero/optimizer_state.pt``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from mcore_rlhf.core.account import ANY, Fate, Inventory, Report
from mcore_rlhf.core.box import Box, Shape, row_major
from mcore_rlhf.core.catalog import Catalog, Chunk, Record, TensorEntry
from mcore_rlhf.core.dtype import FLOAT32, FLOATING, DType
from mcore_rlhf.core.names import EXP_AVG, EXP_AVG_SQ, MASTER, PARAM, TensorName
from mcore_rlhf.core.views import StateOrder
from mcore_rlhf.errors import Incomplete, Problems
from mcore_rlhf.families.inventory import OF_OPTIMIZER, inventory_of
from mcore_rlhf.families.module import MOMENTUM, USE_MUON, ModuleState, module_state_of
from mcore_rlhf.families.source import ParamGroup, Source, WriteOptions
from mcore_rlhf.formats.base import FileLayout, Target, TargetFile
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage.pt import Pt
from mcore_rlhf.storage.stored import StoredTensor

from .files import INFO, LATEST, OPTIMIZER_FILE, PARAM_KEY, STEP, SUFFIX, ZERO, model_file, stage3_model_file, state_key
from .tp_keys import TensorParallelKeys

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class StateFiles:
    """Describes the files of each parameter.

    Args:
        folder: The checkpoint's folder, relative to the target's root.
        role: Role of all tensors.
        catalog: Where the tensors come from.
        states: The optimizer's tensor states that are written, the master first.
        keys: What a file says beside its tensor.
        vocab_size: Rows that are kept of a padded vocabulary, where the user says it.
    """

    folder: str
    role: str
    catalog: Catalog
    states: tuple[str, ...]
    keys: TensorParallelKeys
    vocab_size: int | None

    def files(self, spec: ParamSpec, step: object | None) -> Iterator[TargetFile]:
        """The files of one parameter or buffer; none of a buffer that fp32 cannot hold."""
        states = self.states if spec.trainable else (MASTER,)
        if not spec.trainable and spec.dtype not in FLOATING:
            return
        for state in states:
            if state == MASTER or self.catalog.get(TensorName(self.role, spec.name, state)) is not None:
                yield TargetFile(self._path(spec, state_key(state)), partial(self._layout, spec, state))
        if step is not None and spec.trainable:
            yield TargetFile(self._path(spec, STEP), partial(_step_layout, step))

    def shape(self, spec: ParamSpec) -> Shape:
        """The shape as written: without the padding of a vocabulary."""
        rows = self.keys.vocabulary_rows(spec.name) if spec.trainable else None
        rows = self.vocab_size if rows is not None and self.vocab_size is not None else rows
        return spec.global_shape if rows is None else (min(rows, spec.global_shape[0]), *spec.global_shape[1:])

    def _path(self, spec: ParamSpec, key: str) -> str:
        return f"{self.folder}/{ZERO}/{spec.name}/{key}.pt"

    def _layout(self, spec: ParamSpec, state: str) -> FileLayout:
        file, shape = self._path(spec, state_key(state)), self.shape(spec)
        name = TensorName(self.role, spec.name, state)
        entry, stored = placed(
            name, spec.global_shape, shape, Record(file, "data/0", self._dtype(name), prod(shape), 0)
        )
        keys = self.keys.of_param(spec.name) if spec.trainable else {}
        return FileLayout([entry], [stored.record], Pt.of({**keys, PARAM_KEY: stored}))

    def _dtype(self, name: TensorName) -> DType:
        """States keep their type; what has no master becomes one."""
        entry = self.catalog.get(name)
        return entry.dtype if entry is not None else FLOAT32


def _step_layout(step: object) -> FileLayout:
    return FileLayout([], [], Pt.of(step))


def placed(name: TensorName, global_shape: Shape, shape: Shape, record: Record) -> tuple[TensorEntry, StoredTensor]:
    """A tensor, or its first rows, as the whole of a record: the entry for the plan, and the tensor for the pickle."""
    chunk = Chunk(Box.whole(shape), record, 0, row_major(shape))
    return TensorEntry(name, global_shape, record.dtype, (chunk,)), StoredTensor.whole(record, shape)


VERSION = "0.19.8"
"""The DeepSpeed whose files these are like; written where the source does not say its own."""


@dataclass
class ModelFile:
    """One ``…model_states.pt``.

    DeepSpeed restores only counters, scheduler and client state from it. The module is there for people, for the way back to
    native files, and because DeepSpeed's own restore leaves out frozen parameters and buffers.

    Args:
        source: The checkpoint.
        native: DeepSpeed's own view of it.
        file: The file's path, relative to the target's root.
        mp_rank: Which model-parallel rank's client state it has.
        whole: Whether it has the module: that of the first rank has, whole; all others, and stage 3's, only its buffers and
            names.
    """

    source: Source
    native: ModuleState
    file: str
    mp_rank: int
    whole: bool
    records: list[Record] = field(default_factory=list)
    entries: list[TensorEntry] = field(default_factory=list)

    def layout(self) -> FileLayout:
        """What the file will hold."""
        module = self._module()
        tree = self._tree(module)
        return FileLayout(self.entries, self.records, Pt.of(tree))

    def _module(self) -> OrderedDict[str, object]:
        """The module in the order of its own state dict; aliases share the storage of their owners."""
        specs = {spec.name: spec for spec in self.source.model.params}
        values = {name: self._value(spec) for name, spec in specs.items()}
        shared = self.native.shared
        order = dict.fromkeys([*self.native.order, *specs])
        found = ((name, values.get(shared.get(name, name))) for name in order)
        return OrderedDict((name, value) for name, value in found if value is not None)

    def _value(self, spec: ParamSpec) -> StoredTensor | torch.Tensor:
        """Where the tensor will lie, or an empty placeholder of its type, as stage 3 has it."""
        import torch

        name = TensorName(self.source.role, spec.name, PARAM)
        stored = self.source.catalog.get(name) if self.whole or spec.name in self.native.buffers else None
        if stored is None:
            return torch.empty(0, dtype=getattr(torch, spec.dtype.name))
        record = Record(self.file, f"data/{len(self.records)}", stored.dtype, prod(stored.global_shape), 0)
        entry, value = placed(name, stored.global_shape, stored.global_shape, record)
        self.records.append(record)
        self.entries.append(entry)
        return value

    def _tree(self, module: Mapping[str, object]) -> dict[str, object]:
        frozen = [s for s in self.source.model.params if not s.trainable and s.name not in self.native.buffers]
        stored = not self.native.without_frozen
        state, parallel = self.source.state, self.source.parallel
        per_rank = self.native.per_rank
        other = dict(per_rank[self.mp_rank] if self.mp_rank < len(per_rank) else state.other)
        return {
            "module": module,
            "buffer_names": list(self.native.buffers),
            "optimizer": None,
            "param_shapes": self._param_shapes(),
            "frozen_param_shapes": OrderedDict((spec.name, _size(spec)) for spec in frozen) if stored else None,
            "shared_params": dict(self.native.shared),
            "frozen_param_fragments": OrderedDict((s.name, module[s.name]) for s in frozen)
            if stored and self.whole
            else None,
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
            "ds_version": other.pop("ds_version", VERSION),
            **other,
        }

    def _param_shapes(self) -> list[OrderedDict[str, object]]:
        """Members of the param groups with their shapes, in flat order."""
        specs = {spec.name: spec for spec in self.source.model.params}
        groups = [[specs[name] for name in group.params if name in specs] for group in self.source.state.groups]
        if not any(groups):
            groups = [[spec for spec in specs.values() if spec.trainable]]
        return [OrderedDict((spec.name, _size(spec)) for spec in group) for group in groups]


def _size(spec: ParamSpec) -> torch.Size:
    import torch

    return torch.Size(spec.global_shape)


def optimizer_tree(source: Source, native: ModuleState) -> dict[str, object]:
    """What stages 1 and 2 read under ``param_groups``, stage 3 under ``optimizer_state_dict``.

    Stage 3 copies its first group over every other. So it gets only the fields in which all groups agree: the engine keeps
    its own values of the others. Source: DeepSpeed 0.19.8, ``runtime/base_optimizer.py`` and ``runtime/zero/stage3.py``
    (``load_hp_checkpoint_state_from_checkpoint_dir_stage3``).
    """
    groups = [_stored_fields(group) | {"params": [number]} for number, group in enumerate(source.state.groups)]
    step = group_step(source.state.groups[0]) if source.state.groups else None
    first = (
        {key: value for key, value in groups[0].items() if key not in differing_fields(source.state.groups)}
        if groups
        else {}
    )
    scaler = {} if source.state.grad_scaler is None else {"loss_scaler": source.state.grad_scaler}
    return {
        **scaler,
        **native.optimizer,
        "ds_version": native.optimizer.get("ds_version") or source.state.other.get("ds_version") or VERSION,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {} if step is None else {STEP: step}}, "param_groups": [first]},
    }


def _stored_fields(group: ParamGroup) -> dict[str, object]:
    return {key: value for key, value in group.fields.items() if key not in group.scalars}


def differing_fields(groups: Sequence[ParamGroup]) -> list[str]:
    """The fields in which the groups are not all equal."""
    fields = [_stored_fields(group) for group in groups]
    return [key for key in fields[0] if any(other.get(key) != fields[0][key] for other in fields[1:])] if fields else []


def group_step(group: ParamGroup) -> object | None:
    """The group's step as it is stored: a tensor where the source has a float, since torch's optimizers count in one."""
    import torch

    step = group.fields.get(STEP) if STEP in group.scalars else None
    return torch.tensor(step, dtype=torch.float32) if isinstance(step, float) else step


_OWN_MASTERS = {MASTER: (MASTER, PARAM)}
"""What has no master is its own: frozen parameters, buffers, and all of an fp32 model without copies."""
_EXPERT = ".deepspeed_moe.experts.deepspeed_experts."
"""In the names of what DeepSpeed's own mixture-of-experts layer has. Source: DeepSpeed 0.19.8, ``moe/experts.py``."""


def universal_target(source: Source, options: WriteOptions) -> Target:
    """Describe the universal checkpoint that holds what a DeepSpeed source has, under the same names.

    Args:
        source: An opened checkpoint of DeepSpeed's, in either format.
        options: What the user asked for.

    Raises:
        CheckpointError: It cannot be done; all problems together.
    """
    native = module_state_of(source, "universal")
    return _Writer(source, native, options).target()


@dataclass
class _Writer:
    source: Source
    native: ModuleState
    options: WriteOptions

    def target(self) -> Target:
        report = self.source.notes.for_target()
        keys = TensorParallelKeys.of(self.source.state.other.get(INFO), self.native)
        self._check(keys)
        states = () if not self.optimizer else self.source.states
        files = StateFiles(
            self.folder, self.source.role, self.source.catalog, (MASTER, *(s for s in states if s != MASTER)), keys,
            self.options.vocab_size,
        )  # fmt: skip
        self._report(report)
        return Target(
            "universal", self.source.parallel, StateOrder(self.source.catalog, _OWN_MASTERS), tuple(self._files(files)),
            {LATEST: self.folder}, report, self._holds(),
        )  # fmt: skip

    def _holds(self) -> Inventory:
        """Everything that is carried."""
        held = inventory_of(self.source)
        return held if self.optimizer else {i: v for i, v in held.items() if i._replace(name=ANY) not in OF_OPTIMIZER}

    @property
    def optimizer(self) -> bool:
        """Whether there is an optimizer to be written."""
        return self.source.optimizer is not None and not self.options.no_optimizer

    @property
    def folder(self) -> str:
        """Name of the checkpoint's folder."""
        return f"{self.native.tag or f'global_step{self.source.state.iteration}'}{SUFFIX}"

    def _check(self, keys: TensorParallelKeys) -> None:
        """Every trained parameter needs a master; every pattern a parameter."""
        problems = Problems()
        for spec in self.source.model.params:
            if spec.trainable and self.optimizer and not self._has_master(spec):
                problems.add(
                    Incomplete,
                    f"{spec.name}: has no fp32 master weights in {self.source.root}, and {spec.dtype} weights are not as exact",
                    "A universal checkpoint is made of masters. --no-optimizer converts the weights alone.",
                )
        problems.raise_if_any()
        if not self.native.keys and not self.options.unused_patterns:
            keys.check([spec.name for spec in self.source.model.params])

    def _has_master(self, spec: ParamSpec) -> bool:
        role = self.source.role
        stored = self.source.catalog.get(TensorName(role, spec.name, MASTER))
        own = self.source.catalog.get(TensorName(role, spec.name, PARAM)) if stored is None else None
        return stored is not None or (own is not None and own.dtype == FLOAT32)

    def _files(self, files: StateFiles) -> Iterator[TargetFile]:
        """The large ones first: a worker that begins late with one holds up all others."""
        for mp_rank in range(self.source.parallel.tp * self.source.parallel.pp):
            for name, whole in ((model_file(mp_rank), mp_rank == 0), (stage3_model_file(mp_rank), False)):
                path = f"{self.folder}/{name}"
                yield TargetFile(path, partial(self._model_layout, path, mp_rank, whole))
        steps = self._steps()
        for spec in self.source.model.params:
            yield from files.files(spec, steps.get(spec.name))
        if self.optimizer:
            yield TargetFile(f"{self.folder}/{ZERO}/{OPTIMIZER_FILE}", self._optimizer_layout)

    def _model_layout(self, path: str, mp_rank: int, whole: bool) -> FileLayout:
        return ModelFile(self.source, self.native, path, mp_rank, whole).layout()

    def _optimizer_layout(self) -> FileLayout:
        return FileLayout([], [], Pt.of(optimizer_tree(self.source, self.native)))

    def _steps(self) -> dict[str, object]:
        """The step of every trained parameter: its group's, or that of all groups where members are not known."""
        groups = () if not self.optimizer else self.source.state.groups
        steps = {name: group_step(group) for group in groups for name in group.params}
        if groups and not steps:
            steps = {spec.name: group_step(groups[0]) for spec in self.source.model.params if spec.trainable}
        return {name: step for name, step in steps.items() if step is not None}

    def _report(self, report: Report) -> None:
        report.add(Fate.KEPT, "client state, counters and the learning-rate scheduler of every model-parallel rank")
        if any(_EXPERT in spec.name for spec in self.source.model.params):
            report.add(
                Fate.NOTE,
                "DeepSpeed's own experts have their global numbers; its loader looks for each rank's local ones, and so finds the "
                "right ones only in a run without expert parallelism (ep_size 1)",
            )
        unstored = [spec.name for spec in self.source.model.params if spec.trainable and not self._stores(spec, MASTER)]
        if unstored and self.optimizer:
            report.add(Fate.DERIVED, "fp32 master parameters: copies of the fp32 parameters")
        if not self.optimizer:
            fate, why = (Fate.LOST, "as asked for") if self.options.no_optimizer else (Fate.NOTE, "the source has none")
            text = "DeepSpeed loads such a checkpoint in stage 3 only, with load_module_only=True"
            report.add(fate, f"no optimizer, {why}: {text}", *OF_OPTIMIZER)
            return
        if any(not set(group.fields) - set(group.scalars) for group in self.source.state.groups):
            report.add(
                Fate.NOTE,
                "the source has no settings of param groups (elastic_checkpoint): those of the new run's configuration stay",
            )
        differing = differing_fields(self.source.state.groups)
        if differing:
            report.add(
                Fate.NOTE,
                f"stage 3 gives every param group the first one's values: {', '.join(differing)} differ between groups, are left out "
                "there, and stay as the new run's configuration has them; stages 1 and 2 restore them",
            )
        if self._steps():
            report.add(
                Fate.NOTE, "stage 3 restores one step tensor that all sub-groups share: give each its own after loading"
            )
        muon = sum(len(group.params) for group in self.source.state.groups if group.fields.get(USE_MUON) is True)
        if muon:
            report.add(
                Fate.NOTE,
                f"{MOMENTUM} of DeepSpeed's Muon ({muon} parameters): DeepSpeed restores it from here at DP 1, with BF16_Optimizer or "
                "an offloaded optimizer; elsewhere stages 1 and 2 keep whole parameters, and stage 3 looks for exp_avg: convert "
                "--to deepspeed for those",
            )
        if not {EXP_AVG, EXP_AVG_SQ} <= set(self.source.states):
            report.add(Fate.NOTE, "stage 3 restores Adam's states only; stages 1 and 2 restore any")

    def _stores(self, spec: ParamSpec, state: str) -> bool:
        return self.source.catalog.get(TensorName(self.source.role, spec.name, state)) is not None
