"""verl's own ``RayPPOTrainer``, as far as it saves and loads, with our commit, and its FSDP checkpoint manager behind it; one process.

``python -m tests.trainers.verl_seam JOB FOLDER RESULT``. The trainer's loop needs Ray's workers and a rollout engine: so its object is made
without its ``__init__``, and the worker group is the manager itself. What ``ray_trainer`` imports besides, and saving does not use, are
empty modules.
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

from tests.trainers.absent import stand_in
from tests.trainers.seam_kills import Told

stand_in("cachetools", "transfer_queue", "vllm", "fastapi", "uvicorn", "aiohttp")


class Group:
    """What verl's worker group does, by its checkpoint manager, in this process."""

    def __init__(self, run: Any, trainer: Any, killed_at: int | None) -> None:
        self.run, self.trainer, self.killed_at = run, trainer, killed_at

    def save_checkpoint(self, path: str, remote: str | None, step: int, max_ckpt_to_keep: int | None) -> None:
        self.run.manager.save_checkpoint(path, global_step=step, max_ckpt_to_keep=max_ckpt_to_keep)
        if step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def load_checkpoint(self, path: str, del_local_after_load: bool) -> None:
        self.run.load(path)


def trainer_of(folder: str, **settings: object) -> Any:
    from omegaconf import OmegaConf
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.trainer.ppo import ray_trainer  # type: ignore[import-not-found]

    made = object.__new__(ray_trainer.RayPPOTrainer)
    checkpoint = {"async_save": settings.pop("async_save", False)}
    base = {
        "default_local_dir": folder, "default_hdfs_dir": None, "resume_mode": "auto", "resume_from_path": None,
        "del_local_ckpt_after_load": False, "max_actor_ckpt_to_keep": 2, "max_critic_ckpt_to_keep": None,
    }  # fmt: skip
    content = {
        "trainer": {**base, **settings},
        "actor_rollout_ref": {"actor": {"checkpoint": checkpoint}},
        "critic": {},
    }
    made.config, made.use_critic, made.global_steps = OmegaConf.create(content), False, 0
    OmegaConf.set_struct(made.config, True)  # as Hydra gives it
    made.train_dataloader = StatefulDataLoader(list(range(100)), batch_size=4)
    return made


def main(job: str, folder: str, result: Path) -> None:
    from tests.trainers.verl_job import Run

    if job == "of another save":
        from verl.experimental.fully_async_policy import fully_async_trainer  # type: ignore[import-not-found]

        raise AssertionError(f"{fully_async_trainer} saves past us")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = Run({"model": "qwen2", "seed": 1, "tied": False, "strategy": "fsdp2"})
    refused = {"async_save": True, "default_hdfs_dir": "hdfs://a", "del_local_ckpt_after_load": True}
    trainer = trainer_of(folder, **refused if job == "refused" else {})
    trainer.actor_rollout_wg = Group(run, trainer, 4 if job == "killed" else None)
    torch.manual_seed(7)
    trainer._load_checkpoint()
    batches, seen = iter(trainer.train_dataloader), Told()
    while trainer.global_steps < 6:
        words = next(batches)
        trainer.global_steps += 1
        seen.append([trainer.global_steps, run.step(trainer.global_steps)["loss"], words.tolist()])
        if trainer.global_steps % 2 == 0:
            trainer._save_checkpoint()
    result.write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
