"""DCP folders that torch itself writes in this process, under the keys of several kinds of runs; and torch's own answers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

STYLES = ("rlinf", "flat", "top", "plain", "accelerate")


class TwoHeads(nn.Module):
    """Odd sizes, a buffer in front, a frozen layer, a head of one row."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("steps", torch.tensor(3))
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.value_head = nn.Linear(6, 1)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words) * self.scale
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return torch.as_tensor(self.value_head(hidden).pow(2).mean())


@dataclass
class Run:
    """A model that has trained, and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    rng: torch.Tensor

    def train(self, steps: int) -> list[float]:
        losses = []
        for step in range(steps):
            loss = self.model((torch.arange(8) * (step + 1)) % 11)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(float(loss.detach()))
        return losses


def new_run(seed: int = 0, *, groups: int = 2, steps: int = 2) -> Run:
    """A run with one group, or matrices and vectors apart."""
    model = TwoHeads(seed)
    params = list(model.parameters())
    listed: Any = params
    if groups == 2:
        listed = [
            {"params": [p for p in params if p.dim() > 1]},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 3e-3},
        ]
    optimizer = torch.optim.AdamW(listed, lr=1e-2, weight_decay=0.1)
    rng = torch.Generator().manual_seed(seed).get_state()
    run = Run(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, _decay), rng)
    run.train(steps)
    return run


def _decay(step: int) -> float:
    return 1.0 / (step + 1)


def state_of(run: Run, style: str) -> dict[str, Any]:
    """What a run of that style hands to ``dcp.save`` and ``dcp.load``."""
    model = get_model_state_dict(run.model)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    if style == "plain":
        return {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    if style == "flat":
        rest = {"lr_scheduler": run.scheduler.state_dict(), "train_state": {"step": torch.tensor(7, dtype=torch.int32)}}
        return {"model": model, "optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=flat), **rest}
    if style == "top":
        return {**model, "optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=flat)}
    optimizer = get_optimizer_state_dict(run.model, run.optimizer)
    if style == "accelerate":
        return {"model": model, "optimizer": optimizer}
    rest = {"lr_schedulers": [run.scheduler.state_dict()], "fsdp_version": "fsdp2", "rng": {"cpu": run.rng}}
    return {"fsdp_checkpoint": {"model": model, "optimizers": optimizer, **rest}}


def save(state: Mapping[str, Any], folder: Path) -> None:
    """``dcp.save`` in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True)


def load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """``dcp.load`` in one process; fills the state and returns it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def flattened(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of a nest by its path."""
    if isinstance(value, Mapping):
        return {k: v for key, item in value.items() for k, v in flattened(item, f"{path}.{key}").items()}
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return {k: v for n, item in enumerate(value) for k, v in flattened(item, f"{path}.{n}").items()}
    return {path: value}


def differences(one: Any, other: Any) -> list[str]:
    """Paths of what differs by a bit."""
    a, b = flattened(one), flattened(other)
    return [key for key in sorted(a.keys() | b.keys()) if not _same(a.get(key), b.get(key))]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)
