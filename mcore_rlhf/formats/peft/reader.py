"""Opening an adapter's folder: its tensors have the names that they have in a model's memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Fate, Rule
from mcore_rlhf.errors import Corrupt, Incomplete, NotACheckpoint, Problems, Unsupported
from mcore_rlhf.families.lora.base_model import SavedAdapter
from mcore_rlhf.families.lora.config import AdapterConfig, read_adapter_config
from mcore_rlhf.families.lora.names import (
    BIN,
    CONFIG,
    LORA_A,
    LORA_B,
    PREFIX,
    SAFETENSORS,
    WEIGHTS,
    AdapterTensor,
    in_file,
)
from mcore_rlhf.families.lora.parts import CARRIED
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.sidecar import sidecar_files
from mcore_rlhf.families.source import Source, TrainingState
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.spec import REPLICATED, ModelSpec, ParamSpec
from mcore_rlhf.storage.containers import open_tensors
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.storage.records import told
from mcore_rlhf.storage.stored import StoredTensor, whole_entry

_ENGINE_STATE = "state.pt"
"""Beside an adapter that ``AdapterEngine`` saved: the optimizer, the scheduler, and what is trained besides the adapter."""

_LAYER = re.compile(r"\.layers\.(\d{1,18})\.")
_ADVICE = "Save the adapter again with peft's save_pretrained, or copy it again."


def read_peft(path: ReadablePath, options: ReadOptions) -> Source:
    """Open an adapter.

    Args:
        path: The folder with ``adapter_config.json``.
        options: Whose model it is, which stubs.

    Raises:
        CheckpointError: It is incomplete, damaged, or contradicts itself.
    """
    if not any((path / name).is_file() for name in (CONFIG, *WEIGHTS)):
        raise NotACheckpoint(f"{path}: expected {CONFIG} and {SAFETENSORS}, found neither")
    _check_files(path)
    config, origin = read_adapter_config(path), SavedAdapter.read(path) or SavedAdapter()
    stored, file = _tensors(path, options.stubs)
    named = {name: in_file(name, config.saved_modules) for name in stored}
    _check(path, named, stored)
    specs = tuple(
        ParamSpec(named[name].memory, tensor.shape, tensor.record.dtype, REPLICATED) for name, tensor in stored.items()
    )
    role, files = options.role or "actor", (file, *sidecar_files(path))
    entries = [whole_entry(TensorName(role, named[name].memory), tensor) for name, tensor in stored.items()]
    return Source(
        format="peft",
        root=path,
        role=role,
        model=ModelSpec(specs, _layers(named.values()), False),
        parallel=ParallelConfig(),
        catalog=Chunks.of(entries),
        state=_state(config, origin),
        files=files,
        states=(),
        optimizer=None,
        notes=Report.of(_BESIDE, (config.values, path)),
        family=ModuleState(order=tuple(spec.name for spec in specs)),
    )


def _check_files(path: ReadablePath) -> None:
    problems = Problems()
    if not (path / CONFIG).is_file():
        text = f"{path / CONFIG}: there is no such file, and without it nobody knows how much the adapter changes"
        problems.add(Incomplete, text, "Copy it from where the adapter came from.")
    if not any((path / name).is_file() for name in WEIGHTS):
        problems.add(Incomplete, f"{path}: has {CONFIG}, but neither {SAFETENSORS} nor {BIN}")
    problems.raise_if_any()


def _tensors(path: ReadablePath, stubs: tuple[str, ...]) -> tuple[Mapping[str, StoredTensor], StoredFile]:
    opened = open_tensors(path, next(name for name in WEIGHTS if (path / name).is_file()), stubs)
    return opened.tensors, StoredFile(opened.file, opened.nbytes, opened.records)


def _check(path: ReadablePath, named: Mapping[str, AdapterTensor], stored: Mapping[str, StoredTensor]) -> None:
    """Every A has its B, of the same rank; nothing has a name that peft never writes."""
    problems = Problems()
    foreign = [name for name in named if not name.startswith(PREFIX)]
    if foreign:
        problems.add(Unsupported, f"{path}: {foreign[0]}: expected names that begin with {PREFIX}", _ADVICE)
    ranks: dict[tuple[str, str], tuple[str, int]] = {}
    for name, tensor in named.items():
        shape = stored[name].shape
        if tensor.kind in (LORA_A, LORA_B) and len(shape) == 2:
            ranks[tensor.module, tensor.kind] = name, shape[0 if tensor.kind == LORA_A else 1]
    for (module, kind), (name, rank) in ranks.items():
        other = ranks.get((module, LORA_B if kind == LORA_A else LORA_A))
        if other is None:
            problems.add(
                Incomplete, f"{path}: {name} has no counterpart: an adapter of {module} is an A and a B", _ADVICE
            )
        elif other[1] != rank and kind == LORA_A:
            problems.add(Corrupt, f"{path}: {name} has rank {rank}, {other[0]} has rank {other[1]}", _ADVICE)
    problems.raise_if_any()


def _state(config: AdapterConfig, origin: SavedAdapter) -> TrainingState:
    carried: dict[str, object] = {"config": json.loads(json.dumps(config.values))}
    if origin.base is not None:
        carried["base"] = told(origin.base, sparse=True)
    return TrainingState(origin.iteration, release=origin.iteration == 0, other={CARRIED: carried})


_BESIDE: Sequence[Rule[tuple[Mapping[str, object], ReadablePath]]] = [
    Rule(Fate.NOTE, "an adapter of rank {rank}, alpha {alpha}, for {base}",
         lambda asked: {"rank": asked[0].get("r"), "alpha": asked[0].get("lora_alpha"),
                        "base": asked[0].get("base_model_name_or_path") or "a base that is not named"}),
    Rule(Fate.LOST, f"{_ENGINE_STATE} beside the adapter, with its optimizer and whatever else was trained, such as a value head: only "
         "AdapterEngine loads it, and no conversion reads it", lambda asked: (asked[1] / _ENGINE_STATE).is_file()),
]  # fmt: skip
"""Of an adapter's settings, and its folder."""


def _layers(tensors: Iterable[AdapterTensor]) -> int:
    numbers = (int(found.group(1)) for tensor in tensors if (found := _LAYER.search(tensor.file)))
    return 1 + max(numbers, default=-1)
