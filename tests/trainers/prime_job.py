"""One rank of a prime-rl run: its own ``CheckpointManager`` and ``AppState`` save and load, as orders say.

What they import besides, configurations and the optimizers that offload, are empty modules here. So are those of the orchestrator's,
whose own ``CheckpointManager``, ``TrainSource`` and curriculum save and load its file, on rank 0.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.trainers.absent import stand_in
from tests.trainers.lessons import BETAS, DECAY, RATE, WHOLE, Learner, Step, begin, model_of

stand_in("wandb", "verifiers", "msgspec")
stand_in(
    "prime_rl.configs",
    "prime_rl.trainer.optim",
    "prime_rl.trainer.optimizers",
    "prime_rl.orchestrator.envs",
    "prime_rl.orchestrator.utils",
    "prime_rl.transports",
    "prime_rl.utils.client",
    instead=True,
)


class Run(Learner):
    """A policy as prime-rl's trainer has it (``src/prime_rl/trainer/rl/train.py``)."""

    def __init__(self, orders: dict[str, Any]) -> None:
        from prime_rl.trainer import ckpt  # type: ignore[import-not-found]
        from torch.distributed.fsdp import fully_shard

        self.ckpt, made = ckpt, model_of(orders)
        for layer in made.model.layers:  # type: ignore[attr-defined]
            fully_shard(layer)
        fully_shard(made)
        self.model = made
        self.optimizer = torch.optim.AdamW(made.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, WHOLE)
        self.progress = ckpt.Progress()
        self.orchestrator, self.source = _orchestrator()

    def step(self, number: int) -> Step:
        return {**super().step(number), "task": self.source.next_task(step=number).task.key}

    def save(self, path: str, at: int) -> None:
        self.progress.step, self.progress.total_tokens, self.progress.total_samples = at, 100 * at, 6 * at
        self._manager(path).save(at, self.model, [self.optimizer], self.schedule, self.progress)
        if dist.get_rank() == 0:
            self.orchestrator.progress.total_problems, self.orchestrator.progress.step = 2 * at, at + 1
            self.orchestrator.manager(path).save(self.orchestrator.progress, self.source, at)
        dist.barrier()

    def load(self, path: str) -> None:
        from prime_rl.utils.pathing import resolve_latest_ckpt_step  # type: ignore[import-not-found]

        manager = self._manager(path)
        step = resolve_latest_ckpt_step(manager.ckpt_dir)
        assert step is not None, f"{path}: passed over"
        manager.load(step, self.model, [self.optimizer], self.schedule, self.progress)
        assert self.progress.step == 3, self.progress
        self.orchestrator.manager(path).load(self.orchestrator.progress, self.source, step)
        assert self.orchestrator.progress.total_problems in (2, 6)

    def _manager(self, root: str) -> Any:
        return self.ckpt.CheckpointManager(
            Path(root), SimpleNamespace(skip_optimizer=False, keep_last=None, keep_interval=None)
        )


def _orchestrator() -> tuple[Any, Any]:
    """The orchestrator's progress and checkpoint manager, and where it takes tasks from: one environment of five."""
    configs: Any = import_module("prime_rl.configs.orchestrator")
    configs.CurriculumConfig = lambda: SimpleNamespace(sampler=configs.StandardSamplerConfig(), gates={})
    from prime_rl.orchestrator import ckpt, train_source, types  # type: ignore[import-not-found]

    tasks = [SimpleNamespace(key=key) for key in range(5)]
    env = SimpleNamespace(name="gsm", tasks=tasks, num_tasks=5, config=SimpleNamespace(curriculum=None, ratio=1))
    made = SimpleNamespace(
        progress=types.Progress(),
        manager=lambda root: ckpt.CheckpointManager(Path(root), SimpleNamespace(skip_progress=False)),
    )
    return made, train_source.TrainSource([env])


if __name__ == "__main__":
    begin(Run)
