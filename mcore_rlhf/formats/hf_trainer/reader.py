"""Opening a checkpoint of transformers' Trainer, or accelerate's: its weights, with the optimizer and all else that lies beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import FLOAT32, MASTER, PARAM, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.core.rows import Tensor
from mcore_rlhf.errors import LayoutMismatch, Unsupported, shown
from mcore_rlhf.families.crossing.packing import repacked
from mcore_rlhf.families.fsdp.dealing import agree
from mcore_rlhf.families.fsdp.state import EPOCH, MOST_STEPS
from mcore_rlhf.families.inventory import Unplaced, of_torch, state_dict_of
from mcore_rlhf.families.lora.names import OF_ADAPTER
from mcore_rlhf.families.module import ModuleState, scaler_of
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.run_folders import named_step
from mcore_rlhf.families.sidecar import Sidecar
from mcore_rlhf.families.source import ITERATION, ParamGroup, Source, TrainingState
from mcore_rlhf.families.trainer_counters import COUNTERS, STEP, read_counters
from mcore_rlhf.families.trainer_files import FSDP_WHOLE, RunFiles
from mcore_rlhf.formats.base import Format
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.huggingface.config import packed_in
from mcore_rlhf.models.spec import OF_WRAPPER, REPLICATED, ParamSpec
from mcore_rlhf.storage.containers import open_tensors
from mcore_rlhf.storage.paths import ReadablePath, absolute
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.stored import whole_entry

from .files import HEAD_FILES, SCALER, HfRunState
from .optimizer import OptimizerFile, trainable_order

_CALLED = re.compile(r"checkpoint-(\d{1,18})")


def read_run(
    path: ReadablePath, options: ReadOptions, files: RunFiles, weights: Format, *, several: bool = False
) -> Source:
    """Open a checkpoint.

    Args:
        path: Its folder.
        options: Whether with the optimizer, which stubs.
        files: What its files are called.
        weights: The format of its weights.
        several: Whether it is one of several models, each with an optimizer of its own.

    Raises:
        CheckpointError: It is damaged, contradicts itself, or nobody knows whose states the optimizer has.
    """
    own = not weights.weights_only  # has the optimizer in files of its own
    source = _with_head(weights.read(path, options if own else replace(options, optimizer=False)), options)
    if not (own or several or not options.optimizer):
        _refuse_second(path / files.of_model(1).optimizer)
    return _RunReader(path, options, files, source, own, several).source()


def _with_head(weights: Source, options: ReadOptions) -> Source:
    """Weights with the value head that lies in a file of its own beside them.

    Source: LLaMA-Factory 0.9.5, ``train/callbacks.py`` (``fix_valuehead_checkpoint``: reward models and PPO, whole or with an adapter).
    """
    file = next((name for name in HEAD_FILES if (weights.root / name).is_file()), "")
    if not file or any(weights.model.get(name) is not None for name in OF_WRAPPER):
        return weights
    found = open_tensors(weights.root, file, options.stubs)
    if strange := sorted({*found.tensors} - {*OF_WRAPPER}):
        if not options.optimizer:  # which may train it: without, it is a file beside
            return weights
        raise Unsupported(f"{weights.root / file}: has {shown(strange[0])}, expected {' and '.join(OF_WRAPPER)} alone")
    catalog, specs = Chunks(), [*weights.model.params]
    for entry in weights.catalog:
        catalog.add(entry, weights.catalog.tensor(entry))
    for name, held in found.tensors.items():
        catalog.add(key := TensorName(weights.role, name), Tensor.of(whole_entry(key, held)))
        specs.append(ParamSpec(name, held.shape, held.record.dtype, REPLICATED))
    stored = StoredFile(found.file, found.nbytes, found.records)
    family = ModuleState.needed(weights)
    return replace(
        weights, model=weights.model.having(specs), catalog=catalog, files=(*weights.files, stored),
        family=replace(family, order=(*family.order, *found.tensors) if family.order else ()),
    )  # fmt: skip


def _refuse_second(second: ReadablePath) -> None:
    if second.is_file():
        raise Unsupported(
            f"{second}: a second optimizer; no file says which trains what\n--no-optimizer takes the weights alone."
        )


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


@dataclass
class _RunReader:
    path: ReadablePath
    options: ReadOptions
    files: RunFiles
    weights: Source
    own: bool = False
    several: bool = False
    notes: Report = field(default_factory=Report)
    unplaced: Unplaced = field(default_factory=Unplaced)
    stored: list[StoredFile] = field(default_factory=list)

    def source(self) -> Source:
        self.notes = self.weights.notes.copy()
        counters, scheduler = read_counters(self.path, self.files), self._tree(self.files.scheduler)
        optimizer = self._optimizer()
        weights = self.weights if optimizer is None else self._as_trained(optimizer)
        order = None if optimizer is None else self._named(optimizer, weights)
        groups = (
            self.weights.state.groups if optimizer is None or order is None else optimizer.groups(order, self.notes)
        )
        rng, stored = self.files.read_rng(self.path, self.options.stubs)
        kept = self._sidecar()
        iteration = self._iteration(counters, groups, scheduler, len(rng), kept)
        sidecar = kept if kept is not None and kept.state.iteration == iteration else None  # unless a run went on since
        source = self._as_computed(weights, sidecar)
        if optimizer is not None and order is not None:
            source = self._joined(weights, optimizer, order, groups, sidecar)
        known = () if sidecar is None else sidecar.state.groups
        state = self._training(iteration, counters, scheduler, known if agree(groups, known) else groups, sidecar)
        self.stored += stored
        family = ModuleState.needed(source)
        own = {"tag": f"global_step{iteration}", "rng": rng}
        shared = {item.name: getattr(family, item.name) for item in fields(ModuleState)} | own
        scalars = {} if optimizer is None else optimizer.collected.scalars
        within = family if self.own else None
        run = HfRunState(
            **shared, scalars=scalars, groups=groups, schedule=_mapping(scheduler), within=within, together=self.several,
            whole=(self.path / FSDP_WHOLE).is_file(),
        )  # fmt: skip
        return replace(
            source,
            format=self.files.format,
            parallel=ParallelConfig(dp=max(1, len(rng))),
            state=state,
            files=(*source.files, *self._counters_file(), *self.stored),
            notes=self.notes,
            family=run,
            unplaced=(*source.unplaced, *self.unplaced.names),
            origin={} if sidecar is None else sidecar.origin,
        )

    def _as_computed(self, weights: Source, sidecar: Sidecar | None) -> Source:
        """Weights that have their optimizer with them, in the types in which the model computes."""
        dtypes = {} if sidecar is None or not weights.states else sidecar.dtypes
        specs = (replace(spec, dtype=dtypes.get(spec.name, spec.dtype)) for spec in weights.model.params)
        return replace(weights, model=weights.model.having(specs)) if dtypes else weights

    def _tree(self, file: str) -> object:
        """What a small file has; None where there is none, or nobody wants the optimizer."""
        if not self.options.optimizer or not (self.path / file).is_file():
            return None
        opened = read_pt(self.path, file, stubs=self.options.stubs)
        self.stored.append(StoredFile.of_zip(file, opened.directory))
        return opened.materialize(opened.tree)

    def _optimizer(self) -> OptimizerFile | None:
        if self.own or not self.options.optimizer or not (self.path / self.files.optimizer).is_file():
            return None
        found = OptimizerFile.open(self.path, self.files.optimizer, self.options.stubs)
        self.stored.append(StoredFile.of_zip(self.files.optimizer, found.opened.directory))
        self.unplaced.look(self.files.optimizer, found.opened.tree, of_torch(found.opened.tree))
        return found

    def _as_trained(self, optimizer: OptimizerFile) -> Source:
        """The weights as the module had them, which has as many parameters as the optimizer: with the experts of a layer in one tensor
        (transformers 5), or each a module, as they are on disk (transformers 4), and then there is nothing to pack for another module.
        """
        config, trained = self.weights.family.config, [spec for spec in self.weights.model.params if spec.trainable]
        if not packed_in(config):
            return self.weights
        if optimizer.count == len(trained):
            return replace(self.weights, family=replace(ModuleState.needed(self.weights), packs_experts=True))
        return repacked(self.weights, config, packs_experts=True)

    def _named(self, optimizer: OptimizerFile, weights: Source) -> list[str]:
        """The parameters in the module's order, with the optimizer's numbers named."""
        try:
            order = trainable_order(weights.family.config, weights.model, self._frozen(weights))
        except Unsupported as error:
            first, _, rest = str(error).partition("\n")
            raise Unsupported(
                f"{optimizer.where}: the optimizer has numbers in the place of names, by the order of the model's parameters: {first}\n"
                f"{rest}\n--no-optimizer takes the weights alone."
            ) from None
        adapters = [name for name in order if OF_ADAPTER.fullmatch(name)]
        if optimizer.count == len(adapters):  # given what is trained alone, beside a base that is not
            order = adapters
        optimizer.name(order, weights.model.shapes, self.notes, weights.family.shared)
        return order

    def _frozen(self, weights: Source) -> set[str]:
        """What cannot be in the optimizer: buffers, and what the user says."""
        said = self.options.rules.trainable
        return {*weights.family.buffers, *(spec.name for spec in weights.model.params if said(spec.name) is False)}

    def _joined(
        self, weights: Source, optimizer: OptimizerFile, order: list[str], groups: tuple[ParamGroup, ...], sidecar: Sidecar | None
    ) -> Source:  # fmt: skip
        """The weights with the optimizer's states; a trained fp32 parameter is its own master."""
        trained, states = {name for group in groups for name in group.params}, optimizer.of_names()
        dtypes = {} if sidecar is None else sidecar.dtypes
        table, specs, role = Chunks(), [], weights.role
        places = {name: at for at, name in enumerate(order)}
        for spec in sorted(weights.model.params, key=lambda spec: places.get(spec.name, len(order))):
            own = MASTER if spec.name in trained and spec.dtype == FLOAT32 else PARAM
            table.add(TensorName(role, spec.name, own), weights.catalog.tensor(TensorName(role, spec.name, PARAM)))
            for state, held in states.get(spec.name, {}).items():
                table.add(name := TensorName(role, spec.name, state), Tensor.of(whole_entry(name, held)))
            dtype = dtypes.get(spec.name, spec.dtype) if own == MASTER else spec.dtype
            specs.append(replace(spec, dtype=dtype, trainable=spec.name in trained))
        found = dict.fromkeys(name.state for name in table if name.state not in (PARAM, MASTER))
        masters = (MASTER,) if any(name.state == MASTER for name in table) else ()
        family = ModuleState.needed(weights)
        known = (*order, *(name for name in family.order if name not in trained), *family.shared)
        return replace(
            weights, model=weights.model.having(specs), catalog=table, states=(*masters, *found), optimizer="torch",
            family=replace(family, order=tuple(dict.fromkeys(known))),
        )  # fmt: skip

    def _iteration(
        self, counters: Mapping[str, object], groups: tuple[ParamGroup, ...], scheduler: object, ranks: int, kept: Sidecar | None
    ) -> int:  # fmt: skip
        """The step that was reached: as the files say, the folder is called, or the optimizer or else the schedule have counted.

        Source: accelerate 1.15.0, ``scheduler.py`` (``AcceleratedScheduler.step``): a schedule counts once for every process.
        """
        said, called, named = counters.get(STEP), _CALLED.fullmatch(absolute(self.path).name), named_step(self.path)
        if isinstance(said, int):
            if called is not None and int(called[1]) != said:
                raise LayoutMismatch(
                    f"{self.path / self.files.counters}: {STEP} is {said}, and the folder is called {self.path.name}\n"
                    "Files of different steps are mixed, or the folder was renamed: give it the name of its step."
                )
            return said
        steps = {int(float(group.fields["step"])) for group in groups if "step" in group.fields}  # type: ignore[arg-type]
        epoch, times = scheduler.get(EPOCH) if isinstance(scheduler, Mapping) else None, max(ranks, 1)
        if named is not None:
            found, where = named, "from the folder's name"
        elif steps:
            found, where = max(steps), "from the optimizer's step"
        elif isinstance(epoch, int) and 0 <= epoch <= MOST_STEPS and epoch % times == 0:
            found, where = epoch // times, f"from the schedule, which is at {EPOCH} {epoch}"
        elif kept is not None:
            found, where = kept.state.iteration, "as what it was converted from had it"
        else:
            found, where = 0, "nothing says how many steps were made"
        self.notes.through([ITERATION], {"at": found, "how": where})
        return found

    def _sidecar(self) -> Sidecar | None:
        """What we kept beside."""
        place = ModuleState.needed(self.weights).place
        return Sidecar.kept(self.path / place if place else self.path, self.options.stubs, self.notes)

    def _training(
        self, iteration: int, counters: Mapping[str, object], scheduler: object, groups: tuple[ParamGroup, ...], sidecar: Sidecar | None
    ) -> TrainingState:  # fmt: skip
        state = TrainingState(iteration) if sidecar is None else sidecar.state
        own = state_dict_of(scheduler, self.files.scheduler, self.notes)
        if own is None and groups:
            self.notes.add(Fate.NOTE, f"{self.files.scheduler} is not there, {self.files.unscheduled}")
        known = self.weights.state.other  # an adapter's configuration
        other = {**known, **state.other, **({COUNTERS: dict(counters)} if counters else {})}
        return replace(
            state, iteration=iteration, release=False, groups=groups, other=other,
            scheduler=state.scheduler if state.scheduler is not None else None if own is None else dict(own),
            grad_scaler=state.grad_scaler if state.grad_scaler is not None else self._scaler(iteration),
        )  # fmt: skip

    def _scaler(self, iteration: int) -> object | None:
        """Torch's loss scaler as other formats under a module's names keep one."""
        values = self._tree(SCALER)
        if not isinstance(values, Mapping) or "scale" not in values:
            return None
        back, growth = values.get("backoff_factor", 0.5), values.get("growth_factor", 2.0)
        if not (isinstance(back, int | float) and isinstance(growth, int | float) and back * growth == 1):
            text = (
                f"{SCALER}: backoff_factor {back!r}: all formats go back by as much as they grow, which is {growth!r}"
            )
            self.notes.add(Fate.LOST, text)
        return scaler_of(
            {
                "dynamic_loss_scale": True, "cur_scale": values["scale"], "cur_iter": iteration,
                "last_overflow_iter": iteration - int(values.get("_growth_tracker", 0)),
                "scale_factor": values.get("growth_factor", 2.0), "scale_window": values.get("growth_interval", 2000),
            }
        )  # fmt: skip

    def _counters_file(self) -> list[StoredFile]:
        name = self.files.counters
        return [StoredFile.at(self.path, name)] if name and (self.path / name).is_file() else []
