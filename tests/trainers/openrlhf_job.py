"""One rank of an OpenRLHF run: its ``DeepspeedStrategy`` prepares, trains, saves and loads, as a list of orders says.

Of OpenRLHF nothing is stubbed. DeepSpeed's Adam is torch's, since the compiled one is not built here; ``torch.cuda.synchronize``, which
its barriers call, does nothing. flash-attn and a grader of LaTeX, which its modules import at the top, are empty where they are not
installed. DeepSpeed asks MPI for the ranks, and waits for it where there is one, unless a launcher has told it: that is done here.
"""

from __future__ import annotations

import os
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

stand_in("flash_attn", "pylatexenc")
torch.cuda.synchronize = lambda *given: None


class Run:
    """An actor under OpenRLHF's strategy."""

    def __init__(self, orders: dict[str, Any]) -> None:
        import deepspeed
        from openrlhf.utils.deepspeed.deepspeed import DeepspeedStrategy

        world = dist.get_world_size()
        told_by_a_launcher()
        deepspeed.init_distributed("gloo")
        self.strategy = strategy = DeepspeedStrategy(
            max_norm=0.0, micro_train_batch_size=BATCH // world, train_batch_size=BATCH, zero_stage=orders.get("stage", 2),
            args=_arguments(orders.get("dtype", "fp32")),
        )  # fmt: skip
        strategy.world_size, strategy.accumulated_gradient = world, 1  # as setup_distributed does
        _with_torchs_adam(strategy)
        wanted = {
            "optim": "adam", "adam": {"lr": RATE, "betas": BETAS, "eps": 1e-8, "weight_decay": DECAY}, "max_norm": 0.0,
            "lr_scheduler": "cosine_with_min_lr", "scheduler_steps": WHOLE, "lr_warmup_ratio": WARM / WHOLE, "min_lr_ratio": LEAST,
        }  # fmt: skip
        self.engine, _, self.schedule = strategy.prepare((model_of(orders), wanted))

    def step(self, number: int) -> Step:
        loss = loss_of(self.engine, number)
        self.strategy.backward(loss, self.engine, None)
        self.strategy.optimizer_step(None, self.engine, self.schedule)
        return seen_of(loss, self.engine.get_lr())

    def save(self, path: str, at: int) -> None:
        state = {"episode": 0, "global_step": at, "total_consumed_prompts": at * BATCH, "data_loader_state_dict": {}}
        self.strategy.save_ckpt(self.engine, str(Path(path, "_actor")), f"global_step{at}", 3, 1000, state)

    def load(self, path: str) -> None:
        found, states = self.strategy.load_ckpt(self.engine, str(Path(path, "_actor")))
        assert found is not None, f"{path}: passed over"
        # What PPOTrainer.fit takes from it (openrlhf/trainer/ppo_trainer.py): a KeyError where one is not there.
        asked = {"episode", "global_step", "total_consumed_prompts", "data_loader_state_dict"}
        assert asked <= states.keys(), states.keys()


def told_by_a_launcher() -> None:
    """What DeepSpeed looks for, even where the processes have found each other: without it, it asks MPI."""
    rank = str(dist.get_rank())
    os.environ |= {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(dist.get_world_size()), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1",
    }  # fmt: skip


def _arguments(dtype: str) -> SimpleNamespace:
    speed = SimpleNamespace(
        param_dtype=dtype, adam_offload=False, zpg=1, use_universal_ckpt=False, grad_accum_dtype=None, overlap_comm=False,
        deepcompile=False, tensor_parallel_size=1, ring_attn_size=1,
    )  # fmt: skip
    return SimpleNamespace(
        ds=speed, train=SimpleNamespace(dynamic_batch_enable=False), optim="adam", local_rank=dist.get_rank()
    )


def _with_torchs_adam(strategy: Any) -> None:
    configured = strategy.get_ds_train_config

    def config(optim_dict: dict[str, Any], **named: Any) -> Any:
        optim_dict["params"]["torch_adam"] = True
        return configured(optim_dict=optim_dict, **named)

    strategy.get_ds_train_config = config


if __name__ == "__main__":
    begin(Run)
