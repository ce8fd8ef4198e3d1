"""Two ranks of transformers' Trainer whose steps are committed, by accelerate's DDP; ``torchrun … -m tests.reference.seam_ranks``.

Rank 0 prints as JSON the losses of a run alone, of a committed one, and of one that went on from the newest intact step, whose rank 1 was
the only one to see an error in between.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import transformers

from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.integrations.transformers_trainer import StepOptions
from mcore_rlhf.manager.run.options import Event
from tests.reference.seam_worker import ALONE, train
from tests.trainers import hf_runs

ARGUMENTS = {"ddp_backend": "gloo"}


def main(folder: Path) -> dict[str, Any]:
    """All of it."""
    arguments, rank = ARGUMENTS, int(os.environ["RANK"])
    found: dict[str, Any] = {"alone": train(folder / "alone", 1, options=ALONE, **arguments)}
    found["whole"] = train(folder / "run", 1, **arguments)
    if rank == 0:
        with (folder / "run" / "checkpoint-5" / "trainer_state.json").open("ab") as file:
            file.write(b" ")
    saved = transformers.Trainer._save_rng_state

    def failing(self: Any, output_dir: str) -> None:
        saved(self, output_dir)
        if rank == 1 and self.state.global_step == 5:
            raise OSError(5, "Input/output error")

    transformers.Trainer._save_rng_state = failing
    found["resumed"] = train(folder / "run", 9, "auto", StepOptions(on_error="continue"), **arguments)
    try:
        train(folder / "failed", 1, **arguments)
        found["error"] = ""
    except (CheckpointError, OSError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    transformers.Trainer._save_rng_state = saved
    found |= on_a_full_disk(folder / "full", rank, arguments)
    return found


def on_a_full_disk(folder: Path, rank: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a run saw whose rank 0 cannot write its weights at step 4, behind which Trainer has a barrier for all ranks."""
    made, written = transformers.Trainer.__init__, transformers.Trainer._save

    def evaluated(self: Any, *args: Any, **named: Any) -> None:
        made(self, *args, **named, eval_dataset=hf_runs._data())

    def full(self: Any, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if rank == 0 and self.state.global_step == 4:
            raise OSError(28, "No space left on device")
        written(self, output_dir, state_dict)

    plain: Any = transformers.Trainer
    plain.__init__, plain._save = evaluated, full
    events: list[Event] = []
    options = StepOptions(on_error="continue", timeout=60.0, on_event=events.append)
    best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
    seen = train(folder, 1, options=options, **best, **arguments)
    return {"full": seen, "said": [event.text for event in events if event.kind == "failed"]}


if __name__ == "__main__":
    told = main(Path(sys.argv[1]))
    Path(sys.argv[1], f"seen-{os.environ['RANK']}.json").write_text(json.dumps(told))
