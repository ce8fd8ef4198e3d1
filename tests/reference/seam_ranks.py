"""Two ranks of transformers' Trainer whose steps are committed, by accelerate's DDP or FSDP; ``torchrun … -m tests.reference.seam_ranks``.

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
from tests.reference.seam_worker import ALONE, train

ARGUMENTS: dict[str, dict[str, Any]] = {
    "ddp": {"ddp_backend": "gloo"},
    "fsdp": {
        "ddp_backend": "gloo",
        "fsdp": "full_shard",
        "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", "cpu_ram_efficient_loading": False},
    },
}


def main(how: str, folder: Path) -> dict[str, Any]:
    """All of it."""
    arguments, rank = ARGUMENTS[how], int(os.environ["RANK"])
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
    return found


if __name__ == "__main__":
    told = main(sys.argv[1], Path(sys.argv[2]))
    Path(sys.argv[2], f"seen-{os.environ['RANK']}.json").write_text(json.dumps(told))
