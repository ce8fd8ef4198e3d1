"""Opening ``state.pt``: ``{"model": module.state_dict(), "optimizer": optimizer.state_dict(), "optimizer_params": …, "scheduler": …}``, and
further parts under the names that the program gave them.

``optimizer_params`` says by group whose states the numbers are; without it, as in a file by ``torch.save`` itself, names follow from
shapes where only one order fits them. Of what lies beside, only what the file itself does not say is taken: a run may have gone on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import FLOAT32, FLOATING, MASTER, PARAM, TensorEntry, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, NotACheckpoint, Unsupported
from mcore_rlhf.families.fsdp.dealing import agree
from mcore_rlhf.families.fsdp.groups import PARAMS, STEP, Collected, name_numbers
from mcore_rlhf.families.fsdp.model import model_config, num_layers
from mcore_rlhf.families.fsdp.state import MOST_STEPS, iteration_of
from mcore_rlhf.families.inventory import Unplaced, of_torch, state_dict_of
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.run_folders import named_step
from mcore_rlhf.families.sidecar import Sidecar, sidecar_files
from mcore_rlhf.families.source import ParamGroup, Source, TrainingState
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pt import PtFile, read_pt
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.stored import StoredTensor, whole_entry
from mcore_rlhf.storage.torch_values import SmallTensor

from .files import FILE, GROUPS, ITERATION, MODEL, NAME, OPTIMIZER, RECORD, SCHEDULER, STATE


def is_saved(folder: ReadablePath) -> bool:
    """Whether a folder has such a file with a model in it; one that cannot be opened has, and whoever reads it hears why."""
    if not (folder / FILE).is_file():
        return False
    try:
        tree = read_pt(folder, FILE).tree
    except CheckpointError:
        return True
    return isinstance(tree, Mapping) and isinstance(tree.get(MODEL), Mapping)


def read_saved(path: ReadablePath, options: ReadOptions) -> Source:
    """Open the file.

    Args:
        path: The folder with it.
        options: Whether with the optimizer, which role, which stubs.

    Raises:
        CheckpointError: It is missing or damaged, holds no model, or an optimizer that names nobody's states.
    """
    if not (path / FILE).is_file():
        raise NotACheckpoint(f"{path}: has no {FILE}")
    opened = read_pt(path, FILE, stubs=options.stubs)
    if not isinstance(opened.tree, dict) or not isinstance(opened.tree.get(MODEL), Mapping):
        raise Unsupported(f"{path / FILE}: expected a dictionary with a {MODEL!r} in it, found none")
    return _SavedReader(path, opened, options).source()


@dataclass
class _SavedReader:
    path: ReadablePath
    opened: PtFile
    options: ReadOptions
    notes: Report = field(default_factory=Report)
    collected: Collected = field(default_factory=Collected)
    unplaced: Unplaced = field(default_factory=Unplaced)

    @property
    def where(self) -> str:
        return str(self.path / FILE)

    def source(self) -> Source:
        tensors, shared = self._tensors()
        kept = self.opened.tree.get(OPTIMIZER) if self.options.optimizer else None
        states = {} if kept is None else self._states(kept, tensors, shared)
        groups = () if kept is None else self.collected.groups(self.path, list(tensors), self.notes, states)
        trained = {name for group in groups for name in group.params}
        self._check(states, trained, tensors)
        state = self._training(groups)
        sidecar = self._beside(state.iteration)
        still = {*sidecar.frozen, *sidecar.module.buffers}
        role, specs, entries = self.options.role or "actor", list[ParamSpec](), list[TensorEntry]()
        for name, tensor in tensors.items():
            dtype = tensor.record.dtype
            of = name in trained if kept is not None else dtype in FLOATING and name not in still
            own = MASTER if kept is not None and of and dtype == FLOAT32 else PARAM
            held = {own: tensor, **states.get(name, {})}
            entries += [whole_entry(TensorName(role, name, state), stored) for state, stored in held.items()]
            specs.append(ParamSpec(name, tensor.shape, sidecar.dtypes.get(name, dtype), REPLICATED, of))
        found = dict.fromkeys(state for of_one in states.values() for state in of_one)
        masters = (MASTER,) if any(entry.name.state == MASTER for entry in entries) else ()
        buffers = tuple(s.name for s in specs if s.dtype not in FLOATING or s.name in sidecar.module.buffers)
        return Source(
            format=NAME,
            root=self.path,
            role=role,
            model=ModelSpec(tuple(specs), num_layers(tensors), bool(shared), vocab_size=self.options.vocab_size),
            catalog=Chunks.of(entries),
            state=_with_beside(state, sidecar.state),
            files=(StoredFile.of_zip(FILE, self.opened.directory), *sidecar_files(self.path)),
            states=(*masters, *found),
            optimizer=None if kept is None else self._kind(),
            notes=self.notes,
            family=replace(
                sidecar.module,
                order=tuple(name for name in self.opened.tree[MODEL] if name in tensors or name in shared),
                buffers=buffers,
                shared=shared,
                config=model_config(self.path) or sidecar.module.config,
            ),
            unplaced=self.unplaced.names,
            origin=sidecar.origin,
        )

    def _beside(self, iteration: int) -> Sidecar:
        """What we kept beside, unless a run went on since; an empty one where nothing is."""
        found = Sidecar.kept(self.path, self.options.stubs, self.notes)
        return found if found is not None and found.state.iteration == iteration else Sidecar()

    def _kind(self) -> str:
        """Torch's, and its class where the file says it."""
        record = self.opened.tree.get(RECORD)
        said = record.get("class") if isinstance(record, Mapping) else None
        known = isinstance(said, str) and all(map(str.isidentifier, said.split(".")))
        return f"{NAME} {said}" if known else NAME

    def _tensors(self) -> tuple[dict[str, StoredTensor], dict[str, str]]:
        """The model's tensors, each once, and second names of those that lie in the same memory."""
        tensors: dict[str, StoredTensor] = {}
        shared: dict[str, str] = {}
        first: dict[object, str] = {}
        for name, value in self.opened.tree[MODEL].items():
            if not isinstance(value, StoredTensor):
                self.unplaced.look(FILE, {name: value}, {}, MODEL)
                continue
            if not isinstance(name, str):
                raise Unsupported(
                    f"{self.where}: {MODEL!r} has a tensor under {name!r:.60}, which is no name of a parameter"
                )
            owner = first.setdefault((value.record.key, value.start, value.shape, value.strides), name)
            if owner == name or not value.shape:
                tensors[name] = value
            else:
                shared[name] = owner
        if not tensors:
            raise Unsupported(f"{self.where}: its {MODEL!r} holds no tensors")
        return tensors, shared

    def _states(
        self, stored: Any, tensors: Mapping[str, StoredTensor], shared: Mapping[str, str]
    ) -> dict[str, dict[str, StoredTensor]]:
        """The optimizer's states by parameter; groups and numbers on the way."""
        groups, kept = self._parts_of(stored)
        self.unplaced.look(FILE, stored, of_torch(stored), OPTIMIZER)
        self.unplaced.look(FILE, self.opened.tree.get(RECORD), dict.fromkeys(("class", "names", "shapes")), RECORD)
        self.collected.fields = {number: dict(group) for number, group in enumerate(groups)}
        found: dict[str, dict[str, StoredTensor]] = {}
        for number, values in kept.items():
            for key, value in values.items():
                if isinstance(value, StoredTensor) and key != STEP and value.shape:
                    found.setdefault(str(number), {})[key] = value
                elif value is not None:  # a momentum that an older SGD has not begun
                    self.collected.scalars.setdefault(str(number), {})[key] = self._scalar(number, key, value)
        names = self._names(groups, tensors, shared, found)
        return {names[number]: states for number, states in found.items() if number in names}

    def _scalar(self, number: object, key: object, value: object) -> object:
        """What is kept once per parameter: a number, or a tensor of one."""
        found = self.opened.materialize(value)
        if type(found) in (int, float, bool) or (isinstance(found, SmallTensor) and found.numel() == 1):
            return found
        raise Unsupported(
            f"{self.where}: {key!r:.60} of the optimizer's parameter {number!r:.60} is a {type(found).__name__}, which no group can have\n"
            "--no-optimizer takes the weights alone."
        )

    def _parts_of(self, stored: Any) -> tuple[list[Mapping[str, Any]], Mapping[Any, Mapping[str, Any]]]:
        groups, kept = (stored.get(key) for key in (GROUPS, STATE)) if isinstance(stored, Mapping) else (None, None)
        if not isinstance(groups, list) or not isinstance(kept, Mapping) or not _are_dictionaries(groups, kept):
            raise Unsupported(f"{self.where}: its {OPTIMIZER!r} is not the state dict of one of torch's optimizers")
        return groups, kept

    def _names(
        self,
        groups: list[Mapping[str, Any]],
        tensors: Mapping[str, StoredTensor],
        shared: Mapping[str, str],
        states: Mapping[str, Mapping[str, StoredTensor]],
    ) -> dict[str, str]:
        """Whose the numbers are, as the file says; what the model does not have is left out, by name."""
        record = self.opened.tree.get(RECORD)
        said = record.get("names") if isinstance(record, Mapping) else None
        if said is None:
            shapes = {name: tensor.shape for name, tensor in tensors.items() if tensor.record.dtype in FLOATING}
            one = {number: next(iter(of.values())).shape for number, of in states.items()}
            return name_numbers(self.collected, shapes, one, self.path, self.notes)
        names: dict[str, str] = {}
        for number, (group, own) in enumerate(self._paired(groups, said)):
            pairs = list(zip(map(str, group[PARAMS]), (shared.get(name, name) for name in own), strict=True))
            names |= {key: name for key, name in pairs if name in tensors}
            self.collected.fields[number][PARAMS] = [name for _, name in pairs if name in tensors]
            if others := [name or f"number {key}" for key, name in pairs if name not in tensors]:
                text = f"param group {number}: the model has no {', '.join(others)}; their states are not carried"
                self.notes.add(Fate.LOST, text)
        self.collected.scalars = {names[key]: of for key, of in self.collected.scalars.items() if key in names}
        return names

    def _paired(self, groups: list[Mapping[str, Any]], said: Any) -> Iterator[tuple[Mapping[str, Any], list[Any]]]:
        for number, group in enumerate(groups):
            own = said[number] if isinstance(said, list) and number < len(said) else None
            members = group.get(PARAMS)
            if (
                not isinstance(own, list)
                or not all(name is None or isinstance(name, str) for name in own)
                or not isinstance(members, list)
                or len(own) != len(members)
            ):
                raise LayoutMismatch(f"{self.where}: {RECORD!r} does not describe the parameters of {OPTIMIZER!r}")
            yield group, own

    def _check(
        self, states: Mapping[str, Mapping[str, StoredTensor]], trained: set[str], tensors: Mapping[str, StoredTensor]
    ) -> None:
        """Every state has one value per element; one of a parameter that is a number looks like a step."""
        for name in trained:
            counts = [key for key in self.collected.scalars.get(name, {}) if key != STEP]
            if counts and not tensors[name].shape:
                raise Unsupported(f"{self.where}: {name} has no dimensions; its {counts[0]} is not supported yet")
        for name, of in states.items():
            for state, held in of.items():
                if held.shape != tensors[name].shape:
                    raise Unsupported(
                        f"{self.where}: {name} has the shape {tensors[name].shape}, its {state} {held.shape}; only states with one "
                        "value per element can be converted"
                    )

    def _training(self, groups: tuple[ParamGroup, ...]) -> TrainingState:
        parts = {str(key): value for key, value in self.opened.tree.items() if key not in (MODEL, OPTIMIZER, RECORD)}
        other = {key: self.opened.materialize(value) for key, value in parts.items()}
        scheduler = state_dict_of(other.pop(SCHEDULER, None), SCHEDULER, self.notes)
        state = None if scheduler is None else dict(scheduler)
        step = iteration_of(named_step(self.path), other, state, groups, self.notes)
        said = other.get(ITERATION)
        if type(said) is int:
            if not 0 <= said < MOST_STEPS:
                raise LayoutMismatch(
                    f"{self.where}: {ITERATION} is {said:.3g}, where no run comes\nThe file is damaged or forged."
                )
            del other[ITERATION]
        return TrainingState(step, groups=groups, scheduler=state, other=other)


def _with_beside(state: TrainingState, known: TrainingState) -> TrainingState:
    """The file's own state, with what lay beside it: another framework's scheduler, fields of the groups, values."""
    return replace(
        known, iteration=state.iteration, release=False, other={**known.other, **state.other},
        groups=known.groups if agree(state.groups, known.groups) else state.groups,
        scheduler=state.scheduler if known.scheduler is None else known.scheduler,
    )  # fmt: skip


def _are_dictionaries(groups: Iterable[object], kept: Mapping[Any, object]) -> bool:
    return all(isinstance(one, Mapping) for one in (*groups, *kept.values()))
