"""Describing a new universal checkpoint: the superset that DeepSpeed loads in stages 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from mcore_rlhf.core.account import ANY, Fate, Inventory, Report
from mcore_rlhf.core.dtype import FLOAT32
from mcore_rlhf.core.names import EXP_AVG, EXP_AVG_SQ, MASTER, PARAM, TensorName
from mcore_rlhf.errors import Incomplete, Problems
from mcore_rlhf.families.inventory import OF_OPTIMIZER, inventory_of
from mcore_rlhf.families.module import MOMENTUM, USE_MUON, ModuleState, module_state_of
from mcore_rlhf.families.source import Source, WriteOptions
from mcore_rlhf.formats.base import FileLayout, Target, TargetFile
from mcore_rlhf.models.spec import ParamSpec

from .names import INFO, LATEST, OPTIMIZER_FILE, SUFFIX, ZERO, model_file, stage3_model_file
from .state_files import MasterView, StateFiles, create
from .tp_keys import TensorParallelKeys
from .trees import ModelFile, differing_fields, group_step, optimizer_tree

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
            "universal", self.source.parallel, MasterView(self.source.catalog), tuple(self._files(files)),
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
        path = f"{self.folder}/{ZERO}/{OPTIMIZER_FILE}"
        return FileLayout([], [], partial(create, path, optimizer_tree(self.source, self.native)))

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
