"""Small runs whose steps are mirrored: model, optimizer, data, RLHF state; also in processes of their own, which can be killed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_rlhf.engines.plain import TorchEngine
from mcore_rlhf.manager.rlhf.controls import AdaptiveKL
from mcore_rlhf.manager.rlhf.sampler import PromptSampler
from mcore_rlhf.manager.rlhf.state import RlhfState
from mcore_rlhf.manager.run import mirror as mirroring
from mcore_rlhf.manager.run import mirror_hosts
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
from mcore_rlhf.manager.run.options import Mirror
from mcore_rlhf.manager.run.world import World
from tests.distributed.sharded_engine import ShardedEngine


class MirroredRun:
    """Training that draws, so that a state which was not restored shows."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(torch.nn.Linear(60, 60), torch.nn.Dropout(0.5), torch.nn.Linear(60, 3))
        self.critic = torch.nn.Linear(50, 50)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state = RlhfState(algorithm="grpo", kl=AdaptiveKL(0.2, 6.0, 1000))
        self.sampler = PromptSampler(100, seed=3, batch_size=4)

    def step(self) -> float:
        batch = self.sampler.next_batch()
        loss = self.model(torch.randn(4, 60)).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.sampler.acknowledge_all(batch)
        self.state.kl["actor"].update(loss.item(), 4)
        return loss.item() + batch[0].prompt_id

    def manager(self, root: Path, mirror: Mirror | str, **more: Any) -> CheckpointManager:
        options = ManagerOptions(**{"catch_signals": False, "fsync": False, "mirror": mirror, **more})
        roles = {"actor": TorchEngine(self.model, self.optimizer), "critic": TorchEngine(self.critic)}
        return CheckpointManager(root, roles, data=self.sampler, state=self.state, options=options)


def save_there(root: str, mirror: str, environment: Mapping[str, str], last: int) -> None:
    """Train, save every step and wait for the mirror; the server's address stands in the environment."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    run = MirroredRun()
    with run.manager(Path(root), mirror) as manager:
        for step in range(1, last + 1):
            run.step()
            manager.save(step, blocking=True)
        manager.wait_for_mirror()


def train_on_a_host(rank: int, folder: str, meeting: str, mirror: str, environment: Mapping[str, str]) -> None:
    """One of two hosts, each of one rank, which share a root: resume, or save a step, and wait for the mirror."""
    os.environ.update(environment)
    mirroring.PATIENCE_S, mirror_hosts._LOOK_S, mirror_hosts._DEAD_S = 0.5, 0.1, 3.0
    World.host = property(lambda self: f"node-{self.rank}")  # type: ignore[assignment, method-assign]
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    roles = {role: ShardedEngine(rank, 2) for role in ("actor", "critic", "reward")}
    where = Mirror(mirror, store={"access_key_id": f"node-{rank}"})
    options = ManagerOptions(catch_signals=False, fsync=False, mirror=where)
    with CheckpointManager(Path(folder, "root"), roles, options=options) as manager:  # type: ignore[arg-type]
        if manager.load("auto") is None:
            manager.save(1, blocking=True)
        still = manager.wait_for_mirror(60)
        Path(folder, f"waiting-{rank}").write_text(str(still))
