"""One rank of a NeMo-RL run: its ``CheckpointManager`` finds, its ``native_checkpoint`` (DTensor v1) saves and loads, as orders say.

Of these two nothing is stubbed. Nothing they import is missing once ``needs.txt`` is installed.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.trainers.lessons import BETAS, DECAY, LEAST, RATE, WARM, WHOLE, Learner, begin, model_of


def _rate(step: int) -> float:
    if step < WARM:
        return step / WARM
    along = (step - WARM) / (WHOLE - WARM)
    return LEAST + (1 - LEAST) * 0.5 * (1 + math.cos(math.pi * along))


class Run(Learner):
    """A policy as NeMo-RL's DTensor worker has it (``nemo_rl/models/policy/workers/dtensor_policy_worker.py``)."""

    def __init__(self, orders: dict[str, Any]) -> None:
        from nemo_rl.utils import native_checkpoint
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.native = native_checkpoint
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
        made: Any = model_of(orders)
        made.name_or_path = made.config._name_or_path = ""
        for layer in made.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(made, mesh=mesh["dp"])
        self.model = made
        self.optimizer = torch.optim.AdamW(made.parameters(), lr=RATE, betas=BETAS, weight_decay=DECAY)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _rate)

    def save(self, path: str, at: int) -> None:
        manager, made = self._manager(path), [""]
        if dist.get_rank() == 0:
            made[0] = str(
                manager.init_tmp_checkpoint(at, {"consumed_samples": 12, "current_step": at, "total_steps": at})
            )
        dist.broadcast_object_list(made, 0)
        self._write(Path(made[0], "policy"))
        dist.barrier()
        if dist.get_rank() == 0:
            manager.begin_finalization(made[0])
            manager.finalize_pending()
        dist.barrier()

    def _write(self, policy: Path) -> None:
        """What its worker writes of the policy."""
        self.native.save_checkpoint(
            self.model, str(policy / "weights"), self.optimizer, self.schedule, str(policy / "optimizer")
        )

    def load(self, path: str) -> None:
        manager = self._manager(path)
        last = manager.get_latest_checkpoint_path()
        assert last is not None, f"{path}: passed over"
        assert manager.load_training_info(last).get("total_steps", 3) == 3  # what is not there begins at 0
        weights, optimizer = manager.get_resume_paths(last)
        self.native.load_checkpoint(self.model, str(weights), self.optimizer, self.schedule, str(optimizer))

    def _manager(self, root: str) -> Any:
        from nemo_rl.utils.checkpoint import CheckpointManager

        return CheckpointManager(
            {
                "enabled": True, "checkpoint_dir": root, "metric_name": None, "higher_is_better": True, "keep_top_k": 3, "save_period": 1,
                "save_optimizer": True, "model_save_format": "torch_save", "save_consolidated": False,
            }
        )  # fmt: skip


if __name__ == "__main__":
    begin(Run)
