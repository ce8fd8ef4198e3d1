"""Describing a new Hugging Face folder: weights, config, tokenizer, and, if asked for, the optimizer beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mcore_rlhf.core.catalog import TensorEntry
from mcore_rlhf.core.names import MASTER, PARAM
from mcore_rlhf.errors import Incomplete, Unsupported, UsageError
from mcore_rlhf.formats.base import Source, Target, TargetFile, WriteOptions
from mcore_rlhf.formats.crossing.reference_config import read_config
from mcore_rlhf.formats.module_state import ModuleState
from mcore_rlhf.formats.refusal import module_state_of, refuse_options
from mcore_rlhf.formats.report import Fate, Report
from mcore_rlhf.layouts.parallel import ParallelConfig

from .config import EMBEDDING, LM_HEAD, TIED, check_config, dtype_in, is_tied, text_config, with_dtype, with_eos
from .kept import kept_of
from .names import CONFIG, GENERATION_CONFIG, MODEL_STEM, OPTIMIZER, SAFETENSORS, STATE
from .shards import DEFAULT_SHARD, Part, index_of, shards_of
from .tokenizer import carried_files, check_vocabulary, generation_config, tokenizer_files
from .weights import Weights, main_dtype, shapes_of

_NO_MEANING = (
    "tp", "pp", "vpp", "ep", "etp", "dp", "pipeline_layout", "optimizer", "rng", "padded_vocab_size", "zero_stage",
)  # fmt: skip
_STATE_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")


def hf_target(source: Source, options: WriteOptions) -> Target:
    """Describe the Hugging Face folder that holds what a source under a module's own names has.

    Args:
        source: An opened checkpoint.
        options: What the user asked for.

    Raises:
        CheckpointError: It cannot be done; all problems together.
    """
    native = module_state_of(source, "hf")
    _refuse_options(source, options)
    config, where = _config(source, native, options)
    return _Writer(source, native, options, config, where, Weights(source, native, options, bool(config))).target()


def _refuse_options(source: Source, options: WriteOptions) -> None:
    refuse_options(options, _NO_MEANING, "a Hugging Face folder has no layout: it holds every tensor whole")
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


def _config(source: Source, native: ModuleState, options: WriteOptions) -> tuple[dict[str, object], str]:
    """The model's description and where it comes from: given, the source's own, or that beside the tokenizer."""
    if options.reference_config is not None:
        return read_config(options.reference_config), options.reference_config
    if native.config:
        return dict(native.config), f"the config of {source.root}"
    beside = Path(options.tokenizer).expanduser() if options.tokenizer is not None else None
    if beside is not None and (beside / CONFIG).is_file():
        return read_config(str(beside)), str(beside / CONFIG)
    return {}, ""


@dataclass
class _Writer:
    source: Source
    native: ModuleState
    options: WriteOptions
    config: Mapping[str, object]
    where: str
    weights: Weights

    def target(self) -> Target:
        report = Report(list(self.source.notes.lines))
        parts = self.weights.parts()
        if not parts:
            raise Incomplete(f"{self.source.root}: has no weights, of which a Hugging Face folder is made")
        texts: dict[str, str | bytes] = {}
        files = self._series(parts, MODEL_STEM[SAFETENSORS], texts)
        texts.update(self._carried(parts, report))
        if self.config:
            texts[CONFIG] = _json(self._described(parts, report))
        if self.options.with_optimizer:
            files += self._optimizer(texts, report)
        self._report(parts, report)
        return Target("hf", ParallelConfig(), self.weights.view, tuple(files), texts, report)

    def _series(self, parts: list[Part], stem: str, texts: dict[str, str | bytes]) -> list[TargetFile]:
        """The files of one state dict; its index joins the texts."""
        shards = shards_of(parts, stem, self.options.max_shard_size or DEFAULT_SHARD)
        texts.update(index_of(shards, stem))
        return [shard.target() for shard in shards]

    def _optimizer(self, texts: dict[str, str | bytes], report: Report) -> list[TargetFile]:
        files: list[TargetFile] = []
        states = {state: parts for state in self.source.states if (parts := self.weights.state_parts(state))}
        for state, parts in states.items():
            if not _STATE_NAME.fullmatch(state):
                raise Unsupported(f"{self.source.root}: the optimizer's state {state!r} is no name for a file")
            files += self._series(parts, f"{OPTIMIZER}/{state}", texts)
        texts[STATE], lost = kept_of(self.source, self.native, tuple(states)).text()
        kept = ", ".join(states)
        report.add(Fate.KEPT, f"the optimizer ({kept}), param groups, scheduler and counters, in {OPTIMIZER}/")
        for what in lost:
            report.add(Fate.LOST, f"{what}: no JSON can hold it")
        return files

    def _described(self, parts: list[Part], report: Report) -> dict[str, object]:
        """The description, with what the conversion changes, held against the tensors."""
        shapes, shared = shapes_of(parts), self.native.shared
        pair = {LM_HEAD, EMBEDDING}
        tied = any({alias, owner} == pair for alias, owner in shared.items())
        known = tied if EMBEDDING in shapes and (tied or LM_HEAD in shapes) else None
        check_config(self.config, shapes, known, self.where)
        is_tied(self.config, shapes, self.where)
        config = dict(self.config)
        if known is not None and TIED not in text_config(config):
            config[TIED] = known
        dtype = main_dtype(parts)
        if dtype is not None and dtype_in(config) != dtype:
            if dtype_in(config) is not None:
                report.add(Fate.CHANGED, f"{CONFIG}: dtype {dtype_in(config)} becomes {dtype}, as the weights are")
            config = with_dtype(config, dtype)
        return with_eos(config, self.options.eos_token_ids)

    def _carried(self, parts: list[Part], report: Report) -> dict[str, bytes]:
        """The tokenizer, and how the model generates."""
        options, own = self.options, self.source.root if self.source.format == "hf" else None
        if options.tokenizer is not None:
            found = tokenizer_files(options.tokenizer)
        else:
            found = carried_files(own) if own is not None else {}
        embedding = shapes_of(parts).get(EMBEDDING)
        rows = embedding[0] if embedding is not None else None
        check_vocabulary(found, rows)
        _check_ends(options.eos_token_ids, rows)
        if found:
            report.add(Fate.KEPT, f"{', '.join(found)}: byte for byte")
        generates = generation_config(options.generation_config, (options.tokenizer, own), options.eos_token_ids)
        return found if generates is None else {**found, GENERATION_CONFIG: generates}

    def _report(self, parts: list[Part], report: Report) -> None:
        source, options = self.source, self.options
        if not self.config:
            report.add(
                Fate.NOTE, f"{CONFIG}: not written, since nothing describes the model; --reference-config gives one"
            )
        self._report_types(parts, report)
        padded = [s for s in source.model.params if self.weights.shape(s) != s.global_shape]
        for spec in padded:
            rows = self.weights.shape(spec)[0]
            report.add(Fate.CHANGED, f"{spec.name}: rows {rows}–{spec.global_shape[0] - 1} are padding, and are cut")
        if source.optimizer is not None and not options.with_optimizer:
            text = "a Hugging Face folder has no place for it; --with-optimizer keeps it beside the weights"
            report.add(Fate.LOST, f"the optimizer: {text}")
        if not options.with_optimizer and (source.state.scheduler is not None or source.state.other):
            report.add(Fate.LOST, "scheduler, counters and client state: a Hugging Face folder has no place for them")
        if options.with_optimizer and len(self.native.per_rank) > 1:
            report.add(Fate.LOST, "client state of model-parallel ranks other than the first")

    def _report_types(self, parts: list[Part], report: Report) -> None:
        """Said of weights that are not what the source stores."""
        specs = {spec.name: spec for spec in self.source.model.params}
        changed = [part for part in parts if part.dtype != specs[part.source.param].dtype]
        stored = [self.source.catalog.get(part.source) is not None for part in parts]
        if not all(stored):
            report.add(Fate.DERIVED, "weights: rounded from their fp32 masters, since the source does not store them")
        from_masters = [part for part in changed if self._stored(part, MASTER) is not None]
        if from_masters:
            kinds = ", ".join(dict.fromkeys(str(part.dtype) for part in from_masters))
            report.add(Fate.DERIVED, f"weights: {kinds}, from their fp32 masters")
        for part in changed:
            self._report_cast(part, report)

    def _report_cast(self, part: Part, report: Report) -> None:
        """Said of a value that is converted and has no master: exact to a wider type, rounded otherwise."""
        entry = self._stored(part, PARAM)
        if entry is None or self._stored(part, MASTER) is not None:
            return
        wider = part.dtype.name in _HOLDS.get(entry.dtype.name, ())
        text = f"weights: converted to {part.dtype}" + ("" if wider else ", and rounded")
        report.add(Fate.CHANGED if wider else Fate.LOST, text)

    def _stored(self, part: Part, state: str) -> TensorEntry | None:
        return self.source.catalog.get(part.source._replace(state=state))


_HOLDS = {"bfloat16": ("float32", "float64"), "float16": ("float32", "float64"), "float32": ("float64",)}
"""For a type, those that hold all of its values."""


def _json(value: Mapping[str, object]) -> str:
    return json.dumps(value, indent=2) + "\n"
