"""Two ranks of torchtitan's containers and checkpoint manager, its steps committed: ``torchrun … -m tests.trainers.titan_seam JOB FOLDER``.

Jobs: ``alone`` (torchtitan's own manager), ``whole``, ``killed`` (rank 1, in the middle of the second save), ``fails`` (every save but
that of step 4, on rank 1, and it goes on), ``resumed``,
``resumed-and-signalled`` (SIGTERM at rank 1, in a step that is not to be saved), ``resumed-alone`` (torchtitan's own manager).
Every rank writes what it saw to ``FOLDER-JOB-RANK.json``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

from tests.trainers.absent import stand_in
from tests.trainers.seam_kills import Told
from tests.trainers.titan_jobs import TrainState

stand_in("torch.utils.tensorboard", instead=True)
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402 - after what is empty
from torch.distributed.fsdp import fully_shard  # noqa: E402 - after what is empty
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402 - after what is empty
from torchtitan.components.checkpointer.dcp import CheckpointManager  # noqa: E402 - after what is empty
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig  # noqa: E402 - after what is empty

from mcore_rlhf.integrations.torchtitan_manager import CommittedCheckpointManager  # noqa: E402 - after what is empty

LAST, EVERY = 7, 2


class Trained(TrainState):
    """What torchtitan's ``Trainer`` is for the manager."""

    def should_continue_training(self) -> bool:
        return self.step < LAST


def run(job: str, folder: str) -> list[list[float]]:
    """One job."""
    torch.set_num_threads(1)
    torch.manual_seed(9 if job.startswith("resumed") else 1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4))
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2, "weight_decay": 0.1})
    optimizers = OptimizersContainer.Config(param_groups=[group], implementation="foreach").build(model_parts=[model])
    schedulers = LRSchedulersContainer(optimizers, lambda step: max(0.1, 1 - step / 20))
    samples = torch.Generator().manual_seed(5)
    loader = StatefulDataLoader(list(range(64)), batch_size=4, shuffle=True, generator=samples)
    state = Trained()
    manager: Any = CheckpointManager if job.endswith("alone") else CommittedCheckpointManager
    more = {"on_error": "continue"} if job == "fails" else {}
    config = manager.Config(enable=True, interval=EVERY, keep_latest_k=2, last_save_model_only=False, **more)
    checkpointer = config.build(
        dataloader=loader, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers, states={"train_state": state},
        sd_adapter=None, base_folder=folder,
    )  # fmt: skip
    if job in ("killed", "fails"):
        _disturb(checkpointer, job)
    checkpointer.load(step=-1)
    seen, batches = Told(), iter(loader)
    while state.should_continue_training():
        state.step += 1
        batch = next(batches)
        torch.manual_seed(
            100 * state.step + dist.get_rank()
        )  # torchtitan keeps no RNG states: its dropout is the run's own affair
        loss = model(torch.nn.functional.one_hot(batch % 8, 8).float() + torch.rand(4, 8)).square().sum()
        loss.backward()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        if job.endswith("signalled") and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        seen.append([loss.item(), schedulers.schedulers[0].get_last_lr()[0], *batch.tolist()])
        checkpointer.save(state.step, last_step=state.step == LAST)
    checkpointer.close()
    return seen


def _disturb(checkpointer: Any, job: str) -> None:
    """As a process dies that has written its part and not said so; or as its disk is full but for a while."""
    saved = checkpointer.dcp_save

    def disturbed(*args: Any, **named: Any) -> Any:
        result = saved(*args, **named)
        if dist.get_rank() == 1 and ".step-4.partial-" in named["checkpoint_id"] and job == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if dist.get_rank() == 1 and ".step-4." not in named["checkpoint_id"] and job == "fails":
            raise OSError(28, "No space left on device")
        return result

    checkpointer.dcp_save = disturbed


if __name__ == "__main__":
    dist.init_process_group("gloo")
    losses = run(sys.argv[1], sys.argv[2])
    with open(f"{sys.argv[2]}-{sys.argv[1]}-{dist.get_rank()}.json", "w") as file:
        json.dump(losses, file)
    dist.destroy_process_group()
