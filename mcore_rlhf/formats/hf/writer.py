"""Describing a new Hugging Face folder: weights, config, tokenizer, and, if asked for, the optimizer beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from mcore_rlhf.core.catalog import (
    FLOAT32,
    FLOATING,
    MASTER,
    PARAM,
    DType,
    Shape,
    TensorEntry,
    TensorName,
    dtype_of,
)
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, Inventory, Item, Kind, Reason, Rule, Values
from mcore_rlhf.core.shares import FROM_MASTERS
from mcore_rlhf.errors import Incomplete, Problems, Unsupported, UsageError
from mcore_rlhf.families.described import refuse_contradictions
from mcore_rlhf.families.inventory import ELEMENTS, OF_OPTIMIZER, OF_WEIGHTS_ALONE, UNUSED, inventory_of
from mcore_rlhf.families.module import ModuleState, config_in, read_config
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.sidecar import UNHELD, Sidecar
from mcore_rlhf.families.source import Source, TrainingState
from mcore_rlhf.families.trainer_files import numbered
from mcore_rlhf.formats.base import FileLayout, PtLayout, Target, TargetFile
from mcore_rlhf.formats.carried import GO_ALONG
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.huggingface.config import method_of, without_quantization
from mcore_rlhf.models.implied import against_config
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.stored import StoredTensor

from .config import (
    EMBEDDING,
    LM_HEAD,
    TIED,
    check_config,
    check_vocabulary,
    dtype_in,
    files_beside,
    generation_config,
    is_tied,
    read_own_config,
    refuse_other_file,
    text_config,
    with_dtype,
    with_eos,
)
from .files import (
    CONFIG,
    DEFAULT_SHARD,
    GENERATION_CONFIG,
    MODEL_STEM,
    OPTIMIZER,
    SAFETENSORS,
    WrittenTensor,
    index_of,
    is_of_tokenizer,
    shards_of,
)

_OF_MODEL = (Item(Kind.MODEL, "shared"), Item(Kind.MODEL, "buffers"), Item(Kind.VALUE, "iteration"))
"""What a folder of weights alone says beside its config; the iteration stands in its manifest."""
_STATE_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")


def hf_target(source: Source, options: WriteOptions, number: int = 0, alone: str = "") -> Target:
    """Describe the Hugging Face folder that holds what a source under a module's own names has.

    Args:
        source: An opened checkpoint.
        options: What the user asked for.
        number: Which of several models in it.
        alone: See :class:`.HuggingFaceFormat`.

    Raises:
        CheckpointError: It cannot be done; all problems together.
    """
    module = ModuleState.needed(source, "hf")
    _refuse_options(source, options)
    config, where = _config(source, module, options)
    weights = Weights(source, module, options, bool(config))
    return _FolderTarget(source, module, options, config, where, weights, numbered(number), alone).target()


def _refuse_options(source: Source, options: WriteOptions) -> None:
    if options.with_optimizer and options.no_optimizer:
        raise UsageError("--with-optimizer and --no-optimizer contradict each other\nGive one of them.")
    if options.with_optimizer and source.optimizer is None:
        raise Incomplete(
            f"{source.root}: has no optimizer, which --with-optimizer asks for\nLeave it out to convert the weights."
        )


def _check_ends(ids: tuple[int, ...], rows: int | None) -> None:
    """A token that ends a text must be one that the model can say, or it never ends one."""
    beyond = [number for number in ids if rows is not None and number >= rows]
    if beyond:
        text = ", ".join(map(str, beyond))
        raise UsageError(
            f"--eos-token-ids: {text}: the model's vocabulary has {rows} words, 0 to {(rows or 0) - 1}\n"
            "Take the ids from the model's own generation_config.json."
        )


def _config(source: Source, module: ModuleState, options: WriteOptions) -> tuple[dict[str, object], str]:
    """The model's description and where it comes from: given, the source's own, or that beside the tokenizer."""
    if options.reference_config is not None:
        given = read_config(options.reference_config)
        refuse_other_file(given, options.reference_config)
        return given, options.reference_config
    if module.config:
        return dict(module.config), f"the config of {source.root}"
    beside = Path(options.tokenizer).expanduser() if options.tokenizer is not None else None
    if beside is not None and (beside / CONFIG).is_file():
        return read_config(str(beside)), str(beside / CONFIG)
    return {}, ""


@dataclass
class _FolderTarget:
    source: Source
    module: ModuleState
    options: WriteOptions
    config: Mapping[str, object]
    where: str
    weights: Weights
    numbered: str = ""
    alone: str = ""
    beside: dict[str, ReadablePath] = field(default_factory=dict)
    changes: list[Values] = field(default_factory=list)
    unheld: list[str] = field(default_factory=list)

    @cached_property
    def parts(self) -> list[WrittenTensor]:
        """The weights."""
        return self.weights.parts()

    @cached_property
    def states(self) -> dict[str, list[WrittenTensor]]:
        """What is written of the optimizer, by state."""
        states = self.source.states if self.options.with_optimizer else ()
        return {state: parts for state in states if (parts := self.weights.state_parts(state))}

    @property
    def own(self) -> Mapping[str, ReadablePath]:
        """Files that go along with the source."""
        return self.source.carried.files if self.source.carried is not None else {}

    def target(self) -> Target:
        """The described folder."""
        if not self.parts:
            raise Incomplete(f"{self.source.root}: has no weights, of which a Hugging Face folder is made")
        texts: dict[str, str | bytes] = {}
        stem = MODEL_STEM[SAFETENSORS] + self.numbered
        files = (
            [TargetFile(self.alone, self._state_dict)]
            if self.alone
            else self._pieces(self.parts)
            if self.options.pieces
            else self._series(self.parts, stem, texts)
        )
        self.beside = self._beside()
        texts.update(self._generates())
        described = self._described() if self.config else self._refuse_damaged()
        if described:
            texts[CONFIG] = self._config_text(described)
        if self.options.with_optimizer:
            files += self._optimizer(texts)
        report, rest = self.source.notes.for_target(), () if self.options.with_optimizer else _WITHOUT_OPTIMIZER
        report.through((*_RULES, *rest), self)
        return Target(
            format="hf",
            parallel=ParallelConfig(),
            source=self.weights.view,
            files=tuple(files),
            texts=texts,
            report=report,
            holds=self._holds(described),
            carried=self.beside,
        )

    def _holds(self, config: Mapping[str, object]) -> Inventory:
        """Everything that is carried: the config, and with the optimizer all that is kept beside it."""
        held = {**inventory_of(self.source), **{Item(Kind.CONFIG, key): value for key, value in config.items()}}
        if self.options.with_optimizer:
            return held
        return {item: value for item, value in held.items() if item.kind is Kind.CONFIG or item in _OF_MODEL}

    def _series(self, parts: list[WrittenTensor], stem: str, texts: dict[str, str | bytes]) -> list[TargetFile]:
        """The files of one state dict; its index joins the texts."""
        shards = shards_of(parts, stem, self.options.max_shard_size or DEFAULT_SHARD)
        texts.update(index_of(shards, stem))
        return [shard.target() for shard in shards]

    def _state_dict(self) -> FileLayout:
        """The state dict as ``torch.save`` writes it, in which tied tensors have all of their names."""
        file, tree = PtLayout(self.alone), dict[str, StoredTensor]()
        for part in self.parts:
            tree |= dict.fromkeys(part.names, file.add(part.source, part.shape, part.dtype))
        tied = {alias: tree[owner] for alias, owner in self.module.shared.items() if owner in tree}
        return file.layout({**tied, **tree})

    def _pieces(self, parts: list[WrittenTensor]) -> list[TargetFile]:
        """A file for each rank of each that all of them are put together to; torch's writer leaves no index of them."""
        assert self.options.pieces is not None
        limit = self.options.max_shard_size or DEFAULT_SHARD
        shards = shards_of(parts, MODEL_STEM[SAFETENSORS], limit, pieces=True)
        return [file for shard in shards for file in shard.pieces(self.options.pieces)]

    def _optimizer(self, texts: dict[str, str | bytes]) -> list[TargetFile]:
        files: list[TargetFile] = []
        for state, parts in self.states.items():
            if not _STATE_NAME.fullmatch(state):
                raise Unsupported(f"{self.source.root}: the optimizer's state {state!r} is no name for a file")
            files += self._series(parts, f"{OPTIMIZER}/{state}", texts)
        made, self.unheld = self._sidecar(tuple(self.states)).texts()
        texts.update(made)
        return files

    def _sidecar(self, states: tuple[str, ...]) -> Sidecar:
        """What is neither a weight nor has a place in such a folder; its groups hold weights that are there."""
        source, names = self.source, {spec.name for spec in self.source.model.params}
        groups = tuple(replace(g, params=tuple(n for n in g.params if n in names)) for g in source.state.groups)
        state, module = replace(source.state, groups=groups), replace(self.module.base(), config={})
        return Sidecar.of(
            state, module, source.model.params, source.origin, optimizer=source.optimizer or "", states=states
        )

    def _refuse_damaged(self) -> dict[str, object]:
        """No description; one that is there and says nothing is damaged, and was taken for none.

        Raises:
            CheckpointError: It is no JSON.
        """
        path = None if self.source.carried is None else self.source.carried.files.get(CONFIG)
        if path is not None:
            read_own_config(path.parent)
        return {}

    def _described(self) -> dict[str, object]:
        """The description, with what the conversion changes, held against the tensors."""
        shapes, shared = shapes_of(self.parts), self.module.shared
        pair = {LM_HEAD, EMBEDDING}
        tied = any({alias, owner} == pair for alias, owner in shared.items())
        known = tied if EMBEDDING in shapes and (tied or LM_HEAD in shapes) else None
        quantized = self.source.model.quantized
        check_config(self.config, shapes, known, self.where, whole=not quantized)
        found = against_config(text_config(self.config), shapes, whole=not quantized)
        refuse_contradictions(found, self.where, self.source)
        is_tied(self.config, shapes, self.where)
        config = dict(self.config)
        if known is not None and TIED not in text_config(config):
            config[TIED] = known
        if method_of(config) and not quantized and (self.source.format != "hf" or self.source.computed is not None):
            text = f"{CONFIG}: does not say any more that the weights are quantized, which they are not"
            config = self._changed(text, config, without_quantization(config))
        dtype, said = main_dtype(self.parts), dtype_in(config)
        if dtype is not None and not quantized and said != dtype:
            text = f"{CONFIG}: dtype {said or 'of no known name'} becomes {dtype}, as the weights are"
            config = self._changed(text, config, with_dtype(config, dtype))
        ends = with_eos(config, self.options.eos_token_ids)
        return self._changed(f"{CONFIG}: eos_token_id is {ends.get('eos_token_id')}, as was asked for", config, ends)

    def _changed(self, text: str, old: Mapping[str, object], new: dict[str, object]) -> dict[str, object]:
        """The new description; what is said is of the fields that are other ones than in the old."""
        fields = [Item(Kind.CONFIG, key) for key, value in old.items() if key not in new or new[key] != value]
        self.changes += [{"text": text, "of": fields}] if fields else []
        return new

    def _beside(self) -> dict[str, ReadablePath]:
        """The tokenizer, and whatever else goes along."""
        found = files_beside(self.own, self.options.tokenizer)
        embedding = shapes_of(self.parts).get(EMBEDDING)
        rows = embedding[0] if embedding is not None else None
        check_vocabulary(found, rows)
        _check_ends(self.options.eos_token_ids, rows)
        return found

    def _generates(self) -> dict[str, bytes]:
        """How the model generates."""
        options, carried = self.options, self.source.carried
        own = (
            carried.files[GENERATION_CONFIG].parent
            if carried is not None and GENERATION_CONFIG in carried.files
            else None
        )
        found = generation_config(options.generation_config, (options.tokenizer, own), options.eos_token_ids)
        return {} if found is None else {GENERATION_CONFIG: found}

    def _config_text(self, config: dict[str, object]) -> str | bytes:
        """The description; byte for byte the source's own where nothing in it changes."""
        carried = self.source.carried
        if carried is not None and CONFIG in carried.files and config_in(carried) == config:
            return reading.read_bytes(carried.files[CONFIG])
        return json.dumps(config, indent=2) + "\n"


