"""A small Qwen2 whose engine is DeepSpeed, under accelerate or transformers' own Trainer, on the CPU.

``torchrun … -m tests.reference.zero_runs accelerate|transformers|adapter STAGE FOLDER [STEP]`` trains from the first step, and saves one,
or goes on from that which is named; rank 0 leaves in FOLDER what it saw. All ranks have the same batches, so that losses do not depend on
how many they are. ``adapter`` is the Trainer's of peft's. On a machine without a GPU accelerate takes no DeepSpeed: see
:mod:`.accelerate_zero`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin

from tests.reference.accelerate_zero import on_the_cpu  # sets the environment, too
from tests.trainers import hf_runs

SAVED, LAST = 3, 5


def settings(stage: int, world: int) -> dict[str, Any]:
    """What DeepSpeed is told."""
    return {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": stage == 3},
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "train_batch_size": 2 * world,
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip


def accelerated(stage: int, folder: Path, resume: str | None) -> list[Any]:
    """A loop of one's own: loss, learning rates and a random number of each step."""
    world = int(os.environ["WORLD_SIZE"])
    made = hf_runs.model(9 if resume else 1, tie_word_embeddings=False)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings(stage, world)))
    adam = torch.optim.AdamW(hf_runs._groups(made), lr=1e-2, betas=(0.9, 0.95))
    falling = torch.optim.lr_scheduler.LambdaLR(
        adam, lambda tick: 1 / (1 + tick / world)
    )  # which counts once for every rank
    loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, _, schedule = accelerator.prepare(made, adam, loader, falling)
    random.seed(5)
    torch.manual_seed(5 if resume is None else 500)
    if resume is not None:
        accelerator.load_state(resume)
    seen = []
    for step in range(1 if resume is None else SAVED + 1, LAST + 1):
        loss = model(**hf_runs._batch(hf_runs._data()[2 * step : 2 * step + 2])).loss
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        seen.append([step, loss.item(), schedule.get_last_lr(), torch.rand(()).item()])
        if resume is None and step == SAVED:
            accelerator.save_state(str(folder / f"step_{SAVED}"))
    accelerator.wait_for_everyone()
    return seen


def trained(stage: int, folder: Path, resume: str | None, *, adapted: bool = False) -> list[Any]:
    """The Trainer's: loss, learning rate and norm of the gradient of each step."""
    seen, seed = [], 9 if resume else 1

    class Watch(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            if "loss" in logs:
                seen.append([state.global_step, logs["loss"], logs["learning_rate"], float(logs["grad_norm"])])

    made = hf_runs.adapted(seed) if adapted else hf_runs.model(seed, tie_word_embeddings=False)
    adam = {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    }
    wanted = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=LAST, save_steps=SAVED, learning_rate=1e-2, adam_beta2=0.95,
        weight_decay=0.01, lr_scheduler_type="cosine", warmup_steps=1, logging_steps=1, report_to=[], seed=3, data_seed=3,
        disable_tqdm=True, dataloader_pin_memory=False, ddp_backend="gloo",
        deepspeed={**settings(stage, int(os.environ["WORLD_SIZE"])), "train_batch_size": "auto", "optimizer": adam},
    )  # fmt: skip
    rows = [hf_runs._data()[0]] * 16  # whichever rank takes which
    trainer = transformers.Trainer(
        model=made, args=wanted, train_dataset=rows, data_collator=hf_runs._batch, callbacks=[Watch()]
    )
    trainer.train(resume_from_checkpoint=resume)
    return seen


if __name__ == "__main__":
    signal.alarm(150)  # a rank that hangs outlives whoever waits for it
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    how, given, folder, *resume = sys.argv[1:]
    on_the_cpu()
    told = {"accelerate": accelerated, "transformers": trained, "adapter": partial(trained, adapted=True)}[how](
        int(given), Path(folder), next(iter(resume), None)
    )
    if os.environ["RANK"] == "0":
        Path(folder, "seen.json").write_text(json.dumps(told))
    os._exit(0)  # gloo's groups wait for one another where ranks end at different moments
