"""What people write when they need it once: load everything, cat, split, ``torch.save``; with optimizer, one process."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import torch

from .checkpoints import ITERATION, Checkpoint
from .measure import flush
from .model import Local, local_params

_STATES = ("exp_avg", "exp_avg_sq", "param")


def naive(checkpoint: Checkpoint, target: Path, tp: int, *, fsync: bool = False) -> None:
    """Reshape as a script does that knows this one model."""
    folder = checkpoint.root / f"iter_{ITERATION:07d}"
    loaded = [_load(folder / f"mp_rank_{rank:02d}") for rank in range(checkpoint.tp)]
    num_layers = loaded[0][0]["args"].num_layers
    whole = _merged(loaded, list(local_params(num_layers, checkpoint.tp)))
    for rank in range(tp):
        parts = {name: {s: _part(name, t, rank, tp) for s, t in states.items()} for name, states in whole.items()}
        _save(target / folder.name / f"mp_rank_{rank:02d}", loaded[0][0], parts, list(local_params(num_layers, tp)), tp)
    (target / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    if fsync:
        flush(target)


def _load(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    model = torch.load(folder / "model_optim_rng.pt", weights_only=False)
    ((_, states),) = torch.load(folder / "distrib_optim.pt", weights_only=False)[0].items()
    return model, states


def _merged(loaded: list[tuple[Any, Any]], params: list[Local]) -> dict[str, dict[str, torch.Tensor]]:
    starts, start = {}, 0
    for param in reversed(params):
        start = -(-start // 64) * 64
        starts[param.name] = start
        start += param.numel
    whole = {}
    for param in params:
        at = slice(starts[param.name], starts[param.name] + param.numel)
        ranks = [{s: states[s][at].view(param.shape) for s in _STATES} for _, states in loaded]
        for (model, _), rank in zip(loaded, ranks, strict=True):
            rank["model"] = model["model"][param.name]
        whole[param.name] = {s: _cat(param, [rank[s] for rank in ranks]) for s in (*_STATES, "model")}
    return whole


def _cat(param: Local, tensors: list[torch.Tensor]) -> torch.Tensor:
    if param.replicated:
        return tensors[0]
    if ".linear_fc1." in param.name:
        halves = [tensor.chunk(2) for tensor in tensors]
        return torch.cat([half[side] for side in range(2) for half in halves])
    return torch.cat(tensors, dim=_dim(param.name))


def _part(name: str, tensor: torch.Tensor, rank: int, tp: int) -> torch.Tensor:
    if tensor.dim() == 1:
        return tensor
    if ".linear_fc1." in name:
        return torch.cat([half.chunk(tp)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(tp, dim=_dim(name))[rank]


def _dim(name: str) -> int:
    return 1 if ".linear_proj." in name or ".linear_fc2." in name else 0


def _save(
    folder: Path, old: dict[str, Any], parts: dict[str, dict[str, torch.Tensor]], params: list[Local], tp: int
) -> None:
    folder.mkdir(parents=True)
    order = list(reversed(params))
    *starts, numel = itertools.accumulate((-(-p.numel // 64) * 64 for p in order), initial=0)
    flats = {s: torch.zeros(numel, dtype=parts[order[0].name][s].dtype) for s in (*_STATES, "model")}
    for param, start in zip(order, starts, strict=True):
        for state, flat in flats.items():
            flat[start : start + param.numel] = parts[param.name][state].reshape(-1)
    views = {p.name: flats["model"][s : s + p.numel].view(p.shape) for p, s in zip(order, starts, strict=True)}
    args = argparse.Namespace(**{**vars(old["args"]), "tensor_model_parallel_size": tp})
    torch.save({**old, "args": args, "model": views}, folder / "model_optim_rng.pt")
    states = {state: flats[state] for state in _STATES}
    tree = {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): {**states, "numel_unpadded": numel}}}
    torch.save(tree, folder / "distrib_optim.pt")
