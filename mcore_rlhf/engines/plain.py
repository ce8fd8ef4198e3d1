"""Plain PyTorch: a module, its optimizer and its scheduler, in one process or as equal replicas (DDP).

Everything lies in one file, ``state.pt``, as ``torch.save`` would write it; ``torch.load(…, weights_only=True)`` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from mcore_rlhf.errors import Incomplete, LayoutMismatch, Problems
from mcore_rlhf.formats.report import Fate, Report
from mcore_rlhf.storage.ptfile import PtFile, StoredTensor, read_pt

from .base import LiveFile, LiveState, LoadRequest, PreparedLoad
from .copying import fill
from .live import LiveTree

FILE = "state.pt"
_DDP_PREFIX = "module."


@runtime_checkable
class Stateful(Protocol):
    """Anything that says what it holds, and takes it back: a scheduler, a scaler, a whole trainer."""

    def state_dict(self) -> dict[str, object]:
        """What it holds."""
        ...

    def load_state_dict(self, state_dict: dict[str, object], /) -> object:
        """Take it back."""
        ...


class TorchEngine:
    """A module and what trains it, equal on all ranks. Rank 0 writes.

    Args:
        module: The model, or None; DDP's wrapper is looked through.
        optimizer: Any ``torch.optim.Optimizer``, or None.
        scheduler: Any learning-rate scheduler, or None.
        others: Further things with ``state_dict``, by name: a gradient scaler, a tokenizer's counters.
    """

    def __init__(
        self,
        module: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Stateful | None = None,
        **others: Stateful,
    ) -> None:
        self.module = _unwrapped(module)
        self.optimizer = optimizer
        self.others: dict[str, Stateful] = {**({"scheduler": scheduler} if scheduler is not None else {}), **others}
        self.ranks = tuple(range(dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1))

    @property
    def layout(self) -> str:
        """How the model is cut: not at all."""
        return f"DP{len(self.ranks)}"

    def live(self, step: int) -> LiveState:
        """Describe what is to be saved: all on rank 0, nothing on the others."""
        del step
        if len(self.ranks) > 1 and dist.get_rank() != self.ranks[0]:
            return LiveState("torch", self.layout, ())
        live = LiveTree(FILE)
        tree = {name: live.placed(part) for name, part in self._parts().items()}
        return LiveState("torch", self.layout, (LiveFile(FILE, self.ranks[:1], tuple(live.segments), tree),))

    def _parts(self) -> dict[str, object]:
        parts: dict[str, object] = {}
        if self.module is not None:
            parts["model"] = self.module.state_dict()
        if self.optimizer is not None:
            parts["optimizer"] = self.optimizer.state_dict()
        return parts | {name: other.state_dict() for name, other in self.others.items()}

    def prepare_load(self, request: LoadRequest) -> PreparedLoad:
        """Open ``state.pt`` and compare it with what is live.

        Raises:
            CheckpointError: It is missing, damaged, or another model's; all differences are listed.
        """
        pt = read_pt(request.folder, FILE)
        where = str(request.folder / FILE)
        if not isinstance(pt.tree, dict):
            raise LayoutMismatch(f"{where}: expected a dictionary with the model and its optimizer")
        problems, report = Problems(), Report()
        wanted = [name for name in self._parts() if name == "model" or request.optimizer]
        for name in wanted:
            if name not in pt.tree:
                problems.add(Incomplete, f"{where}: has no {name!r}; it has {', '.join(map(str, pt.tree))}")
        if self.module is not None and isinstance(pt.tree.get("model"), dict):
            _compare(pt.tree["model"], self.module.state_dict(), where, problems)
        problems.raise_if_any()
        for name in sorted(set(map(str, pt.tree)) - set(wanted)):
            report.add(Fate.NOTE, f"{name}: is in the checkpoint, and not loaded")
        report.add(Fate.KEPT, ", ".join(wanted))
        return _Load(self, pt, wanted, report)


@dataclass(slots=True)
class _Load:
    engine: TorchEngine
    pt: PtFile
    parts: Sequence[str]
    report: Report
    files: Sequence[Path] = field(init=False)
    rng: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        self.files = (self.pt.root / self.pt.file,)

    def apply(self) -> None:
        """Overwrite the live module, in place, then hand the optimizer and the rest their states."""
        engine, tree = self.engine, self.pt.tree
        if "model" in self.parts and engine.module is not None:
            fill(self.pt.root, tree["model"], engine.module.state_dict())
            extra = {name: value for name, value in tree["model"].items() if not isinstance(value, StoredTensor)}
            if extra:
                engine.module.load_state_dict(self.pt.materialize(extra), strict=False)
        if "optimizer" in self.parts and engine.optimizer is not None:
            self._load_optimizer(engine.optimizer, tree["optimizer"])
        for name in self.parts:
            if name in engine.others:
                engine.others[name].load_state_dict(self.pt.materialize(tree[name]))

    def _load_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, object]) -> None:
        """Into the existing state tensors where they are all there; otherwise torch makes new ones."""
        live = optimizer.state_dict()
        if _same_tensors(saved["state"], live["state"]) and live["state"]:
            groups = self.pt.materialize(saved["param_groups"])
            optimizer.load_state_dict({"state": live["state"], "param_groups": groups})
            for index, values in _mapping(saved["state"]).items():
                fill(self.pt.root, _mapping(values), optimizer.state_dict()["state"][index])
        else:
            optimizer.load_state_dict(self.pt.materialize(dict(saved)))


def _compare(stored: Mapping[str, object], live: Mapping[str, object], where: str, problems: Problems) -> None:
    for name, target in live.items():
        place = stored.get(name)
        if name not in stored:
            problems.add(LayoutMismatch, f"{where}: {name} is missing; the model has it with shape {_shape(target)}")
        elif isinstance(place, StoredTensor) and place.shape != _shape(target):
            problems.add(LayoutMismatch, f"{where}: {name} has shape {place.shape}, the model's has {_shape(target)}")
        elif isinstance(place, StoredTensor) and isinstance(target, torch.Tensor):
            _compare_dtype(name, place, target, where, problems)
    for name in stored:
        if name not in live:
            problems.add(LayoutMismatch, f"{where}: {name} {_shape(stored[name])} is not a parameter of the model")


def _compare_dtype(name: str, place: StoredTensor, target: torch.Tensor, where: str, problems: Problems) -> None:
    if place.record.dtype.name != str(target.dtype).removeprefix("torch."):
        problems.add(LayoutMismatch, f"{where}: {name} is {place.record.dtype.name}, the model's is {target.dtype}")


def _shape(value: object) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor | StoredTensor) else None


def _same_tensors(stored: object, live: object) -> bool:
    """Whether two nests of optimizer states have the same keys, and tensors of the same shapes and types."""
    if isinstance(stored, dict) and isinstance(live, dict):
        return stored.keys() == live.keys() and all(_same_tensors(stored[key], live[key]) for key in stored)
    if isinstance(stored, StoredTensor) and isinstance(live, torch.Tensor):
        return stored.shape == tuple(live.shape) and f"torch.{stored.record.dtype.name}" == str(live.dtype)
    return False


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, Mapping)
    return value


def _unwrapped(module: torch.nn.Module | None) -> torch.nn.Module | None:
    wrapped = isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel)
    return module.module if wrapped else module  # type: ignore[union-attr, return-value]
