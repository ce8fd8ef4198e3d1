"""A run of TRL's ``GRPOTrainer`` on the CPU: ``python -m tests.trainers.trl_job FOLDER [CHECKPOINT]`` prints what each step saw, as JSON.

Nothing of TRL is stubbed: it generates with transformers, rewards, and trains four steps; ``checkpoint-2`` is saved at half of them.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ |= {"ACCELERATE_USE_CPU": "true", "TRL_EXPERIMENTAL_SILENCE": "1"}
warnings.simplefilter("ignore")

import pyarrow  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from tests.trainers.hf_runs import model  # noqa: E402

WORDS = 44
_SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "bos_token": "<bos>"}


def _tokenizer() -> Any:
    words = {f"w{number}": number for number in range(WORDS)} | {
        name: WORDS + at for at, name in enumerate(_SPECIAL.values())
    }
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **_SPECIAL)


def _rewards(completions: list[str], **given: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def main(folder: Path, resume: str | None) -> list[list[float]]:
    """Train; what each step saw: loss, reward, norm of the gradient."""
    torch.set_num_threads(1)
    seen: list[list[float]] = []

    class Watch(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
            if "loss" in logs:
                seen.append([logs["loss"], logs.get("reward", 0.0), float(logs["grad_norm"])])

    started = model(9 if resume else 1, tie_word_embeddings=True)
    started.config._name_or_path = str(folder.parent / "base")  # where the reference is from
    started.config.pad_token_id, started.config.eos_token_id = WORDS, WORDS + 1
    wanted = GRPOConfig(
        output_dir=str(folder), use_cpu=True, per_device_train_batch_size=4, num_generations=4, max_completion_length=6, max_steps=4,
        save_steps=2, learning_rate=1e-3, logging_steps=1, report_to=[], bf16=False, disable_tqdm=True, seed=3,
        **{"beta": 0.0, **json.loads(os.environ.get("OTHERWISE", "{}"))},
    )  # fmt: skip
    if wanted.beta:
        model(5, tie_word_embeddings=True).save_pretrained(folder.parent / "base")
    table = pyarrow.table({"prompt": [f"w{at} w{at + 1} w{at + 2}" for at in range(40)]})
    prompts = Dataset(table, fingerprint="prompts")  # dill 0.4.1 cannot hash what pyarrow 26 has among its types
    trainer = GRPOTrainer(
        model=started, reward_funcs=_rewards, args=wanted, train_dataset=prompts, processing_class=_tokenizer()
    )
    trainer.add_callback(Watch())
    trainer.train(resume_from_checkpoint=resume)
    return seen


if __name__ == "__main__":
    from tests.trainers import trl_job  # by this name datasets can hash its functions

    print(json.dumps(trl_job.main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)))