def _has_run(state: TrainingState) -> bool:
    """Whether anything is said of a run: what DeepSpeed writes beside weights that were never trained is no run's."""
    said = (
        key
        for key, value in state.other.items()
        if key != "ds_version" and not (value is None or (type(value) is int and not value))
    )
    return state.scheduler is not None or state.iteration > 0 or next(said, None) is not None


def _replaced(t: _FolderTarget) -> list[str]:
    """Files of the source's tokenizer in whose place others come."""
    return [name for name in t.own if is_of_tokenizer(name)] if t.options.tokenizer is not None else []


def _cut(t: _FolderTarget) -> list[Values]:
    padded = [(spec, t.weights.shape(spec)) for spec in t.source.model.params]
    return [
        {"spec": s, "rows": shape[0], "last": s.global_shape[0] - 1} for s, shape in padded if shape != s.global_shape
    ]


def _from_masters(t: _FolderTarget) -> list[str]:
    """Types that weights have which are not what the source stores, and are made of masters."""
    specs, there = {spec.name: spec for spec in t.source.model.params}, t.source.catalog
    changed = [part for part in t.parts if part.dtype != specs[part.source.param].dtype]
    return list(dict.fromkeys(str(part.dtype) for part in changed if part.source._replace(state=MASTER) in there))


