"""The engine of a LoRA: what the manager saves of it, and how it is loaded back in place. peft itself is not needed.

Source: peft 0.21.2, ``tuners/tuners_utils.py`` (``merged_adapters``), ``peft_model.py`` (``peft_config``), ``config.py``
(``save_pretrained``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import PARAM, Record, dtype_of
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import Incomplete, LayoutMismatch, Problems, Unsupported, UsageError
from mcore_rlhf.families.lora.base_model import BaseModel, ModelFingerprint, Runs, Sampled, SavedAdapter, fingerprint
from mcore_rlhf.families.lora.config import AdapterConfig
from mcore_rlhf.families.lora.names import (
    BASE_LAYER,
    CONFIG,
    DEFAULT,
    PREFIX,
    SAFETENSORS,
    in_memory,
    in_original,
    without_prefix,
)
from mcore_rlhf.families.sidecar import STATE
from mcore_rlhf.formats.peft import FORMAT
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.record_file import OpenedFile
from mcore_rlhf.storage.safetensors import Safetensors, read_safetensors
from mcore_rlhf.storage.stored import StoredTensor

from .base import LiveFile, LiveState, LoadRequest, PreparedLoad, Segment, StateTensor
from .load import fill_places
from .plain import FILE, TorchEngine
from .save import Alive, MemoryRanges
from .stateful import Stateful, Undo, no_bytes, refuse_unwritable
from .until_step import UntilStep

_BASE_PATH = "base_model_name_or_path"


class AdapterEngine:
    """An adapter of peft's in training, equal on all ranks. Rank 0 writes; of the base there is a fingerprint only.

    In the role's folder are peft's ``adapter_model.safetensors`` and ``adapter_config.json``, so that
    ``PeftModel.from_pretrained`` loads it as it is; ``mcore_rlhf/state.json`` with the base's path and fingerprint; and
    ``state.pt``, as of the plain engine, with the optimizer, the scheduler, and what is trained besides the adapter.

    Args:
        model: What ``get_peft_model`` made; DDP's wrapper is looked through.
        optimizer: Any ``torch.optim.Optimizer``, or None.
        scheduler: Any learning-rate scheduler, or None.
        adapter: What the adapter is called in the model.
        base: Where the base model lies; None takes what the adapter's configuration says.
        config: The adapter's configuration, where the model has no ``peft_config``.
        others: Further things with ``state_dict``, by name.

    Raises:
        UsageError: The model has no such adapter.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Stateful | None = None,
        *,
        adapter: str = DEFAULT,
        base: str | Path | None = None,
        config: Mapping[str, object] | None = None,
        **others: Stateful,
    ) -> None:
        wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel)
        self.adapter = LiveAdapter.of(model.module if wrapped else model, adapter, config)  # type: ignore[arg-type]
        self.base_path = str(base or self.adapter.config.values.get(_BASE_PATH) or "")
        self._rest = TorchEngine(TrainedBesides(self.adapter), optimizer, scheduler, **others)
        self._known_base: ModelFingerprint | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the role's world."""
        return self._rest.ranks

    @property
    def layout(self) -> str:
        """How the model is cut: not at all."""
        return self._rest.layout

    def live(self, step: int) -> LiveState:
        """Describe what is to be saved: all on rank 0, nothing on the others.

        Raises:
            Unsupported: The adapter is merged into the base just now, or tensors have no bytes.
        """
        if len(self.ranks) > 1 and dist.get_rank() != self.ranks[0]:
            return LiveState(
                FORMAT.name, self.layout, (), state_tensors=self._state_tensors(MemoryRanges(), self._rest.live(step))
            )
        self.adapter.refuse_merged()
        if self._known_base is None:  # it is frozen: once is enough
            self._known_base = self.adapter.base()
        config = {**self.adapter.config.values}
        config[_BASE_PATH] = config.get(_BASE_PATH) or self.base_path or None
        texts = {
            CONFIG: json.dumps(config, indent=2, sort_keys=True),
            **SavedAdapter(step, BaseModel(self.base_path, self._known_base)).texts(),
        }
        memory = MemoryRanges()
        weights, rest = self._weights(memory), self._rest.live(step)
        return LiveState(FORMAT.name, self.layout, (weights, *rest.files), texts, self._state_tensors(memory, rest))

    def until_step(self) -> UntilStep | None:
        """See :class:`~.until_step.Steps`."""
        return self._rest.until_step()

    def _state_tensors(self, memory: MemoryRanges, rest: LiveState) -> tuple[StateTensor, ...]:
        """What is trained, the same on all ranks; the base is none of the step's."""
        alive = (Alive(name, PARAM, tensor) for name, tensor in self.adapter.tensors().items())
        return (*memory.counted(alive, f"{self.layout} adapter"), *(rest.state_tensors or ()))

    def _weights(self, memory: MemoryRanges) -> LiveFile:
        """The widest elements first, then by name, as safetensors lays files out itself."""
        tensors, segments = [], []
        live = self.adapter.tensors()
        for name in sorted(live, key=lambda name: (-live[name].element_size(), name)):
            tensor = live[name].detach()
            if why := no_bytes(tensor):
                raise Unsupported(f"{name} {why}; it cannot be saved")
            shape = tuple(tensor.shape)
            record = Record(SAFETENSORS, name, dtype_of(tensor.dtype), prod(shape), 0)
            tensors.append(StoredTensor.whole(record, shape))
            segments.append(Segment(name, 0, tensor.contiguous()))
            memory.put(tensor)
        return LiveFile(SAFETENSORS, self.ranks[:1], tuple(segments), Safetensors(tensors, {"format": "pt"}))

    def prepare_load(self, request: LoadRequest) -> PreparedLoad:
        """Open the adapter and compare it, and the base that it needs, with what is live.

        Raises:
            CheckpointError: It is missing, damaged, another model's, or of another base; all differences are listed.
        """
        self.adapter.refuse_merged()
        stored = read_safetensors(request.folder, SAFETENSORS)
        report = Report()
        self._check(stored, request.folder)
        self._check_base(request.folder, report)
        report.add(Fate.KEPT, f"the adapter: {len(stored.tensors)} tensors")
        rest = self._prepare_rest(request)
        return AdapterLoad(self.adapter, request.folder, stored, rest, report)

    def _check(self, stored: OpenedFile, folder: ReadablePath) -> None:
        problems, live = Problems(), self.adapter.tensors()
        where = str(folder / SAFETENSORS)
        for name in sorted({*stored.tensors, *live}):
            place, target = stored.tensors.get(name), live.get(name)
            if place is None or target is None:
                text = "is missing" if place is None else "is not a tensor of the run's adapter"
                problems.add(LayoutMismatch, f"{where}: {name} {text}")
            elif (place.shape, place.record.dtype) != (tuple(target.shape), dtype_of(target.dtype)):
                found, wanted = f"{place.record.dtype} {place.shape}", f"{dtype_of(target.dtype)} {tuple(target.shape)}"
                problems.add(LayoutMismatch, f"{where}: {name} is {found}, the run's is {wanted}")
        refuse_unwritable(live, where, problems)
        problems.raise_if_any()

    def _check_base(self, folder: ReadablePath, report: Report) -> None:
        origin = SavedAdapter.read(folder)
        if origin is None or origin.base is None or origin.base.fingerprint is None:
            report.add(Fate.NOTE, "the adapter has no fingerprint of its base model, so that the base was not checked")
            return
        found = self.adapter.base()
        origin.base.check(found, f"the run's base model{f' ({self.base_path})' if self.base_path else ''}")
        self._known_base = found
        report.add(Fate.NOTE, "the base model has the fingerprint of the one on which the adapter was trained")

    def _prepare_rest(self, request: LoadRequest) -> PreparedLoad | None:
        if (request.folder / FILE).is_file():
            return self._rest.prepare_load(request)
        if request.optimizer and (self._rest.optimizer is not None or self._rest.others):
            raise Incomplete(
                f"{request.folder / FILE}: there is no such file, and the optimizer lies in it\n"
                "This is an adapter without the state of its training: load the weights alone, load(optimizer=False)."
            )
        return None


