"""A small training run that saves continuously: everything that a run has, on several ranks, with dropout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

from mcore_rlhf.engines.plain import TorchEngine
from mcore_rlhf.manager.rlhf.controls import AdaptiveKL
from mcore_rlhf.manager.rlhf.sampler import PromptSampler
from mcore_rlhf.manager.rlhf.state import RlhfState
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
from mcore_rlhf.manager.run.retention import KeepLast, Retention
from tests.distributed.sharded_engine import ShardedEngine

NUM_PROMPTS, PER_RANK = 37, 2


class Trainer:
    """Replicas whose gradients are averaged, a critic that is cut over the ranks, a sampler, and a KL controller."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 400), torch.nn.Dropout(0.3), torch.nn.Linear(400, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.9)
        self.critic = ShardedEngine(self.rank, self.size, 12_000)
        self.sampler = PromptSampler(NUM_PROMPTS, seed=11, group_size=2, batch_size=PER_RANK * self.size)
        self.state = RlhfState(algorithm="grpo", kl=AdaptiveKL(0.2, 0.5, 50))
        torch.manual_seed(1000 + self.rank)  # dropout differs from rank to rank

    def manager(self, root: Path, timeout: float) -> CheckpointManager:
        actor = TorchEngine(self.model, self.optimizer, self.scheduler)
        options = ManagerOptions(fsync=False, timeout=timeout, catch_signals=False, keep=Retention((KeepLast(2),)))
        return CheckpointManager(
            root, {"actor": actor, "critic": self.critic}, data=self.sampler, state=self.state, options=options
        )

    def step(self) -> dict[str, object]:
        """One step; what is returned depends on everything that a resume must restore, on every rank."""
        batch = self.sampler.next_batch()
        mine = batch[self.rank :: self.size]
        inputs = torch.stack(
            [torch.randn(64, generator=torch.Generator().manual_seed(p.sample_seeds[0])) for p in mine]
        )
        loss = (self.model(inputs) - inputs).pow(2).mean() * self.state.kl["actor"].value
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.scheduler.step()
        for values in self.critic.values.values():
            values.mul_(0.9).add_(loss.detach())
        self.sampler.acknowledge_all(batch)
        seen: list[object] = [None] * self.size
        mark = float(sum(values.double().sum() for values in self.critic.values.values()))
        dist.all_gather_object(seen, [loss.item().hex(), mark.hex(), torch.rand(1).item().hex()])
        self.state.kl["actor"].update(sum(float.fromhex(rank[0]) for rank in seen), len(batch))  # type: ignore[index]
        self.state.prompts_consumed += len(batch)
        prompts = [[prompt.epoch, prompt.prompt_id] for prompt in batch]
        return {
            "ranks": seen,
            "prompts": prompts,
            "kl": self.state.kl["actor"].value.hex(),
            "n": self.state.prompts_consumed,
        }


def train(root: Path, log: Path, until: int, timeout: float = 20.0) -> int:
    """Resume, and train until a step; every step is saved behind the next one. Returns the step that it began after."""
    trainer = Trainer()
    with trainer.manager(root, timeout) as manager:
        resumed = manager.load()
        start = resumed.step if resumed else 0
        for step in range(start + 1, until + 1):
            line = {"step": step, **trainer.step()}
            if trainer.rank == 0:
                with log.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            manager.save(step)
    return start
