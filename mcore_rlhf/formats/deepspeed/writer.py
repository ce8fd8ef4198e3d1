"""Describing a new native DeepSpeed checkpoint from an opened source of the DeepSpeed family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from mcore_rlhf.core.account import ANY, Fate, Inventory, Item, Kind, Reason, Report
from mcore_rlhf.core.dtype import FLOAT32, FLOATING
from mcore_rlhf.core.names import MASTER, PARAM, TensorName
from mcore_rlhf.core.views import EITHER, FROM_MASTERS, Remembered, StateOrder
from mcore_rlhf.errors import Incomplete, Problems, Unsupported
from mcore_rlhf.families.inventory import LEFT_OUT, OF_OPTIMIZER, inventory_of
from mcore_rlhf.families.module import MOMENTUM, USE_MUON, ModuleState, module_state_of
from mcore_rlhf.families.source import Source, WriteOptions
from mcore_rlhf.formats.base import FileLayout, Target, TargetFile
from mcore_rlhf.formats.carried import AT_THE_TOP
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.spec import ModelSpec, ParamSpec
from mcore_rlhf.storage.pt import Pt

from .files import LATEST, layer_name, model_name, model_name_of_rank, optim_name
from .layout import Blueprint, Choices, Records, choose
from .reader import DeepSpeedNative, differing_keys, other_values
from .state_dicts import Tree, Trees
from .tag import expert_name

_Tree = Callable[[Records], Tree]
_INFO = "universal_checkpoint_info"
"""How AutoTP cut the tensors."""
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
    native = module_state_of(source, "deepspeed")
    if any(expert_name(spec.name) is not None for spec in source.model.params):
        raise Unsupported(
            f"{source.root}: native files of a model with DeepSpeed's own experts are read, and not written\n"
            "Convert it --to universal, which has every expert under its global number."
        )
    report = source.notes.for_target()
    choices = choose(source, native, options, report)
    if (
        options.no_optimizer and source.format not in AT_THE_TOP
    ):  # a source of which it was not read does not say that it has one
        report.add(Fate.LOST, LEFT_OUT, *OF_OPTIMIZER)
    return _Writer(source, native, choices, report).target()


@dataclass
class _Writer:
    source: Source
    native: ModuleState
    choices: Choices
    report: Report

    def target(self) -> Target:
        """The whole target."""
        choices = self.choices
        self._check_masters()
        view = Remembered(StateOrder(self.source.catalog, EITHER if choices.dtype is None else FROM_MASTERS))
        holders = self.native.holders if isinstance(self.native, DeepSpeedNative) and choices.mp > 1 else None
        blueprint = Blueprint(
            self.source.role, self._model(), choices, self.source.state.groups, self._states(), view, holders
        )
        opaque = [m.opaque for m in self.native.modules] if isinstance(self.native, DeepSpeedNative) else []
        trees = Trees(blueprint, self.source.state, self.native, opaque)
        self._note()
        parallel = ParallelConfig(tp=choices.tp, pp=choices.pp, etp=choices.tp, dp=choices.dp)
        files = tuple(self._files(trees))
        return Target("deepspeed", parallel, view, files, {LATEST: choices.tag}, self.report, self._holds())

    def _holds(self) -> Inventory:
        """Everything that is carried; ``ds_config`` says the stage that is written."""
        held = dict(inventory_of(self.source))
        zero = Item(Kind.ARGUMENT, "zero_optimization")
        self.report.settle(Fate.DERIVED, "with the stage that is written", zero)
        cut = [_KEYS] if self.choices.tp == self.source.parallel.tp else [_KEYS, Item(Kind.VALUE, _INFO)]
        self.report.leave(Reason.OF_LAYOUT, *cut)
        held = {item: value for item, value in held.items() if item not in cut}
        return (
            held
            if self.choices.optimizer
            else {i: v for i, v in held.items() if i._replace(name=ANY) not in OF_OPTIMIZER}
        )

    def _model(self) -> ModelSpec:
        """The model with the target's dtypes."""
        return self.source.model.having(self._spec(spec) for spec in self.source.model.params)

    def _spec(self, spec: ParamSpec) -> ParamSpec:
        if self.choices.dtype is None or spec.name in self.native.buffers or spec.dtype not in FLOATING:
            return spec
        return replace(spec, dtype=self.choices.dtype)

    def _states(self) -> tuple[str, ...]:
        if not self.choices.optimizer:
            return ()
        return (MASTER, *(state for state in self.source.states if state != MASTER))

    def _check_masters(self) -> None:
        """16-bit weights are not as exact as the masters that ZeRO needs."""
        problems = Problems()
        for spec in self.source.model.params if self.choices.optimizer else ():
            if spec.trainable and not self._has(spec, MASTER):
                param = self.source.catalog.get(TensorName(self.source.role, spec.name, PARAM))
                if param is None or param.dtype != FLOAT32:
                    text = f"{spec.name}: has no fp32 master weights in {self.source.root}"
                    problems.add(Incomplete, text, "--no-optimizer --zero-stage 0 converts the weights alone.")
        problems.raise_if_any()

    def _has(self, spec: ParamSpec, state: str) -> bool:
        return self.source.catalog.get(TensorName(self.source.role, spec.name, state)) is not None

    def _files(self, trees: Trees) -> list[TargetFile]:
        """Optimizer files first: they are the large ones."""
        choices, files = self.choices, list[TargetFile]()
        ranks = [(dp_rank, mp_rank) for mp_rank in range(choices.mp) for dp_rank in range(choices.dp)]
        if choices.optimizer and choices.stage > 0:
            for at in ranks:
                files.append(self._file(optim_name(*at, choices.prefix), partial(self._optim, trees, *at)))
        for dp_rank, mp_rank in ranks if choices.stage == 3 else [(0, mp_rank) for mp_rank in range(choices.mp)]:
            name = model_name_of_rank(dp_rank, mp_rank) if choices.stage == 3 else model_name(mp_rank)
            files.append(self._file(name, partial(self._model_states, trees, dp_rank, mp_rank)))
        return [*files, *self._layer_files(trees)]

    def _layer_files(self, trees: Trees) -> list[TargetFile]:
        files: dict[str, TargetFile] = {}
        modules = self.native.modules if isinstance(self.native, DeepSpeedNative) else []
        for mp_rank, module in enumerate(modules):
            for layer, keys in module.layers.items():
                name = layer_name(layer, mp_rank % self.choices.tp, self.choices.tp)
                files.setdefault(name, self._file(name, partial(self._layer, trees, keys, mp_rank)))
        return list(files.values())

    def _optim(self, trees: Trees, dp_rank: int, mp_rank: int, records: Records) -> Tree:
        return trees.optim_tree(records, dp_rank, mp_rank)

    def _model_states(self, trees: Trees, dp_rank: int, mp_rank: int, records: Records) -> Tree:
        return trees.model_tree(records, dp_rank, mp_rank, self._other(dp_rank, mp_rank))

    def _layer(self, trees: Trees, keys: Mapping[str, str], mp_rank: int, records: Records) -> Tree:
        return trees.layer_tree(records, keys, mp_rank)

    def _file(self, name: str, tree: _Tree) -> TargetFile:
        path = f"{self.choices.tag}/{name}"
        return TargetFile(path, partial(_lay_out, path, self.source.role, tree))

    def _other(self, dp_rank: int, mp_rank: int) -> Mapping[str, object]:
        """Counters and client state: a rank's own, where the same rank wrote them."""
        if self._same_ranks() and isinstance(self.native, DeepSpeedNative) and self.native.opened is not None:
            return other_values(self.native.opened, dp_rank, mp_rank)
        if self.native.per_rank and self.choices.tp == self.source.parallel.tp:
            return self.native.per_rank[mp_rank]
        if self.choices.tp == self.source.parallel.tp:
            return self.source.state.other
        return {key: value for key, value in self.source.state.other.items() if key != _INFO}

    def _same_ranks(self) -> bool:
        """Whether both have a model file of each data-parallel rank, of as many."""
        return (
            self.source.optimizer == "zero3" and self.choices.stage == 3 and self.choices.dp == self.source.parallel.dp
        )

    def _note(self) -> None:
        source, choices = self.source, self.choices
        was = (source.optimizer or "weights alone").replace("zero", "ZeRO ")
        now = f"ZeRO {choices.stage}" if choices.optimizer else "weights alone"
        if (was, source.parallel.dp) != (now, choices.dp):
            self.report.add(Fate.CHANGED, f"{was} on DP {source.parallel.dp} becomes {now} on DP {choices.dp}")
        if choices.tp != source.parallel.tp:
            self.report.add(
                Fate.CHANGED, f"TP {source.parallel.tp} becomes TP {choices.tp}; values of rank 0 stand for all"
            )
        if choices.stage == 3 and source.optimizer != "zero3":
            size = f"{choices.sub_group_size:,} elements"
            self.report.add(
                Fate.NOTE, f"stage 3: sub-groups of {size}; the run that loads it needs the same sub_group_size"
            )
        if choices.optimizer and MASTER not in source.states:
            self.report.add(Fate.DERIVED, "fp32 masters: copies of the fp32 parameters")
        if choices.optimizer and choices.stage == 0 and not choices.half and MASTER in source.states:
            self.report.add(
                Fate.DERIVED, "fp32 masters: not kept apart, since stage 0 trains the fp32 parameters themselves"
            )
        self._note_parameters()
        self._note_momenta()
        self._note_gaps()
        self._note_ranks()
        if not choices.optimizer and source.optimizer is not None:
            self.report.add(Fate.LOST, LEFT_OUT, *OF_OPTIMIZER)

    def _note_ranks(self) -> None:
        """Stage 3 has client state of every rank, which other ranks have no use for."""
        opened = self.native.opened if isinstance(self.native, DeepSpeedNative) else None
        if opened is None or not opened.sliced or self._same_ranks():
            return
        differing = differing_keys(opened)
        if differing:
            self.report.add(
                Fate.LOST,
                f"of values that differ between the source's ranks, only rank 0's: {', '.join(differing)}",
                *(Item(Kind.VALUE, key) for key in differing),
            )

    def _note_parameters(self) -> None:
        dtype, masters = self.choices.dtype, MASTER in self.source.states
        if dtype is not None and any(s.dtype != dtype for s in self.source.model.params if s.trainable):
            kept = masters and self.choices.optimizer
            text = f"parameters: converted to {dtype}" + (" from their fp32 masters, which are kept" if kept else "")
            self.report.add(Fate.DERIVED if kept else Fate.LOST, text)
        elif self.source.optimizer == "zero3" and self.choices.stage < 3:
            self.report.add(
                Fate.DERIVED, "parameters: rounded from their fp32 masters, since stage 3 does not store them"
            )

    def _note_momenta(self) -> None:
        """Two runs of one stage keep Muon's momenta in two ways, and DeepSpeed does not notice the other one."""
        if self.choices.stage in (1, 2) and any(
            group.fields.get(USE_MUON) is True for group in self.source.state.groups
        ):
            kept = "cut as all other states" if self.choices.flat_momentum else "in whole parameters"
            whose = "BF16_Optimizer or an" if self.choices.flat_momentum else "neither BF16_Optimizer nor an"
            self.report.add(
                Fate.NOTE,
                f"{MOMENTUM} of DeepSpeed's Muon: {kept}, for a run with {whose} offloaded optimizer, as ds_config says",
            )

    def _note_gaps(self) -> None:
        """States that some parameters have and others of their group do not: ZeRO has them all, as zeros."""
        missing = []
        for group in self.source.state.groups:
            members = [spec for name in group.params if (spec := self.source.model.get(name)) is not None]
            for state in self._states()[1:]:
                without = [spec.name for spec in members if not self._has(spec, state)]
                if len(without) < len(members):  # else the group is trained without it
                    missing += [f"{name} ({state})" for name in without]
        if missing and self.choices.stage > 0:
            self.report.add(Fate.DERIVED, f"zeros for states that were never made: {', '.join(missing[:3])}")


def _lay_out(path: str, role: str, make: _Tree) -> FileLayout:
    records = Records(path, role)
    tree = make(records)
    return FileLayout(records.entries, records.records, Pt.of(tree))
