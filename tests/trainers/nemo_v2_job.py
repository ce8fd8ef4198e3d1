"""One rank of a NeMo-RL run on DTensor v2: its own ``AutomodelCheckpointManager``, and nemo_automodel behind it, save and load.

Of these nothing is stubbed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.trainers import nemo_job
from tests.trainers.lessons import begin


class Run(nemo_job.Run):
    """As the worker has it (``nemo_rl/models/policy/workers/dtensor_policy_worker_v2.py``)."""

    def _write(self, policy: Path) -> None:
        (policy / "weights").mkdir(parents=True, exist_ok=True)
        wanted: Any = {
            "enabled": True,
            "checkpoint_dir": str(policy.parents[1]),
            "model_save_format": "safetensors",
            "save_consolidated": False,
        }
        self._automodels().save_checkpoint(
            self.model, str(policy / "weights"), self.optimizer, str(policy / "optimizer"), self.schedule,
            checkpointing_cfg=wanted,
        )  # fmt: skip

    def load(self, path: str) -> None:
        manager = self._manager(path)
        last = manager.get_latest_checkpoint_path()
        assert last is not None, f"{path}: passed over"
        assert manager.load_training_info(last)["total_steps"] == 3
        weights, optimizer = manager.get_resume_paths(last)
        self._automodels().load_checkpoint(self.model, str(weights), self.optimizer, str(optimizer), self.schedule)

    def _automodels(self) -> Any:
        """What the worker makes once."""
        from nemo_rl.models.automodel.checkpoint import AutomodelCheckpointManager
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
        found = AutomodelCheckpointManager(mesh["dp"], mesh["tp"])
        found.init_checkpointer()
        return found


if __name__ == "__main__":
    begin(Run)
