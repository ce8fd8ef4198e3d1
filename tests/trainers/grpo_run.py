"""A run of TRL's own GRPOTrainer on the CPU, in a process of its own: ``python -m tests.trainers.grpo_run JOB FOLDER``, losses as JSON.

Jobs: ``alone`` (without us), ``whole``, ``killed`` (in the middle of its second save), ``resumed`` (from the newest step), and
``resumed-alone`` (from the same folder, by TRL itself).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "ACCELERATE_USE_CPU": "true",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import GRPOConfig, GRPOTrainer

from mcore_rlhf.integrations.transformers_trainer import attach

WORDS = [*"abcdefghijklmnopqrstuvwxyz", "<pad>", "<eos>"]
STEPS, EVERY = 8, 3
"""Samples are generated for four updates, and saved is at the third: in the middle of what was generated."""


def tokenizer() -> Any:
    """One letter, one token."""
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def reward(completions: list[str], **more: Any) -> list[float]:
    """Vowels are good."""
    return [sum(letter in "aeiou" for letter in text) / (len(text) or 1) for text in completions]


class Losses(transformers.TrainerCallback):
    """What every step logged."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if "loss" in logs:
            self.seen.append([logs["loss"], logs["grad_norm"]])


def trainer(folder: Path, seed: int) -> tuple[Any, Losses]:
    """A Qwen2 of one layer, with weights of its own for every seed."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "eos_token_id": len(WORDS) - 1, "pad_token_id": len(WORDS) - 2, "bos_token_id": None,
    }  # fmt: skip
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    args = GRPOConfig(
        str(folder), use_cpu=True, bf16=False, per_device_train_batch_size=4, num_generations=4, steps_per_generation=4,
        max_completion_length=6, max_steps=STEPS, save_steps=EVERY, logging_steps=1, learning_rate=1e-2, report_to=[], seed=3,
        disable_tqdm=True, beta=0.0, dataloader_pin_memory=False, gradient_checkpointing=False,
    )  # fmt: skip
    prompts = Dataset.from_list(
        [{"prompt": word} for word in ("ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "qr", "st")]
    )
    losses = Losses()
    made = GRPOTrainer(
        model, reward, args=args, train_dataset=prompts, processing_class=tokenizer(), callbacks=[losses]
    )
    return made, losses


def main(job: str, folder: Path) -> list[list[float]]:
    """One job."""
    resumed = job.startswith("resumed")
    made, losses = trainer(folder, 9 if resumed else 1)
    if job not in ("alone", "resumed-alone"):
        attach(made)
    if job == "killed":
        saved = type(made)._save_rng_state

        def killing(self: Any, output_dir: str) -> None:
            if self.state.global_step > EVERY:
                os.kill(os.getpid(), signal.SIGKILL)
            saved(self, output_dir)

        type(made)._save_rng_state = killing
    made.train(resume_from_checkpoint=True if resumed else None)
    return losses.seen


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))