@dataclass(slots=True)
class AdapterLoad:
    """A load of an adapter, checked, and of what the plain engine has besides."""

    adapter: LiveAdapter
    folder: ReadablePath
    stored: OpenedFile
    rest: PreparedLoad | None
    report: Report
    files: Sequence[ReadablePath] = field(init=False)
    rng: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        names = (SAFETENSORS, CONFIG, STATE)
        beside = [self.folder / name for name in names if (self.folder / name).is_file()]
        self.files = [*beside, *(self.rest.files if self.rest is not None else ())]
        if self.rest is not None:
            self.report.extend(self.rest.report.lines)

    def install(self, undo: Undo) -> None:
        """What may refuse is all in the plain engine's part.

        Raises:
            CheckpointError: A part refused its state.
        """
        if self.rest is not None:
            self.rest.install(undo)

    def fill(self) -> None:
        """The adapter's tensors, and what is trained besides, in place."""
        if self.rest is not None:
            self.rest.fill()
        live = self.adapter.tensors()
        fill_places(self.folder, ((place, live[name]) for name, place in self.stored.tensors.items()))


@dataclass(frozen=True, slots=True, eq=False)
class LiveAdapter:
    """A model with an adapter.

    Args:
        model: The model.
        config: The adapter's configuration.
        name: What the adapter is called in the model.
    """

    model: torch.nn.Module
    config: AdapterConfig
    name: str = DEFAULT

    @classmethod
    def of(cls, model: torch.nn.Module, name: str, config: Mapping[str, object] | None) -> LiveAdapter:
        """The adapter of that name.

        Args:
            model: What ``get_peft_model`` made, or any model with an adapter of peft's.
            name: What the adapter is called in it.
            config: Its configuration, where the model does not have it.

        Raises:
            UsageError: The model has no such adapter, or no configuration.
        """
        if config is None:
            configs = getattr(model, "peft_config", {})
            if name not in configs:
                known = ", ".join(configs) or "none"
                raise UsageError(
                    f"AdapterEngine: the model has no peft_config of an adapter {name!r} (it has: {known})\n"
                    "Give what get_peft_model made, or the adapter's configuration: AdapterEngine(model, config={...})."
                )
            config = _dictionary(configs[name])
        plain = {str(key): _plain(value) for key, value in config.items()}
        found = cls(model, AdapterConfig.checked({**plain, "inference_mode": True}, "the model's peft_config"), name)
        if not found.tensors():
            raise UsageError(f"AdapterEngine: no parameter of the model belongs to an adapter {name!r}")
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """The adapter's own tensors, by their names in peft's file."""
        bias, own, adapted = self.config.values.get("bias"), {}, set()
        state = _own_state(self.model)
        for memory, tensor in state.items():
            found = in_memory(memory)
            if found is not None and found.adapter == self.name:
                own[found.file] = tensor
                adapted.add(found.module)
        for memory, tensor in state.items():
            base = without_prefix(memory)
            module = base.rpartition(".")[0].removesuffix(f".{BASE_LAYER}")
            wanted = bias == "all" or (bias == "lora_only" and module in adapted)
            if wanted and base.endswith(".bias") and in_memory(memory) is None:
                own[PREFIX + base] = tensor
        return own

    def others(self) -> dict[str, torch.nn.Parameter]:
        """Parameters that are trained and belong to no adapter: a value head, say."""
        own = {id(tensor) for tensor in self.tensors().values()}
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad and id(parameter) not in own and in_memory(name) is None
        }

    def refuse_merged(self) -> None:
        """See that the base is what it was.

        Raises:
            Unsupported: An adapter has been added to it, as for generation.
        """
        merged = [name for name, module in self.model.named_modules() if getattr(module, "merged_adapters", None)]
        if merged:
            raise Unsupported(
                f"the adapter is merged into the base weights of {len(merged)} modules such as {merged[0]}: neither is what was trained\n"
                "Call model.unmerge_adapter() before saving or loading."
            )

    def base(self) -> ModelFingerprint:
        """The fingerprint of everything that is not trained, under the base model's own names."""
        return fingerprint(self._base())

    def _base(self) -> Iterator[Sampled]:
        trained = {id(tensor) for tensor in self.others().values()}
        seen: set[int] = set()
        for memory, tensor in _own_state(self.model).items():
            if in_memory(memory) is not None or id(tensor) in trained or tensor.data_ptr() in seen:
                continue
            if why := no_bytes(tensor):
                raise Unsupported(f"{memory} {why}; the base model's fingerprint cannot be taken")
            seen.update({tensor.data_ptr()} if tensor.numel() else set())
            yield Sampled(in_original(memory), tuple(tensor.shape), dtype_of(tensor.dtype), partial(_bytes_of, tensor))


