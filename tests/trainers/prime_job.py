"""One rank of a prime-rl run: its own ``CheckpointManager`` and ``AppState`` save and load, as orders say.

What they import besides, configurations and the optimizers that offload, are empty modules here; the orchestrator's file beside is written
as its ``CheckpointManager.save`` does.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.trainers.absent import stand_in
from tests.trainers.lessons import BETAS, DECAY, RATE, WHOLE, Learner, begin, model_of

stand_in("wandb")
stand_in("prime_rl.configs", "prime_rl.trainer.optim", "prime_rl.trainer.optimizers", instead=True)


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

    def save(self, path: str, at: int) -> None:
        self.progress.step, self.progress.total_tokens, self.progress.total_samples = at, 100 * at, 6 * at
        self._manager(path).save(at, self.model, [self.optimizer], self.schedule, self.progress)
        beside = Path(path, "checkpoints", f"step_{at}", "orchestrator")
        beside.mkdir()
        torch.save({"progress": {"step": at}, "train_source": {"envs": {}}}, beside / "progress.pt")

    def load(self, path: str) -> None:
        from prime_rl.utils.pathing import resolve_latest_ckpt_step  # type: ignore[import-not-found]

        manager = self._manager(path)
        step = resolve_latest_ckpt_step(manager.ckpt_dir)
        assert step is not None, f"{path}: passed over"
        manager.load(step, self.model, [self.optimizer], self.schedule, self.progress)
        assert (self.progress.step, self.progress.total_tokens, self.progress.total_samples) == (3, 300, 18)

    def _manager(self, root: str) -> Any:
        return self.ckpt.CheckpointManager(
            Path(root), SimpleNamespace(skip_optimizer=False, keep_last=None, keep_interval=None)
        )


if __name__ == "__main__":
    begin(Run)
