"""One rank of open-instruct's GRPO: its ``PolicyTrainerRayProcess`` makes the engine, saves and resumes, as a list of orders says.

``from_pretrained`` and ``save_checkpoint_state`` are its own, with DeepSpeed's engine, its configuration and its param groups
(``open_instruct/utils.py``). What rolls out, grades and reads data is an empty module here, as is Ray, without which the class is an
ordinary one; the model is handed in, since there is none to download, and GPUs, which it names, are not there. It is in fp32: its own
``bf16`` is switched off, so that losses can be held against other trainers'.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.trainers.absent import stand_in
from tests.trainers.lessons import (
    BATCH,
    BETAS,
    DECAY,
    LEAST,
    RATE,
    WARM,
    WHOLE,
    Step,
    begin,
    loss_of,
    model_of,
    seen_of,
)
from tests.trainers.openrlhf_job import told_by_a_launcher

stand_in("vllm", "olmo_core", "beaker", "wandb", "backoff", "tiktoken", "docker", "openenv")
stand_in(
    *(
        f"open_instruct.{name}"
        for name in (
            "data_loader", "grpo_utils", "data_types", "rubrics", "grpo_fast_resource_plan", "model_utils", "vllm_utils",
            "actor_manager", "dataset_transformation", "environments", "ground_truth_utils", "rl_utils",
        )
    ),
    instead=True,
)  # fmt: skip
stand_in("ray", instead=True)
for _name in ("actor", "util.queue"):  # annotations name what is in them
    import_module(f"ray.{_name}")
vars(import_module("ray"))["remote"] = lambda *given, **_: given[0] if given else lambda made: made
vars(import_module("backoff"))["on_exception"] = lambda *_, **__: lambda made: made
COUNTERS = {"episode": 24, "num_total_tokens": 1000}


class Cpu(str):
    """A local rank by which a device is named, and to which a seed is added."""

    def __radd__(self, seed: int) -> int:
        return seed + dist.get_rank()


class Run:
    """A policy of GRPO's."""

    def __init__(self, orders: dict[str, Any]) -> None:
        from open_instruct import grpo_fast  # type: ignore[import-not-found]

        told_by_a_launcher()
        torch.cuda.set_device = torch.cuda.synchronize = lambda *given: None
        made, configured, bf16 = model_of(orders), grpo_fast.get_train_ds_config, orders.get("bf16", False)
        made.gradient_checkpointing_enable = lambda: None  # type: ignore[method-assign]
        grpo_fast.get_train_ds_config = lambda **named: configured(**{**named, "bf16": bf16})
        grpo_fast.AutoModelForCausalLM = SimpleNamespace(
            from_pretrained=lambda *_, **__: made.bfloat16() if bf16 else made
        )
        at_least, scheduled = (
            {"min_lr_rate": LEAST},
            grpo_fast.get_scheduler,
        )  # the schedule that all trainers are given
        grpo_fast.get_scheduler = lambda *kind, **named: scheduled(*kind, **named, scheduler_specific_kwargs=at_least)
        grpo_fast.UlyssesSPAttentionHF = SimpleNamespace(register_with_transformers=lambda **_: None)
        self.policy = policy = grpo_fast.PolicyTrainerRayProcess.__new__(grpo_fast.PolicyTrainerRayProcess)
        policy.rank, policy.local_rank = dist.get_rank(), Cpu("cpu")
        policy.world_size = policy.dp_world_size = dist.get_world_size()
        self.given = {
            "deepspeed_stage": orders.get("stage", 2), "deepspeed_offload_param": False, "deepspeed_offload_optimizer": False,
            "deepspeed_zpg": 1, "deepspeed_checkpoint_load_universal": False, "max_grad_norm": None, "sequence_parallel_size": 1,
            "per_device_train_batch_size": BATCH // dist.get_world_size(), "set_weight_decay_on_bias_and_norm": True,
            "weight_decay": DECAY, "learning_rate": RATE, "fused_optimizer": False, "lr_scheduler_type": "cosine_with_min_lr",
            "num_training_steps": WHOLE, "num_epochs": 1, "num_mini_batches": 1, "warmup_ratio": WARM / WHOLE, "seed": orders["seed"],
            "backend_timeout": 5, "load_ref_policy": False, "keep_last_n_checkpoints": -1, "gs_checkpoint_state_dir": None,
            "output_dir": "",
        }  # fmt: skip
        self.done = self._made(None)["optimization_steps_done"]
        assert self.done == 0
        for group in self.engine.optimizer.param_groups:  # all trainers' here; its own are torch's
            group["betas"] = BETAS

    def _made(self, root: str | None) -> Any:
        """What its own ``from_pretrained`` makes; with the folder that it resumes from, if there is one."""
        given = SimpleNamespace(**self.given, checkpoint_state_dir=root)
        described = SimpleNamespace(model_name_or_path="", model_revision=None, attn_implementation=None)
        data = SimpleNamespace(build_dataloader=lambda **_: [])
        self.policy.streaming_config = data
        found = self.policy.from_pretrained(given, described, None, "", SimpleNamespace(pad_token_id=0))
        self.engine = self.policy.model
        return found

    def step(self, number: int) -> Step:
        loss = loss_of(self.engine, number)
        self.engine.backward(loss)
        self.engine.step()
        return seen_of(loss, self.engine.get_lr())

    def save(self, path: str, at: int) -> None:
        state = {"training_step": at, **COUNTERS}
        state |= {"dataloader_state": {"training_step": at, "current_epoch": 0}}
        state["data_prep_actor_state"] = {
            "training_step": at + 1,
            "last_consumed_step": at - 1,
            "iter_dataloader_state": {"epoch": 1},
        }
        Path(path).mkdir(parents=True, exist_ok=True)
        self.policy.save_checkpoint_state(path, state)

    def load(self, path: str) -> None:
        found = self._made(path)
        assert found["optimization_steps_done"] == 3, found["optimization_steps_done"]


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    begin(Run)
