"""Make ``named`` and ``numbered`` anew: ``torchrun --nproc-per-node 2 make.py FOLDER``, with torch_checkpointing 0.1.1 beside torch.

The package gathers metadata on a GPU and writes past the page cache: here it is told to do neither.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_checkpointing as v2
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_checkpointing import metadata_manager
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.state_transformations import optimizer_transform_pre
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


class OnTheCpu:
    """torch, but for where tensors are made."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return (lambda *args, device=None, **rest: found(*args, **rest)) if name in ("tensor", "empty", "zeros") else found


metadata_manager.torch = OnTheCpu()
move = torch.Tensor.to
torch.Tensor.to = lambda self, *args, **rest: self if args and str(args[0]) == "cuda" else move(self, *args, **rest)
torch.Tensor.cuda = lambda self: self
folder = sys.argv[1]
dist.init_process_group("gloo")
torch.manual_seed(1)
model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1, bias=False))
model.register_buffer("steps", torch.tensor(3))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
named = list(model.named_parameters())
optimizer = torch.optim.AdamW(
    [
        {"params": [(n, p) for n, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [(n, p) for n, p in named if p.ndim == 1], "weight_decay": 0.0},
    ],
    lr=1e-2,
)
for step in range(3):
    words = torch.arange(6) * (step + 2) % 11
    model(words).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
whole, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
for below, reshards in (("named", True), ("numbered", False)):
    item = v2.ItemSpec(resharder=DefaultResharder() if reshards else None)
    manager = v2.CheckpointManager.Config(
        items={"model": item, "optimizer": item, "train": v2.ItemSpec()},
        save=SyncCheckpointSaverConfig(), storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    ).build()  # fmt: skip
    state = optimizer.state_dict()
    saved = {
        "model": model.state_dict(), "optimizer": optimizer_transform_pre(state) if reshards else state,
        "train": {"step": 3, "tokens": 192},
    }  # fmt: skip
    place = Path(folder, below, "step_3")
    place.mkdir(parents=True, exist_ok=True)
    manager.save(str(place), saved)
if dist.get_rank() == 0:
    torch.save({"model": dict(whole), "states": states["state"]}, f"{folder}/expected.pt")
dist.barrier()
os._exit(0)
