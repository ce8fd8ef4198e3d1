"""A run of transformers' own Trainer on a GPU, its steps committed: ``python -m tests.gpu.trainer_job JOB FOLDER``, losses as JSON.

Jobs: ``whole``, ``killed`` (in the middle of its second save) and ``resumed`` (from the newest step). Dropout draws from the GPU's
generator.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
import torch
import transformers

from mcore_rlhf.integrations.transformers_trainer import attach


class Losses(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if "loss" in logs:
            self.seen.append([logs["loss"], float(logs["grad_norm"])])


class Killed(transformers.Trainer):  # type: ignore[misc]
    def _save_scaler(self, output_dir: str) -> None:
        if self.state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)


def main(job: str, folder: str) -> list[list[float]]:
    torch.manual_seed(9 if job == "resumed" else 1)
    torch.use_deterministic_algorithms(True)
    config = transformers.GPT2Config(
        vocab_size=48,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=16,
        resid_pdrop=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    rows = torch.randint(0, 48, (16, 8), generator=torch.Generator().manual_seed(5)).tolist()
    args = transformers.TrainingArguments(
        folder, max_steps=6, save_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1, report_to=[],
        disable_tqdm=True, bf16=True,
    )  # fmt: skip
    losses = Losses()
    trainer = (Killed if job == "killed" else transformers.Trainer)(
        transformers.AutoModelForCausalLM.from_config(config), args, callbacks=[losses],
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        data_collator=lambda rows: {key: torch.tensor([row[key] for row in rows]) for key in rows[0]},
    )  # fmt: skip
    assert trainer.model.device.type == "cuda"
    attach(trainer)
    trainer.train(resume_from_checkpoint="auto")
    return losses.seen


if __name__ == "__main__":
    seen = main(sys.argv[1], sys.argv[2])
    with open(f"{sys.argv[2]}-{sys.argv[1]}.json", "w") as file:
        json.dump(seen, file)
