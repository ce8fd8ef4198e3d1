"""Describing a new adapter's folder, from any checkpoint that holds an adapter under a module's names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from mcore_rlhf.core.catalog import MASTER, PARAM, Chunk, DType, Record, TensorEntry, TensorName, dtype_of
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, Item, Kind, Reason, Rule
from mcore_rlhf.core.shares import EITHER, FROM_MASTERS
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.inventory import OF_OPTIMIZER, OF_WEIGHTS_ALONE, inventory_of
from mcore_rlhf.families.lora.base_model import BaseModel, SavedAdapter
from mcore_rlhf.families.lora.config import AdapterConfig, completed
from mcore_rlhf.families.lora.names import CONFIG, SAFETENSORS
from mcore_rlhf.families.lora.parts import CARRIED, Adapter, adapter_in, carried, known_config
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.base import FileLayout, Target, TargetFile
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.storage.records import record_of
from mcore_rlhf.storage.safetensors import Safetensors
from mcore_rlhf.storage.stored import StoredTensor

_HELD = (Item(Kind.VALUE, "iteration"), Item(Kind.VALUE, CARRIED))
_BASE_PATH = "base_model_name_or_path"


class _Written(NamedTuple):
    """What is asked about a folder that is written: besides source, options and adapter, which settings the source does not give."""

    source: Source
    options: WriteOptions
    adapter: Adapter
    made: list[str]

    def of_run(self) -> list[Item]:
        """What the run around the adapter has, for which there is no place."""
        there = inventory_of(self.source)
        return [item for item in there if item not in _HELD and item.kind in (Kind.SCHEDULER, Kind.VALUE, Kind.RNG)]


_RULES: tuple[Rule[_Written], ...] = (
    Rule(Fate.KEPT, "the adapter: {tensors} tensors of {modules} modules",
         lambda w: {"tensors": len(w.adapter.tensors), "modules": len(w.adapter.ranks)}),
    Rule(Fate.LOST, "the optimizer: peft's folder has no place for it; the checkpoint itself goes on training",
         lambda w: w.source.optimizer is not None and not w.options.no_optimizer, OF_OPTIMIZER),
    Rule(Fate.DERIVED, f"{CONFIG}: {{found}} follow from the tensors, or are peft's own defaults", lambda w: w.made),
    Rule(Fate.LOST, OF_WEIGHTS_ALONE,
         lambda w: w.of_run() and {"of": w.of_run()}),
    Rule(Reason.OF_ENGINE, of=(Item(Kind.ARGUMENT), Item(Kind.OPTIMIZER))),
    Rule(Reason.OF_LAYOUT, of=[Item(Kind.MODEL)]),
    Rule(Reason.NOT_ASKED, of=[Item(Kind.CONFIG)]),
)  # fmt: skip


def peft_target(source: Source, options: WriteOptions) -> Target:
    """Describe the folder of the adapter that a source holds.

    Args:
        source: A checkpoint under a module's names: of the adapter alone, or with the base beside it.
        options: What the user asked for: ``reference_config`` for the adapter's configuration, ``dtype``, ``masters``.

    Raises:
        CheckpointError: There is no adapter, or nobody says how much it changes.
    """
    if ModuleState.of(source) is None:
        raise Unsupported(f"from {source.format} to peft: its names are not those of a module with an adapter")
    return _AdapterTarget(source, options, known_config(source, options.reference_config)).target()


@dataclass(frozen=True, slots=True)
class _AdapterTarget:
    source: Source
    options: WriteOptions
    given: AdapterConfig

    def target(self) -> Target:
        adapter = adapter_in(self.source, self.given.bias)
        config = completed(self.given, adapter.ranks, adapter.saved_modules)
        base = self._base()
        values = {**config.values, "inference_mode": True}
        if base is not None and base.path and not values.get(_BASE_PATH):
            values[_BASE_PATH] = base.path
        report = self.source.notes.for_target()
        report.through(
            _RULES, _Written(self.source, self.options, adapter, sorted({*config.values} - {*self.given.values}))
        )
        texts: dict[str, str | bytes] = {CONFIG: json.dumps(values, indent=2, sort_keys=True)}
        if base is not None or self.source.state.iteration:
            texts.update(SavedAdapter(self.source.state.iteration, base).texts())
        view = self._view({t.file: t.memory for t in adapter.tensors})
        files = (TargetFile(SAFETENSORS, lambda: self._layout(view, adapter)),)
        return Target(
            format="peft",
            parallel=ParallelConfig(),
            source=view,
            files=files,
            texts=texts,
            report=report,
            holds={item: value for item, value in inventory_of(self.source).items() if item in _HELD},
        )

    def _base(self) -> BaseModel | None:
        found = carried(self.source).get("base")
        base = None if found is None else record_of(BaseModel, found, f"{self.source.root}: base", sparse=True)
        if self.options.base_model is not None:
            return replace(base or BaseModel(), path=self.options.base_model)
        return base

    def _layout(self, view: Chunks, adapter: Adapter) -> FileLayout:
        """The widest elements first, then by name: so safetensors lays files out itself, and tensors lie at round offsets."""
        files = sorted((-self._dtype(tensor.memory).itemsize, tensor.file, tensor.memory) for tensor in adapter.tensors)
        entries, tensors = [], []
        for _, file, memory in files:
            spec = self.source.model.get(memory)
            assert spec is not None  # the adapter was found among these
            record = Record(SAFETENSORS, file, self._dtype(memory), prod(spec.global_shape), 0)
            chunk = Chunk.whole(record, spec.global_shape)
            entries.append(TensorEntry(TensorName(self.source.role, file), spec.global_shape, record.dtype, (chunk,)))
            tensors.append(StoredTensor.whole(record, spec.global_shape))
        return FileLayout(
            Chunks.of(entries), [tensor.record for tensor in tensors], Safetensors(tensors, {"format": "pt"})
        )

    def _view(self, names: Mapping[str, str]) -> Chunks:
        """The adapter's tensors under peft's names."""
        either = self.source.catalog.states(FROM_MASTERS if self.options.masters else EITHER)
        return either.renamed(self.source.role, names)

    def _dtype(self, memory: str) -> DType:
        if self.options.dtype is not None:
            return dtype_of(self.options.dtype)
        states = (MASTER, PARAM) if self.options.masters else (PARAM, MASTER)
        entries = (self.source.catalog.get(TensorName(self.source.role, memory, state)) for state in states)
        spec = self.source.model.get(memory)
        assert spec is not None  # the adapter was found among these
        found = next((entry for entry in entries if entry is not None), None)
        return spec.dtype if found is None or not self.options.masters else found.dtype