def _without(t: _FolderTarget) -> Source | None:
    """The source, where it has no optimizer, though nobody left it out."""
    return None if t.source.optimizer is not None or t.options.no_optimizer else t.source


_RULES: tuple[Rule[_FolderTarget], ...] = (
    Rule(Fate.CHANGED, "--tokenizer: its files take the place of {found}", _replaced),
    GO_ALONG.of_part(lambda t: t.beside),
    Rule(Fate.CHANGED, "{text}", lambda t: t.changes),
    Rule(Fate.KEPT, f"the optimizer ({{found}}), param groups, scheduler and counters, in {OPTIMIZER}/", lambda t: list(t.states)),
    *(rule.of_part(lambda t: t.unheld) for rule in UNHELD),
    Rule(Fate.NOTE, f"{CONFIG}: not written, since nothing describes the model; --reference-config gives one", lambda t: not t.config),
    Rule(Fate.NOTE, "weights are cut into pieces for {0.options.pieces} ranks, which from_pretrained does not load: load them with torch's "
         "HuggingFaceStorageReader, or put them together with its consolidate_safetensors_files", lambda t: t.options.pieces),
    Rule(Fate.DERIVED, "weights: rounded from their fp32 masters, since the source does not store them",
         lambda t: not all(part.source in t.source.catalog for part in t.parts)),
    Rule(Fate.DERIVED, "weights: {found}, from their fp32 masters", _from_masters),
    Rule(Fate.CHANGED, "{spec.name}: rows {rows}–{last} are padding, and are cut", _cut, [ELEMENTS]),
)  # fmt: skip
"""What becomes of a source."""
_OF_RUN = (Item(Kind.SCHEDULER), Item(Kind.VALUE), Item(Kind.RNG))
_WITHOUT_OPTIMIZER: tuple[Rule[_FolderTarget], ...] = (
    Rule(Fate.LOST, "the optimizer: a Hugging Face folder has no place for it; --with-optimizer keeps it beside the weights",
         lambda t: t.source.optimizer is not None, OF_OPTIMIZER),
    Rule(Fate.LOST, OF_WEIGHTS_ALONE,
         lambda t: _has_run(t.source.state), _OF_RUN),
    Rule(Reason.NO_RUN, when=lambda t: not _has_run(t.source.state) and t.source.state.other, of=_OF_RUN),
    Rule(Reason.OF_ENGINE, of=(Item(Kind.ARGUMENT), Item(Kind.OPTIMIZER))),
    *(rule.of_part(_without) for rule in UNUSED),
    Rule(Reason.OF_LAYOUT, of=(Item(Kind.MODEL, "keys"), Item(Kind.MODEL, "per_rank"))),
)  # fmt: skip
"""Of one that becomes a folder of weights alone."""