def _bytes_of(tensor: torch.Tensor, runs: Runs) -> bytes:
    """Parts of a live tensor."""
    flat = tensor.detach().reshape(-1)
    parts = torch.cat([flat[start:stop].reshape(-1) for start, stop in runs])
    return bytes(parts.contiguous().view(torch.uint8).cpu().numpy().data)


def _own_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers themselves, tied ones under every name."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _dictionary(config: object) -> Mapping[str, object]:
    if isinstance(config, Mapping):
        return config
    found = config.to_dict()  # type: ignore[attr-defined]
    assert isinstance(found, dict)  # peft's own
    return found


def _plain(value: object) -> object:
    """As JSON has it: peft keeps names in sets, and kinds in enumerations."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


class TrainedBesides(torch.nn.Module):
    """Has the names of all parameters, and the state of those that are trained and belong to no adapter.

    Args:
        adapter: The live one.
    """

    def __init__(self, adapter: LiveAdapter) -> None:
        super().__init__()
        self._adapter = [adapter]  # in a list, so that the model does not become a part of this

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """What is trained besides the adapter."""
        del args, kwargs
        return {name: parameter.detach() for name, parameter in self._adapter[0].others().items()}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """All of the model's."""
        return self._adapter[0].model.named_parameters(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        """All of the model's."""
        return self._adapter[0].model.parameters(recurse)

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """All of the model's."""
        return self._adapter[0].model.buffers(recurse)
