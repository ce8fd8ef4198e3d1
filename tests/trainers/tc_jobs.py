"""Ranks of an FSDP2 run on gloo that save and load by torch_checkpointing itself: ``torchrun … -m tests.trainers.tc_jobs JOB …``.

The package gathers metadata on a GPU and writes past the page cache: here it is told to do neither.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch_checkpointing as v2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_checkpointing import metadata_manager
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.state_transformations import optimizer_transform_post, optimizer_transform_pre
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from mcore_rlhf.dcp.v2 import CommittedStorageConfig

OWN = LocalFileSystemStorageConfig(use_direct_io=False)
BARRIER_S = 5


class OnTheCpu:
    """torch, but for where tensors are made."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return (
            (lambda *args, device=None, **rest: found(*args, **rest)) if name in ("tensor", "empty", "zeros") else found
        )


def on_the_cpu() -> None:
    metadata_manager.torch = OnTheCpu()
    move = torch.Tensor.to
    torch.Tensor.to = lambda self, *args, **rest: self if args and str(args[0]) == "cuda" else move(self, *args, **rest)  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self: self  # type: ignore[method-assign]


def manager(storage: Any, *, reshards: bool = False, saves: str = "sync") -> Any:
    """A ``CheckpointManager`` of the package's."""
    writer = CheckpointWriterConfig(checkpoint_write_barrier_timeout_sec=BARRIER_S)
    staging = CheckpointStagerConfig(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    save = (
        SyncCheckpointSaverConfig(writer_config=writer)
        if saves == "sync"
        else AsyncCheckpointSaverConfig(writer_config=writer, staging_config=staging)
    )
    item = v2.ItemSpec(resharder=DefaultResharder() if reshards else None)
    items = {"model": item, "optimizer": item}
    return v2.CheckpointManager.Config(items=items, save=save, storage_config=storage).build()


class Run:
    """The run of ``tests/goldens/torch_checkpointing``."""

    def __init__(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1, bias=False))
        self.model.register_buffer("steps", torch.tensor(3 if seed == 1 else 0))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        named = list(self.model.named_parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [(n, p) for n, p in named if p.ndim > 1], "weight_decay": 0.1},
                {"params": [(n, p) for n, p in named if p.ndim == 1], "weight_decay": 0.0},
            ],
            lr=1e-2 if seed == 1 else 0.5,
        )
        self.train = {"step": 0, "tokens": 0}

    def steps(self, count: int, first: int = 0) -> list[float]:
        """Train; the losses."""
        losses = []
        for step in range(first, first + count):
            loss = self.model(torch.arange(6) * (step + 2) % 11).pow(2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def state(self, *, named: bool) -> dict[str, Any]:
        """What is saved, or loaded into; of an optimizer that has not stepped, with states that a step of nothing makes."""
        if not self.optimizer.state:
            rates = [group["lr"] for group in self.optimizer.param_groups]
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0
                for parameter in group["params"]:
                    parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad()
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        state = self.optimizer.state_dict()
        return {
            "model": self.model.state_dict(), "optimizer": optimizer_transform_pre(state) if named else state, "train": self.train,
        }  # fmt: skip

    def load(self, by: Any, folder: str, *, named: bool, whole: bool = True) -> None:
        """As the package's tutorial has it; what no resharder knows lies there for as many ranks as wrote it."""
        into = self.state(named=named)
        loaded = by.load(
            folder, into=into if whole else {"model": into["model"], "optimizer": into["optimizer"]}, strict=True
        )
        state = loaded["optimizer"]
        self.optimizer.load_state_dict(optimizer_transform_post(state) if named else state)
        self.train = dict(loaded.get("train", self.train))


def done(answer: object) -> None:
    """Every rank's, one line each, in the order of ranks."""
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            print(json.dumps(answer), flush=True)
    dist.barrier()


def save(root: str, own: str, saves: str) -> None:
    """Save by our storage, and by the package's own; load that of ours into another run, and go on in both."""
    run = Run()
    run.steps(3)
    run.train = {"step": 3, "tokens": 192}
    for reshards in (False, True):
        state = run.state(named=reshards)
        name = "named" if reshards else "numbered"
        ours = manager(CommittedStorageConfig(), reshards=reshards, saves=saves)
        written = ours.save(f"{root}/{name}/step_3", state)
        if written is not None:
            written.result()
        dist.barrier()
        theirs = manager(OWN, reshards=reshards, saves=saves)  # the other process pickles equal texts anew
        if dist.get_rank() == 0:
            Path(own, name).mkdir(parents=True)
        dist.barrier()
        written = theirs.save(f"{own}/{name}/step_3", state)
        if written is not None:
            written.result()
        dist.barrier()
        again = Run(seed=2)
        again.load(ours, f"{root}/{name}/step_3", named=reshards)
        assert again.train == {"step": 3, "tokens": 192}
        ours.close()
        theirs.close()
        if reshards:
            following = again.steps(2, 3)
    done({"losses": run.steps(2, 3), "after": following})


def load(folder: str, named: str, reshards: str = "") -> None:
    """Load what lies there by the package's own storage, and go on."""
    run = Run(seed=2)
    run.load(manager(OWN, reshards=bool(reshards)), folder, named=named == "named", whole=not reshards)
    done({"train": run.train, "losses": run.steps(2, 3), "lr": run.optimizer.param_groups[0]["lr"]})


class Bomb:
    """What happens in the middle of a file."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.how = rank, how

    def __reduce__(self) -> tuple[Any, ...]:
        if dist.get_rank() == self.rank:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("the disk is full")
        return (int, ())


def interrupted(root: str, rank: str, how: str) -> None:
    """One save that goes well, and one in the middle of which a rank is killed, or fails."""
    by, large = manager(CommittedStorageConfig()), torch.ones(1 << 20)
    by.save(f"{root}/step_1", {"model": {"a": large}, "optimizer": {}, "train": {"step": 1}})
    dist.barrier()
    try:
        by.save(f"{root}/step_2", {"model": {"a": large}, "optimizer": {"a": large, "z": Bomb(int(rank), how)}})
    except Exception as error:  # the others' barrier ends, too
        print(type(error).__name__, flush=True)
    os._exit(0)


if __name__ == "__main__":
    on_the_cpu()
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](*sys.argv[2:])
    os._exit(0)
