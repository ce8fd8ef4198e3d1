"""Opening a Hugging Face folder: weights, config and what lies beside them become one Source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.core.catalog import FLOATING, PARAM, Shape, TensorEntry, TensorName
from mcore_rlhf.errors import CheckpointError, LayoutMismatch, NotACheckpoint, Problems, Unsupported
from mcore_rlhf.families.crossing.quantized import is_quantized, method_of
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.sidecar import STATE, Sidecar, sidecar_files
from mcore_rlhf.families.source import Source, StoredFile, TrainingState
from mcore_rlhf.formats.checksums import listed_at
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.huggingface.rotary_fields import is_frequencies
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.stored import StoredTensor, whole_entry

from .config import EMBEDDING, LM_HEAD, check_config, is_tied, layers_in, read_own_config, refuse_other_file
from .files import CONFIG, OLD_STATE, OPTIMIZER, SAFETENSORS
from .series import Series, find_series, has_parts, read_series


def read_hf(path: ReadablePath, options: ReadOptions) -> Source:
    """Open a Hugging Face folder.

    Args:
        path: The folder with the weights.
        options: Which stubs; whether the optimizer that we kept there is read.

    Raises:
        CheckpointError: It is incomplete, damaged, or contradicts itself.
    """
    found = find_series(path)
    if found is None:
        if has_parts(path):
            raise Unsupported(
                f"{path}: has files shard-…-model-….safetensors with every rank's pieces of tensors, as torch's HuggingFaceStorageWriter "
                "saves them with save_distributed\nPut them together first: save with enable_consolidation=True, or let "
                "torch.distributed.checkpoint._consolidate_hf_safetensors.consolidate_safetensors_files do it."
            )
        raise NotACheckpoint(
            f"{path}: has neither model.safetensors nor pytorch_model.bin, nor an index of several such files"
        )
    notes, config = Report(), read_own_config(path)
    refuse_other_file(config, str(path / CONFIG))
    weights = read_series(path, *found, options.stubs)
    sidecar = _sidecar(path, options, notes)
    return _FolderReader(path, options, config, weights, sidecar, _step(path), notes).source()


def _step(path: ReadablePath) -> int:
    """The step that our manifest says the folder is of; a damaged one is refused by who holds it against the files."""
    try:
        listed = listed_at(path)
    except CheckpointError:
        return 0
    return (listed.manifest.step if listed is not None else None) or 0


def _sidecar(path: ReadablePath, options: ReadOptions, notes: Report) -> Sidecar | None:
    """What was kept beside the weights; damage matters only to someone who wants the optimizer."""
    try:
        found = Sidecar.read(path, options.stubs) or Sidecar.read(path, options.stubs, OLD_STATE)
        if found is not None and found.states and not (path / OPTIMIZER).is_dir():  # somebody wants the weights alone
            return replace(found, states=(), optimizer="", groups=())
        return found
    except CheckpointError as error:
        if options.optimizer:
            raise
        notes.add(Fate.LOST, f"what {STATE} keeps: {error}")
        return None


@dataclass
class _FolderReader:
    path: ReadablePath
    options: ReadOptions
    config: Mapping[str, object]
    weights: Series
    sidecar: Sidecar | None
    step: int
    notes: Report
    states: dict[str, Series] = field(default_factory=dict)

    def source(self) -> Source:
        for text in self.weights.notes:
            self.notes.add(Fate.NOTE, text)
        if self.config and not isinstance(self.config.get("model_type"), str):
            self.notes.add(Fate.NOTE, f"{CONFIG}: names no model_type, so that transformers cannot load the folder")
        method = method_of(self.config)
        if method:
            text = "they stay as they are in another Hugging Face folder, and are refused elsewhere"
            self.notes.add(Fate.NOTE, f"{CONFIG}: the weights are quantized, by {method}: {text}")
        if self.sidecar is not None and self.options.optimizer:
            self.states = {s: read_series(self.path, f"{OPTIMIZER}/{s}", SAFETENSORS) for s in self.sidecar.states}
        shared, twice = self._shared()
        params = {name: stored for name, stored in self.weights.tensors.items() if name not in twice}
        self._check(params, shared, twice)
        role = self.options.role or "actor"
        model = self._model(params, shared)
        optimizer = self.sidecar.optimizer or None if self.sidecar is not None and self.options.optimizer else None
        return Source(
            format="hf",
            root=self.path,
            role=role,
            model=model,
            parallel=ParallelConfig(),
            catalog=HuggingFaceCatalog(role, self._places(params, twice)),
            state=self._training(),
            files=tuple(self._files()),
            states=tuple(self.states),
            optimizer=optimizer,
            notes=self.notes,
            family=replace(self._native(model, shared), packs_experts=False),
            unplaced=self.weights.unplaced.names,
            origin={} if self.sidecar is None else self.sidecar.origin,
        )

    def _shared(self) -> tuple[dict[str, str], dict[str, str]]:
        """Second names of tied tensors, and those of them that are stored a second time: ``{alias: owner}`` each."""
        shared = dict(self.weights.shared)
        if shared.get(EMBEDDING) == LM_HEAD:  # the other way round, as everyone else has it
            self.weights.tensors[EMBEDDING] = self.weights.tensors.pop(LM_HEAD)
            shared = {
                LM_HEAD: EMBEDDING,
                **{a: EMBEDDING if o == LM_HEAD else o for a, o in shared.items() if a != EMBEDDING},
            }
        names = {*self.weights.tensors, *shared}
        known = self._known_ties()
        twice = {a: o for a, o in known.items() if a in self.weights.tensors and o in self.weights.tensors}
        if known.get(EMBEDDING) != LM_HEAD and is_tied(self.config, names, str(self.path / CONFIG)):
            shared[LM_HEAD] = EMBEDDING
            if LM_HEAD in self.weights.tensors:
                twice[LM_HEAD] = EMBEDDING
        shared.update({alias: owner for alias, owner in known.items() if owner in self.weights.tensors})
        for alias, owner in twice.items():
            self.notes.add(Fate.NOTE, f"{alias} is tied to {owner} and stored a second time: both must be equal")
        return shared, twice

    def _known_ties(self) -> dict[str, str]:
        """What was kept of ties, as far as it leads from a name to an owner, and not in circles."""
        found = self.sidecar.shared if self.sidecar is not None else {}
        return {alias: owner for alias, owner in found.items() if owner not in found}

    def _check(self, params: Mapping[str, StoredTensor], shared: Mapping[str, str], twice: Mapping[str, str]) -> None:
        problems, shapes = Problems(), {name: stored.shape for name, stored in params.items()}
        for alias, owner in twice.items():
            if self.weights.tensors[alias].shape != shapes[owner]:
                text = f"{alias} is tied to {owner}, but their shapes are {self.weights.tensors[alias].shape} and {shapes[owner]}"
                problems.add(LayoutMismatch, f"{self.path}: {text}")
        for state, series in self.states.items():
            for name, stored in series.tensors.items():
                self._check_state(state, name, stored.shape, shapes, problems)
        for group in self._training().groups:
            unknown = [name for name in group.params if name not in shapes]
            if unknown:
                problems.add(
                    LayoutMismatch, f"{self.path / STATE}: a param group holds {unknown[0]}, which is no weight here"
                )
        problems.raise_if_any()
        tied = (
            shared.get(LM_HEAD) == EMBEDDING
            if EMBEDDING in shapes and (LM_HEAD in shapes or LM_HEAD in shared)
            else None
        )
        whole = not is_quantized(ParamSpec(n, s.shape, s.record.dtype, REPLICATED) for n, s in params.items())
        check_config(self.config, shapes, tied, str(self.path / CONFIG), whole=whole)

    def _check_state(
        self, state: str, name: str, shape: Shape, shapes: Mapping[str, Shape], problems: Problems
    ) -> None:
        if shapes.get(name) != shape:
            expected = f"the weight has {shapes[name]}" if name in shapes else "there is no such weight"
            text = f"{self.path / OPTIMIZER}: {state} of {name} has the shape {shape}, but {expected}"
            problems.add(LayoutMismatch, text, "Weights and optimizer are of different models, or steps.")

    def _model(self, params: Mapping[str, StoredTensor], shared: Mapping[str, str]) -> ModelSpec:
        known = self.sidecar.order if self.sidecar is not None else ()
        still = {*self.sidecar.frozen, *self.sidecar.buffers} if self.sidecar is not None else set()
        specs = []
        for name in dict.fromkeys([*(name for name in known if name in params), *params]):
            dtype = params[name].record.dtype
            trained = name not in still and dtype in FLOATING and not is_frequencies(name)
            specs.append(ParamSpec(name, params[name].shape, dtype, REPLICATED, trained))
        rows = params[EMBEDDING].shape[0] if EMBEDDING in params else None
        return ModelSpec(
            tuple(specs),
            layers_in(params),
            bool(shared),
            vocab_size=self.options.vocab_size or rows,
            padded_vocab_size=rows,
        )

    def _places(
        self, params: Mapping[str, StoredTensor], twice: Mapping[str, str]
    ) -> dict[str, dict[str, tuple[StoredTensor, ...]]]:
        places: dict[str, dict[str, tuple[StoredTensor, ...]]] = {n: {PARAM: (s,)} for n, s in params.items()}
        for alias, owner in twice.items():
            places[owner][PARAM] += (self.weights.tensors[alias],)
        for state, series in self.states.items():
            for name, stored in series.tensors.items():
                places[name][state] = (stored,)
        return places

    def _training(self) -> TrainingState:
        if self.sidecar is not None:
            state = self.sidecar.training
            return state if self.options.optimizer else replace(state, groups=())
        return TrainingState(self.step, release=not self.step)

    def _native(self, model: ModelSpec, shared: Mapping[str, str]) -> ModuleState:
        if self.sidecar is None:
            buffers = tuple(spec.name for spec in model.params if not spec.trainable)
            return ModuleState(
                f"global_step{self._training().iteration}", buffers=buffers, shared=shared, config=self.config
            )
        return replace(self.sidecar.module, shared=shared, config=self.config)

    def _files(self) -> list[StoredFile]:
        """All files that matter."""
        files = [*self.weights.files, *(file for series in self.states.values() for file in series.files)]
        for name in (CONFIG, OLD_STATE):
            if (self.path / name).is_file():
                files.append(StoredFile(name, (self.path / name).stat().st_size, ()))
        return [*files, *sidecar_files(self.path)]


Places = Mapping[str, Mapping[str, tuple[StoredTensor, ...]]]
"""For each parameter and each of its states, where its elements lie: in more than one place where it is stored twice."""


@dataclass(frozen=True, slots=True)
class HuggingFaceCatalog:
    """Lazy mapping from tensor names to where their elements lie.

    Args:
        role: Role of all its tensors.
        places: Where they lie.
    """

    role: str
    places: Places

    def __iter__(self) -> Iterator[TensorName]:
        for param, states in self.places.items():
            for state in states:
                yield TensorName(self.role, param, state)

    def __len__(self) -> int:
        return sum(len(states) for states in self.places.values())

    def get(self, name: TensorName, /) -> TensorEntry | None:
        """The entry of that name, or None."""
        stored = self.places.get(name.param, {}).get(name.state) if name.role == self.role else None
        return whole_entry(name, *stored) if stored else None
