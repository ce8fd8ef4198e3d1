"""Describing a new Hugging Face folder: weights, config, tokenizer, and, if asked for, the optimizer beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_rlhf.core.account import ANY, Fate, Inventory, Item, Kind, Reason, Report
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
from mcore_rlhf.core.shares import FROM_MASTERS
from mcore_rlhf.errors import Incomplete, Problems, Unsupported, UsageError
from mcore_rlhf.families.described import refuse_contradictions
from mcore_rlhf.families.inventory import ELEMENTS, OF_OPTIMIZER, inventory_of
from mcore_rlhf.families.module import ModuleState, config_in, read_config
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.sidecar import Sidecar
from mcore_rlhf.families.source import Source, TrainingState
from mcore_rlhf.formats.base import Target, TargetFile
from mcore_rlhf.formats.carried import tell_kept
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.huggingface.config import method_of, without_quantization
from mcore_rlhf.models.implied import against_config
from mcore_rlhf.models.spec import ParamSpec
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import ReadablePath

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
    shards_of,
)

_OF_MODEL = (Item(Kind.MODEL, "shared"), Item(Kind.MODEL, "buffers"), Item(Kind.VALUE, "iteration"))
"""What a folder of weights alone says beside its config; the iteration stands in its manifest."""
_SECTIONS = {
    "args": Kind.ARGUMENT, "scheduler": Kind.SCHEDULER, "grad_scaler": Kind.SCALER, "other": Kind.VALUE,
    "groups": Kind.GROUP, "per_rank": Kind.MODEL, "values": Kind.OPTIMIZER, "shared": Kind.MODEL, "keys": Kind.MODEL,
}  # fmt: skip
"""Sections of what is kept beside the optimizer, and what their items are."""
_STATE_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")


def hf_target(source: Source, options: WriteOptions) -> Target:
    """Describe the Hugging Face folder that holds what a source under a module's own names has.

    Args:
        source: An opened checkpoint.
        options: What the user asked for.

    Raises:
        CheckpointError: It cannot be done; all problems together.
    """
    module = ModuleState.needed(source, "hf")
    _refuse_options(source, options)
    config, where = _config(source, module, options)
    return _FolderTarget(
        source, module, options, config, where, Weights(source, module, options, bool(config))
    ).target()


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

    def target(self) -> Target:
        report = self.source.notes.for_target()
        parts = self.weights.parts()
        if not parts:
            raise Incomplete(f"{self.source.root}: has no weights, of which a Hugging Face folder is made")
        texts: dict[str, str | bytes] = {}
        files = self._pieces(parts) if self.options.pieces else self._series(parts, MODEL_STEM[SAFETENSORS], texts)
        beside = self._beside(parts, report)
        texts.update(self._generates())
        described = self._described(parts, report) if self.config else {}
        if described:
            texts[CONFIG] = self._config_text(described)
        if self.options.with_optimizer:
            files += self._optimizer(texts, report)
        self._report(parts, report)
        view, holds = self.weights.view, self._holds(described)
        return Target(
            format="hf",
            parallel=ParallelConfig(),
            source=view,
            files=tuple(files),
            texts=texts,
            report=report,
            holds=holds,
            carried=beside,
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

    def _pieces(self, parts: list[WrittenTensor]) -> list[TargetFile]:
        """A file for each rank of each that all of them are put together to; torch's writer leaves no index of them."""
        assert self.options.pieces is not None
        limit = self.options.max_shard_size or DEFAULT_SHARD
        shards = shards_of(parts, MODEL_STEM[SAFETENSORS], limit, pieces=True)
        return [file for shard in shards for file in shard.pieces(self.options.pieces)]

    def _optimizer(self, texts: dict[str, str | bytes], report: Report) -> list[TargetFile]:
        files: list[TargetFile] = []
        states = {state: parts for state in self.source.states if (parts := self.weights.state_parts(state))}
        for state, parts in states.items():
            if not _STATE_NAME.fullmatch(state):
                raise Unsupported(f"{self.source.root}: the optimizer's state {state!r} is no name for a file")
            files += self._series(parts, f"{OPTIMIZER}/{state}", texts)
        made, lost = self._sidecar(tuple(states)).texts()
        texts.update(made)
        kept = ", ".join(states)
        report.add(Fate.KEPT, f"the optimizer ({kept}), param groups, scheduler and counters, in {OPTIMIZER}/")
        for what in lost:
            report.add(Fate.LOST, f"{what}: no JSON can hold it", _item_of(what))
        return files

    def _sidecar(self, states: tuple[str, ...]) -> Sidecar:
        """What is neither a weight nor has a place in such a folder; its groups hold weights that are there."""
        source, names = self.source, {spec.name for spec in self.source.model.params}
        groups = tuple(replace(g, params=tuple(n for n in g.params if n in names)) for g in source.state.groups)
        state, module = replace(source.state, groups=groups), replace(self.module.base(), config={})
        return Sidecar.of(
            state, module, source.model.params, source.origin, optimizer=source.optimizer or "", states=states
        )

    def _described(self, parts: list[WrittenTensor], report: Report) -> dict[str, object]:
        """The description, with what the conversion changes, held against the tensors."""
        shapes, shared = shapes_of(parts), self.module.shared
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
            config = _changed(config, without_quantization(config), report, text)
        dtype, said = main_dtype(parts), dtype_in(config)
        if dtype is not None and not quantized and said != dtype:
            text = f"{CONFIG}: dtype {said or 'of no known name'} becomes {dtype}, as the weights are"
            config = _changed(config, with_dtype(config, dtype), report, text)
        ends = with_eos(config, self.options.eos_token_ids)
        return _changed(config, ends, report, f"{CONFIG}: eos_token_id is {ends.get('eos_token_id')}, as was asked for")

    def _beside(self, parts: list[WrittenTensor], report: Report) -> dict[str, ReadablePath]:
        """The tokenizer, and whatever else goes along."""
        own = self.source.carried.files if self.source.carried is not None else {}
        found = files_beside(own, self.options.tokenizer, report)
        embedding = shapes_of(parts).get(EMBEDDING)
        rows = embedding[0] if embedding is not None else None
        check_vocabulary(found, rows)
        _check_ends(self.options.eos_token_ids, rows)
        tell_kept(found, report)
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

    def _report(self, parts: list[WrittenTensor], report: Report) -> None:
        source, options = self.source, self.options
        if not self.config:
            report.add(
                Fate.NOTE, f"{CONFIG}: not written, since nothing describes the model; --reference-config gives one"
            )
        if options.pieces:
            text = "load them with torch's HuggingFaceStorageReader, or put them together with its consolidate_safetensors_files"
            report.add(
                Fate.NOTE,
                f"weights are cut into pieces for {options.pieces} ranks, which from_pretrained does not load: {text}",
            )
        self._report_types(parts, report)
        padded = [s for s in source.model.params if self.weights.shape(s) != s.global_shape]
        for spec in padded:
            rows = self.weights.shape(spec)[0]
            text = f"{spec.name}: rows {rows}–{spec.global_shape[0] - 1} are padding, and are cut"
            report.add(Fate.CHANGED, text, ELEMENTS)
        if source.optimizer is not None and not options.with_optimizer:
            text = "a Hugging Face folder has no place for it; --with-optimizer keeps it beside the weights"
            report.add(Fate.LOST, f"the optimizer: {text}", *OF_OPTIMIZER)
        of_run = (Item(Kind.SCHEDULER), Item(Kind.VALUE), Item(Kind.RNG))
        if not options.with_optimizer and _has_run(source.state):
            text = "scheduler, counters and client state: a Hugging Face folder has no place for them"
            report.add(Fate.LOST, text, *of_run)
        elif not options.with_optimizer and source.state.other:
            report.leave(Reason.NO_RUN, *of_run)
        if not options.with_optimizer:
            report.leave(Reason.OF_ENGINE, Item(Kind.ARGUMENT), Item(Kind.OPTIMIZER))
            report.leave(Reason.OF_LAYOUT, Item(Kind.MODEL, "keys"), Item(Kind.MODEL, "per_rank"))

    def _report_types(self, parts: list[WrittenTensor], report: Report) -> None:
        """Said of weights that are not what the source stores."""
        specs = {spec.name: spec for spec in self.source.model.params}
        changed = [part for part in parts if part.dtype != specs[part.source.param].dtype]
        stored = [part.source in self.source.catalog for part in parts]
        if not all(stored):
            report.add(Fate.DERIVED, "weights: rounded from their fp32 masters, since the source does not store them")
        from_masters = [part for part in changed if self._stored(part, MASTER) is not None]
        if from_masters:
            kinds = ", ".join(dict.fromkeys(str(part.dtype) for part in from_masters))
            report.add(Fate.DERIVED, f"weights: {kinds}, from their fp32 masters")

    def _stored(self, part: WrittenTensor, state: str) -> TensorEntry | None:
        return self.source.catalog.get(part.source._replace(state=state))


def _has_run(state: TrainingState) -> bool:
    """Whether anything is said of a run: what DeepSpeed writes beside weights that were never trained is no run's."""
    said = (
        key
        for key, value in state.other.items()
        if key != "ds_version" and not (value is None or (type(value) is int and not value))
    )
    return state.scheduler is not None or state.iteration > 0 or next(said, None) is not None


def _item_of(where: str) -> Item:
    """The item of which the optimizer's file could not keep a part: ``other/replay/0 (Queue)`` is of the value ``replay``."""
    section, *keys = where.partition(" (")[0].split("/")
    if section == "groups":
        return Item(Kind.GROUP, keys[2] if len(keys) > 2 else ANY)
    return Item(_SECTIONS.get(section, Kind.VALUE), keys[0] if keys else ANY)


def _changed(old: Mapping[str, object], new: dict[str, object], report: Report, text: str) -> dict[str, object]:
    """The new description; the line is about the fields that are other ones than in the old."""
    fields = [key for key, value in old.items() if key not in new or new[key] != value]
    if fields:
        report.add(Fate.CHANGED, text, *(Item(Kind.CONFIG, key) for key in fields))
    return new


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
