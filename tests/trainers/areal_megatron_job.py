"""One rank of an AReaL run on Megatron: saves and loads by AReaL's own ``MegatronCheckpointManager``, as a list of orders says.

``python -m tests.trainers.areal_megatron_job ORDERS RANK``, with AReaL 1.0.4 on the path. ``save_checkpoint`` and ``load_checkpoint`` are
AReaL's and not stubbed, on its own CPU platform. Model, DDP, optimizer and schedule are megatron-core's own, on the stand-ins for a GPU of
:mod:`mcore_rlhf.demo`; AReaL makes them by mbridge, with a GPU's kernels, and steps its schedule once an update, as here.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from typing import Any

from mcore_rlhf.demo.trainer import DemoTrainer

# isort: split
import torch

from mcore_rlhf.demo.configs import Parallel, Training
from tests.reference.dist_jobs import write_in_this_process
from tests.trainers.areal_job import imported
from tests.trainers.lessons import Step, begin
from tests.trainers.verl_megatron_job import by_steps, model_of


class Run:
    """The actor of a run."""

    def __init__(self, orders: dict[str, Any]) -> None:
        imported()
        from areal.engine.megatron_utils.checkpointer import MegatronCheckpointManager

        training = Training(seed=orders["seed"])
        self.trainer = DemoTrainer(model_of(orders), Parallel(**orders["parallel"]), training)
        self.trainer.training = replace(training, seed=1)  # whatever the first weights are, the batches are the same
        write_in_this_process()
        self.manager = MegatronCheckpointManager(
            self.trainer.chunks, self.trainer.optimizer, self.trainer.scheduler,
            use_checkpoint_opt_param_scheduler=orders.get("schedule", True),
        )  # fmt: skip

    def step(self, number: int) -> Step:
        self.trainer.iteration = number - 1
        with by_steps(self.trainer.scheduler):
            loss = self.trainer.train_step()
        return {
            "loss": loss,
            "lr": [group["lr"] for group in self.trainer.optimizer.param_groups],
            "drawn": torch.rand(1).item(),
        }

    def save(self, path: str, at: int) -> None:
        self.manager.save_checkpoint(path)
        for one in multiprocessing.active_children():  # who gathers what was written outlives its rank
            one.terminate()

    def load(self, path: str) -> None:
        self.manager.load_checkpoint(path)


if __name__ == "__main__":
    begin(Run)
