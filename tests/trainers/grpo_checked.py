"""TRL's own GRPOTrainer as ``resume-check`` starts it: ``python -m tests.trainers.grpo_checked alone|attached DIR STEPS METRICS``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import transformers

from mcore_rlhf.integrations.transformers_trainer import attach
from tests.trainers import grpo_run

_REST_S = 0.3
"""A step has to be long enough to be killed after."""


class Lines(transformers.TrainerCallback):
    """Writes what every step logged."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if "loss" in logs:
            with self.path.open("a") as lines:
                print(json.dumps({"step": state.global_step, **logs}), file=lines, flush=True)
            time.sleep(_REST_S)


def main(job: str, folder: Path, steps: int, metrics: Path) -> None:
    """Train, from the newest step where there is one."""
    grpo_run.STEPS, grpo_run.EVERY = steps, 1
    transformers.set_seed(3)
    made, _ = grpo_run.trainer(folder, 1)
    made.add_callback(Lines(metrics))
    if job == "attached":
        attach(made)
        made.train(resume_from_checkpoint="auto")
    else:
        newest = transformers.trainer_utils.get_last_checkpoint(str(folder)) if folder.is_dir() else None
        made.train(resume_from_checkpoint=newest)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
