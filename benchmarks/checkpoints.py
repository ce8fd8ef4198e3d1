"""Makes a legacy Megatron checkpoint of a chosen size with plain ``torch.save``: nothing of this project writes it.

Structure: ``model_optim_rng.pt`` with the parameters as views of one flat storage, ``distrib_optim.pt`` with the gathered
masters and moments. Source: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py``; megatron-core 0.16.1,
``distributed/param_and_grad_buffer.py``, ``optimizer/distrib_optimizer.py``.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
import torch

from .model import BYTES_PER_PARAM, HIDDEN, Local, arguments, layers_for, local_params

ITERATION = 100
_ALIGNMENT, _DIVISOR = 64, 128


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk; ``root`` is what Megatron would be given as ``--load``."""

    root: Path
    tp: int

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    @property
    def files(self) -> list[Path]:
        return sorted(path for path in self.root.rglob("*") if path.is_file())


def make(folder: Path, gigabytes: float, tp: int) -> Checkpoint:
    """A checkpoint of about that many 10^9 bytes; the one of an earlier call is kept."""
    root = folder / f"tp{tp}-{gigabytes:g}gb"
    checkpoint = Checkpoint(root, tp)
    if (root / "latest_checkpointed_iteration.txt").is_file():
        return checkpoint
    shutil.rmtree(root, ignore_errors=True)
    num_layers = layers_for(gigabytes) if gigabytes * 1e9 > 100 * HIDDEN * BYTES_PER_PARAM else 1
    for tp_rank in range(tp):
        _write_rank(root / f"iter_{ITERATION:07d}" / f"mp_rank_{tp_rank:02d}", num_layers, tp, tp_rank)
    (root / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    return checkpoint


def _write_rank(folder: Path, num_layers: int, tp: int, tp_rank: int) -> None:
    folder.mkdir(parents=True)
    params = list(local_params(num_layers, tp))
    places, numel_unpadded = _places(params)
    masters = _random_states(params, places, numel_unpadded, tp_rank, 0.02)
    numel = -(-numel_unpadded // _DIVISOR) * _DIVISOR
    buffer = torch.zeros(numel, dtype=torch.bfloat16)
    buffer[:numel_unpadded] = masters
    views = OrderedDict((param.name, buffer[places[param.name] :][: param.numel].view(param.shape)) for param in params)
    torch.save(_model_tree(views, num_layers, tp, tp_rank), folder / "model_optim_rng.pt")
    del views, buffer
    moments = {
        "exp_avg": _random_states(params, places, numel_unpadded, 100 + tp_rank, 1e-3),
        "exp_avg_sq": _random_states(params, places, numel_unpadded, 200 + tp_rank, 1e-3).square_(),
    }
    states = {"param": masters, **moments, "numel_unpadded": numel_unpadded}
    tree = {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): states}}
    torch.save(tree, folder / "distrib_optim.pt")


def _places(params: Sequence[Local]) -> tuple[dict[str, int], int]:
    """Where every parameter starts in the buffer: reversed registration order, 64-element steps."""
    start, places = 0, {}
    for param in reversed(params):
        start = -(-start // _ALIGNMENT) * _ALIGNMENT
        places[param.name] = start
        start += param.numel
    return places, start


def _random_states(
    params: Sequence[Local], places: dict[str, int], numel: int, seed: int, scale: float
) -> torch.Tensor:
    """A flat buffer of random values; what is replicated has the same ones on every rank, and gaps are zero."""
    flat = torch.zeros(numel)
    own = torch.Generator().manual_seed(seed)
    for param in params:
        shared = torch.Generator().manual_seed(crc32(f"{param.name} {seed // 100}".encode()))
        view = flat[places[param.name] :][: param.numel]
        view.normal_(0, scale, generator=shared if param.replicated else own)
    return flat


def _model_tree(views: OrderedDict[str, torch.Tensor], num_layers: int, tp: int, tp_rank: int) -> dict[str, object]:
    args = argparse.Namespace(**arguments(num_layers, tp), params_dtype=torch.bfloat16)
    args.rank = tp_rank
    return {
        "args": args, "checkpoint_version": 3.0, "iteration": ITERATION, "model": views,
        "optimizer": {"optimizer": {"param_groups": [_group(1.0), _group(0.0)]}},
        "opt_param_scheduler": {
            "max_lr": 1e-5, "lr_warmup_steps": 0, "num_steps": 6400, "lr_decay_style": "cosine", "lr_decay_steps": 64000,
            "min_lr": 1e-6, "start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant", "wd_incr_steps": 64000,
        },
        "rng_state": [_rng(tp_rank)],
        "num_floating_point_operations_so_far": 1e15,
    }  # fmt: skip


def _group(wd_mult: float) -> dict[str, object]:
    return {
        "is_expert_parallel": False, "default_config": True, "wd_mult": wd_mult, "lr_mult": 1.0, "is_decoupled_lr": False,
        "max_lr": 1e-5, "min_lr": 1e-6, "lr": 9e-6, "bias_correction": True, "betas": (0.9, 0.95), "eps": 1e-8,
        "weight_decay": 0.1 * wd_mult, "step": ITERATION,
    }  # fmt: skip


def _rng(tp_rank: int) -> dict[str, object]:
    tracked = {name: torch.get_rng_state() for name in ("data-parallel-rng", "model-parallel-rng")}
    return {
        "random_rng_state": random.Random(tp_rank).getstate(), "np_rng_state": np.random.RandomState(1).get_state(),
        "torch_rng_state": torch.get_rng_state(), "cuda_rng_state": torch.get_rng_state(), "rng_tracker_states": tracked,
    }  # fmt: skip