_FIXED_TYPE = ("e_score_correction_bias",)
"""Tensors that the model computes with in fp32 whatever its type is.

Source: transformers 5.23.0, ``models/deepseek_v3/modeling_deepseek_v3.py`` (``_keep_in_fp32_modules_strict``).
"""


@dataclass(frozen=True, slots=True)
class Weights:
    """Decides what is written of a source.

    Args:
        source: The checkpoint.
        module: Its own view of it.
        options: What the user asked for.
        described: Whether a ``config.json`` is written: then whoever loads the folder ties what is tied.
    """

    source: Source
    module: ModuleState
    options: WriteOptions
    described: bool

    @property
    def view(self) -> Chunks:
        """Where the tensors come from."""
        if self.options.masters:
            return self.source.catalog.states(FROM_MASTERS)
        return self.source.catalog.cast(None if self.options.dtype is None else dtype_of(self.options.dtype))

    def parts(self) -> list[WrittenTensor]:
        """The weights, in the module's order.

        Raises:
            Incomplete: Some are stored nowhere, or have no masters where those are asked for; all of them are named.
        """
        problems, found, view = Problems(), list[WrittenTensor](), self.view
        for spec in self.source.model.params:
            name = TensorName(self.source.role, spec.name, PARAM)
            entry = view.get(name)
            if entry is None:
                problems.add(
                    Incomplete, f"{spec.name}: neither the weight nor its fp32 master is in {self.source.root}"
                )
            elif self.options.masters and spec.trainable and not self._is_master(name, entry):
                text = f"{spec.name}: --masters asks for its fp32 master, which is not in {self.source.root}"
                problems.add(Incomplete, text, "Leave out --masters to take the weights themselves.")
            else:
                sharded = spec.name not in self.module.buffers and spec.dtype in FLOATING
                dtype = self._dtype(spec, entry)
                found.append(WrittenTensor(name, self.shape(spec), dtype, self._names(spec), sharded))
        problems.raise_if_any()
        return found

    def _is_master(self, name: TensorName, entry: TensorEntry) -> bool:
        """Whether an entry is as exact as the run has it: an fp32 parameter is its own master where there is no other."""
        return entry.dtype == FLOAT32 or name._replace(state=MASTER) in self.source.catalog

    def state_parts(self, state: str) -> list[WrittenTensor]:
        """One state of the optimizer, of every parameter that has it."""
        found = []
        for spec in self.source.model.params:
            name = TensorName(self.source.role, spec.name, state)
            entry = self.source.catalog.get(name) if spec.trainable else None
            if entry is not None:
                found.append(WrittenTensor(name, self.shape(spec), entry.dtype, (spec.name,)))
        return found

    def shape(self, spec: ParamSpec) -> Shape:
        """The shape as written: without the padding of a vocabulary."""
        rows = self.options.vocab_size or self.source.model.vocab_size
        if not spec.partition.vocabulary or rows is None:
            return spec.global_shape
        return (min(rows, spec.global_shape[0]), *spec.global_shape[1:])

    def _names(self, spec: ParamSpec) -> tuple[str, ...]:
        """All names under which the tensor is written; a tied output layer is made by whoever loads the folder."""
        names = (spec.name, *(alias for alias, owner in self.module.shared.items() if owner == spec.name))
        kept = tuple(name for name in names if name != LM_HEAD)
        if spec.name == LM_HEAD and self.options.with_optimizer:  # whose states lie under its name
            return names
        return kept if self.described and kept else names

    def _dtype(self, spec: ParamSpec, entry: TensorEntry) -> DType:
        fixed = spec.name in self.module.buffers or spec.name.endswith(_FIXED_TYPE) or spec.dtype not in FLOATING
        if fixed:
            return spec.dtype
        if self.options.dtype is not None:
            return dtype_of(self.options.dtype)
        return entry.dtype if self.options.masters else spec.dtype


def main_dtype(parts: list[WrittenTensor]) -> DType | None:
    """The type of most bytes of the floating-point weights, or None without any."""
    sizes: dict[DType, int] = {}
    for part in parts:
        if part.dtype in FLOATING:
            sizes[part.dtype] = sizes.get(part.dtype, 0) + part.nbytes
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else None


def shapes_of(parts: list[WrittenTensor]) -> Mapping[str, Shape]:
    """The tensors by name, as they will be written."""
    return {name: part.shape for part in parts for name in part.names}
