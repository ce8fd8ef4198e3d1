"""Opening a Hugging Face folder: weights, config and what lies beside them become one Source."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import FLOATING, PARAM, Shape, TensorEntry, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, Rule
from mcore_rlhf.errors import CheckpointError, Incomplete, LayoutMismatch, NotACheckpoint, Problems, Unsupported
from mcore_rlhf.families.fsdp.model import num_layers
from mcore_rlhf.families.lora.names import OF_ADAPTER, PREFIX, in_original
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.run_folders import SPLIT_BESIDE, SPLIT_MODEL, SPLIT_WEIGHTS, split_parts, split_role
from mcore_rlhf.families.sidecar import STATE, Sidecar, sidecar_files
from mcore_rlhf.families.source import Source, TrainingState
from mcore_rlhf.families.trainer_files import ACCELERATE, place_of_model
from mcore_rlhf.formats.checksums import listed_at
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.huggingface.config import method_of
from mcore_rlhf.models.huggingface.rotary_fields import is_frequencies
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec
from mcore_rlhf.storage.dcp import METADATA_FILE
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pieces import DESCRIBED, has_pieces
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.stored import StoredTensor, whole_entry

from .config import (
    EMBEDDING,
    LM_HEAD,
    VALUE_HEAD,
    check_config,
    is_tied,
    layers_in,
    read_own_config,
    refuse_other_file,
    wrapper_of,
)
from .files import BIN, CONFIG, OPTIMIZER, SAFETENSORS
from .series import Scattered, Series, find_series, read_parts, read_series, weights_folder


def read_hf(path: ReadablePath, options: ReadOptions, number: int = 0, alone: str = "") -> Source:
    """Open a Hugging Face folder.

    Args:
        path: The folder with the weights.
        options: Which stubs; whether the optimizer that we kept there is read.
        number: Which of several models; of none but the first ``config.json`` at the top speaks.
        alone: See :class:`.HuggingFaceFormat`.

    Raises:
        CheckpointError: It is incomplete, damaged, or contradicts itself.
    """
    path = weights_folder(path)
    found = (alone.removesuffix(f".{BIN}"), BIN) if alone else find_series(path, number)
    if found is None and (number or not has_pieces(path)):
        raise NotACheckpoint(
            f"{path}: has neither model.safetensors nor pytorch_model.bin, nor an index of several such files"
        )
    place = place_of_model(number)
    own = path / place if place else path
    config = read_own_config(own) or read_own_config(own / DESCRIBED)
    beside = _beside(path, options)
    refuse_other_file(config, str(own / CONFIG))
    weights = read_parts(path) if found is None else read_series(path, *found, options.stubs)
    sidecar, unread = _sidecar(own, options)
    reading = _FolderReader(path, options, config, weights, sidecar, _step(path), found is None, beside, unread, place)
    return reading.source()


def _beside(path: ReadablePath, options: ReadOptions) -> Sequence[str]:
    """What belongs to these weights and lies in other folders of their role.

    Raises:
        Incomplete: The role says that it has Megatron's weights, too, and they are gone.
        Unsupported: There is an optimizer, and it is wanted: who opens the role gets both.
    """
    role = split_role(path)
    parts = () if role is None else split_parts(role)
    if role is not None and options.optimizer and SPLIT_BESIDE[0] in parts:
        if SPLIT_MODEL in parts and not (role / SPLIT_MODEL / METADATA_FILE).is_file():
            raise Incomplete(
                f"{role / SPLIT_MODEL / METADATA_FILE}: missing; the checkpoint has a folder for it, or says so\n"
                "Copy the folder again, or use an older step."
            )
        raise Unsupported(
            f"{role / SPLIT_BESIDE[0]}: the optimizer of these weights, under Megatron's names and cut as its ranks had it\n"
            f"Give {role}, which has both; or convert the weights alone."
        )
    return tuple(part for part in parts if part in SPLIT_BESIDE)


def _step(path: ReadablePath) -> int:
    """The step that our manifest says the folder is of; a damaged one is refused by who holds it against the files."""
    try:
        listed = listed_at(path)
    except CheckpointError:
        return 0
    return (listed.manifest.step if listed is not None else None) or 0


def _sidecar(path: ReadablePath, options: ReadOptions) -> tuple[Sidecar | None, str]:
    """What was kept beside the weights, or why it cannot be read; damage matters only to someone who wants the optimizer."""
    try:
        found = Sidecar.read(path, options.stubs)
        if found is not None and found.states and not (path / OPTIMIZER).is_dir():  # somebody wants the weights alone
            return replace(found, states=(), optimizer="", state=replace(found.state, groups=())), ""
        return found, ""
    except CheckpointError as error:
        if options.optimizer:
            raise
        return None, str(error)


@dataclass
class _FolderReader:
    path: ReadablePath
    options: ReadOptions
    config: Mapping[str, object]
    weights: Series
    sidecar: Sidecar | None
    step: int
    pieces: bool
    beside: Sequence[str]
    unread: str
    place: str = ""
    states: dict[str, Series] = field(default_factory=dict)
    twice: Mapping[str, str] = field(default_factory=dict)
    spelled: Mapping[str, str] = field(default_factory=dict)
    of_class: Mapping[str, str] = field(default_factory=dict)

    def source(self) -> Source:
        if (self.path / ACCELERATE.alone).is_file():
            self._unwrap()
        if self.sidecar is not None and self.options.optimizer:
            self.states = {s: read_series(self.path, f"{OPTIMIZER}/{s}", SAFETENSORS) for s in self.sidecar.states}
        shared, self.twice = self._shared()
        params = {name: stored for name, stored in self.weights.tensors.items() if name not in self.twice}
        self._check(params, shared, self.twice)
        role = self.options.role or "actor"
        model = self._model(params, shared)
        optimizer = self.sidecar.optimizer or None if self.sidecar is not None and self.options.optimizer else None
        return Source(
            format="hf",
            root=self.path,
            role=role,
            model=model,
            parallel=ParallelConfig(),
            catalog=_table(role, self._places(params, self.twice)),
            state=self._training(),
            files=tuple(self._files()),
            states=tuple(self.states),
            optimizer=optimizer,
            notes=Report.of(_RULES, self),
            family=replace(self._native(model, shared), packs_experts=False),
            unplaced=self.weights.unplaced.names,
            origin={} if self.sidecar is None else self.sidecar.origin,
        )

    def _unwrap(self) -> None:
        """The model as the script prepared it, which alone loads it again: compiled, or with an adapter in it.

        Source: accelerate 1.15.0, ``accelerator.py`` (``save_state``: ``get_state_dict(model, unwrap=False)``).
        """
        tensors, shared = self.weights.tensors, self.weights.shared
        new = {name: _COMPILED.sub("", name) for name in (*tensors, *shared)}
        if len({*new.values()}) == len(new) and any(name != own for own, name in new.items()):
            self.weights.tensors = {new[name]: stored for name, stored in tensors.items()}
            self.weights.shared = {new[alias]: new[owner] for alias, owner in shared.items()}
            self.spelled = {name: own for own, name in new.items() if name != own}
        names = (*self.weights.tensors, *self.weights.shared)
        if any(OF_ADAPTER.fullmatch(name) for name in names):
            self.of_class = {in_original(name): name for name in names if not OF_ADAPTER.fullmatch(name)}

    def _rename_head(self) -> None:
        """A critic's head, which a bridge calls as an output layer is called, gets its own name.

        Source: mbridge 0.15.1, ``mbridge/core/bridge.py`` (``_DIRECT_MAPPING``, ``load_weights``), ``utils/layer.py``.
        """
        tensors = self.weights.tensors
        head, embedding = tensors.get(LM_HEAD), tensors.get(EMBEDDING)
        if head is None or embedding is None or VALUE_HEAD in tensors:
            return
        if head.shape[:1] == (1,) < embedding.shape[:1]:
            tensors[VALUE_HEAD] = tensors.pop(LM_HEAD)
            self.weights.notes.append(f"{LM_HEAD} has one row: it is a critic's head, and is called {VALUE_HEAD}")

    @property
    def embedding(self) -> str:
        """What its embedding is called here."""
        return self.of_class.get(EMBEDDING, EMBEDDING)

    @property
    def head(self) -> str:
        """What its output layer is, whether it is stored or not."""
        return self.of_class.get(LM_HEAD, f"{PREFIX if self.of_class else ''}{LM_HEAD}")

    def _shared(self) -> tuple[dict[str, str], dict[str, str]]:
        """Second names of tied tensors, and those of them that are stored a second time: ``{alias: owner}`` each."""
        self._rename_head()
        shared = dict(self.weights.shared)
        embedding, head = self.embedding, self.head
        if shared.get(embedding) == head:  # the other way round, as everyone else has it
            self.weights.tensors[embedding] = self.weights.tensors.pop(head)
            shared = {
                head: embedding,
                **{a: embedding if o == head else o for a, o in shared.items() if a != embedding},
            }
        names = {*(self.of_class or self.weights.tensors), *shared}
        known = self._known_ties()
        twice = {a: o for a, o in known.items() if a in self.weights.tensors and o in self.weights.tensors}
        if known.get(embedding) != head and is_tied(self.config, names, str(self.path / CONFIG)):
            shared[head] = embedding
            if head in self.weights.tensors:
                twice[head] = embedding
        shared.update({alias: owner for alias, owner in known.items() if owner in self.weights.tensors})
        return shared, twice

    def _known_ties(self) -> dict[str, str]:
        """What was kept of ties, as far as it leads from a name to an owner, and not in circles."""
        found = self.sidecar.module.shared if self.sidecar is not None else {}
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
            shared.get(self.head) == self.embedding
            if self.embedding in shapes and (self.head in shapes or self.head in shared)
            else None
        )
        whole = not any(ParamSpec(n, s.shape, s.record.dtype, REPLICATED).quantized for n, s in params.items())
        if self.embedding in twice:  # the head is the owner
            shapes[self.embedding] = shapes[twice[self.embedding]]
        if self.of_class:
            shapes = {name: shapes[own] for name, own in self.of_class.items() if own in shapes}
        wrapper = wrapper_of(shapes) if self.config else ""
        if wrapper:
            self.weights.notes.append(
                f"all but its head lies below {wrapper}: the program that wrote it loads it so, and from_pretrained, by the class in "
                "config.json, finds none of its weights"
            )
        check_config(self.config, shapes, tied, str(self.path / CONFIG), whole=whole and not wrapper)

    def _check_state(
        self, state: str, name: str, shape: Shape, shapes: Mapping[str, Shape], problems: Problems
    ) -> None:
        if shapes.get(name) != shape:
            expected = f"the weight has {shapes[name]}" if name in shapes else "there is no such weight"
            text = f"{self.path / OPTIMIZER}: {state} of {name} has the shape {shape}, but {expected}"
            problems.add(LayoutMismatch, text, "Weights and optimizer are of different models, or steps.")

    def _model(self, params: Mapping[str, StoredTensor], shared: Mapping[str, str]) -> ModelSpec:
        known = self.sidecar.module.order if self.sidecar is not None else ()
        still = {*self.sidecar.frozen, *self.sidecar.module.buffers} if self.sidecar is not None else set()
        specs = []
        for name in dict.fromkeys([*(name for name in known if name in params), *params]):
            dtype = params[name].record.dtype
            trained = name not in still and dtype in FLOATING and not is_frequencies(name)
            specs.append(ParamSpec(name, params[name].shape, dtype, REPLICATED, trained))
        rows = params[self.embedding].shape[0] if self.embedding in params else None
        return ModelSpec(
            tuple(specs),
            num_layers(params) if self.of_class else layers_in(params),
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
            state = self.sidecar.state
            return state if self.options.optimizer else replace(state, groups=())
        return TrainingState(self.step, release=not self.step)

    def _native(self, model: ModelSpec, shared: Mapping[str, str]) -> ModuleState:
        if self.sidecar is None:
            buffers = tuple(spec.name for spec in model.params if not spec.trainable)
            return ModuleState(
                f"global_step{self._training().iteration}",
                buffers=buffers,
                shared=shared,
                config=self.config,
                spelled=self.spelled,
                place=self.place,
            )
        module = self.sidecar.module
        return replace(module, shared=shared, config=self.config, spelled=self.spelled, place=self.place)

    def _files(self) -> list[StoredFile]:
        """All files that matter."""
        files = [*self.weights.files, *(file for series in self.states.values() for file in series.files)]
        if (self.path / (config := f"{self.place}{CONFIG}")).is_file():
            files.append(StoredFile.at(self.path, config))
        return [*files, *sidecar_files(self.path, self.place)]


_COMPILED = re.compile(r"(?<![^.])_orig_mod\.")
"""What ``torch.compile`` puts into names. Source: torch 2.13.0, ``_dynamo/eval_frame.py`` (``OptimizedModule``)."""


Places = Mapping[str, Mapping[str, tuple[StoredTensor, ...]]]
"""For each parameter and each of its states, where its elements lie: in more than one place where it is stored twice."""


def _table(role: str, places: Places) -> Chunks:
    names = ((TensorName(role, param, state), stored) for param, of in places.items() for state, stored in of.items())
    return Chunks.of(_entry(name, stored) for name, stored in names)


def _entry(name: TensorName, places: tuple[StoredTensor, ...]) -> TensorEntry:
    """A tensor that lies whole in each of several places, or piece by piece."""
    first = places[0]
    if not any(isinstance(place, Scattered) for place in places):
        return whole_entry(name, *places)
    chunks = [chunk for place in places for chunk in (place.chunks if isinstance(place, Scattered) else ())]
    return TensorEntry(name, first.shape, first.record.dtype, tuple(chunks))


_RULES: tuple[Rule[_FolderReader], ...] = (
    Rule(Fate.NOTE, "weights are pieces, a file for each rank; no file says how many ranks there were, nor how large a tensor is",
         lambda r: r.pieces),
    Rule(Fate.LOST, f"what lies beside {SPLIT_WEIGHTS}/ and was not opened: {{found}}", lambda r: r.beside),
    Rule(Fate.LOST, f"what {STATE} keeps: {{found}}", lambda r: r.unread),
    Rule(Fate.NOTE, "{text}", lambda r: [{"text": text} for text in r.weights.notes]),
    Rule(Fate.NOTE, f"{CONFIG}: names no model_type, so that transformers cannot load the folder",
         lambda r: r.config and not isinstance(r.config.get("model_type"), str)),
    Rule(Fate.NOTE, f"{CONFIG}: the weights are quantized, by {{found}}: they stay as they are in another Hugging Face folder, and are "
         "refused elsewhere", lambda r: method_of(r.config)),
    Rule(Fate.NOTE, "{alias} is tied to {owner} and stored a second time: both must be equal",
         lambda r: [{"alias": alias, "owner": owner} for alias, owner in r.twice.items()]),
)  # fmt: skip
"""What a reader should know."""
