"""Two ranks of accelerate whose engine is DeepSpeed, ZeRO stage 2; ``torchrun … -m tests.reference.accelerate_zero save|load FOLDER``.

Each rank leaves as JSON what it saw of the steps: the loss, the learning rate, random numbers, and what its script had registered. On a
machine without a GPU accelerate takes no DeepSpeed; it is told that the backend is gloo and the device the CPU, and is its own otherwise.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1")

import accelerate.state as state
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedType
from deepspeed.ops import __compatible_ops__

__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled

HALF, LAST = 3, 5
_ZERO = {
    "zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "train_batch_size": 4,
    "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
}  # fmt: skip


class Seen:
    """Something of the user's own."""

    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, values: dict[str, int]) -> None:
        self.count = values["count"]


def on_the_cpu() -> None:
    """What accelerate asks of a GPU."""
    import torch._dynamo  # which knows torch's functions by their identity, and is imported by the first optimizer

    states: Any = state.PartialState
    states._prepare_backend = lambda self, cpu=False, sagemaker_dp=False, backend=None: (
        "gloo",
        DistributedType.MULTI_GPU,
    )
    states.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    cuda: Any = torch.cuda
    cuda.synchronize = cuda.set_device = cuda.empty_cache = cuda.set_rng_state_all = lambda *_, **__: None
    cuda.current_device = lambda: torch.device("cpu")
    cuda.get_rng_state_all = list


def main(how: str, folder: Path) -> list[Any]:
    """What each step saw, from the first or from behind the one that was saved."""
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=_ZERO))
    torch.manual_seed(1 if how == "save" else 5)
    made: Any = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    adam = torch.optim.AdamW(made.parameters(), lr=1e-2)
    falling = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 / (1 + step))
    data = torch.utils.data.DataLoader(list(range(64)), batch_size=2)  # type: ignore[arg-type]  # says how large a batch is
    model, optimizer, _, schedule = accelerator.prepare(made, adam, data, falling)
    counter, seen, first = Seen(), [], 1
    accelerator.register_for_checkpointing(counter)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7 * accelerator.process_index + (1 if how == "save" else 100))
    if how == "load":
        accelerator.load_state(str(folder / f"step_{HALF}"))
        first = HALF + 1
    for step in range(first, LAST + 1):
        inputs = torch.arange(12.0).view(2, 6).cos() * step + accelerator.process_index
        loss = model(inputs).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        counter.count += 2
        drawn = (random.random(), float(np.random.rand()), torch.rand(()).item())
        seen.append([step, loss.item(), schedule.get_last_lr(), *drawn, counter.count])
        if how == "save" and step == HALF:
            accelerator.save_state(str(folder / f"step_{HALF}"))
    accelerator.wait_for_everyone()
    return seen


if __name__ == "__main__":
    signal.alarm(120)  # a rank that hangs outlives whoever waits for it
    warnings.simplefilter("ignore")
    on_the_cpu()
    told = main(sys.argv[1], Path(sys.argv[2]))
    Path(sys.argv[2], f"{sys.argv[1]}-{os.environ['RANK']}.json").write_text(json.dumps(told))
    os._exit(0)  # gloo's groups wait for one another where ranks end at different moments, with this package or without
