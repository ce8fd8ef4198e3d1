"""NeMo-RL's own ``CheckpointManager`` with our commit: ``python -m tests.trainers.nemo_seam JOB FOLDER RESULT``.

What its algorithms do with it is done here by hand, in their order (``grpo.py``, 7ea279a): the newest step is asked for, each save begins
with ``init_tmp_checkpoint``, files are written, and a thread gives the step its name.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from mcore_rlhf.integrations import nemo_rl
from tests.trainers.nemo_replay_job import Absent, without_init
from tests.trainers.seam_kills import Told

LAST = 6


def main(job: str, folder: str, result: Path) -> None:
    without_init()
    sys.meta_path.insert(0, Absent())
    nemo_rl.use()
    nemo_rl.use()  # once more changes nothing
    from nemo_rl.utils.checkpoint import CheckpointManager

    config = {
        "checkpoint_dir": folder, "metric_name": "val:reward", "higher_is_better": True, "keep_top_k": 2, "save_period": 1,
        "save_optimizer": True,
    }  # fmt: skip
    with CheckpointManager(config) as manager:
        found = manager.get_latest_checkpoint_path()
        info = manager.load_training_info(found) or {"total_steps": 0}
        seen, told, done = [found and Path(found).name], Told(), info["total_steps"]
        values = torch.load(f"{found}/policy/weights/model.pt")["w"] if found else torch.zeros(1000)
        for step in range(done + 1, LAST + 1 if job in ("alone", "kills") else done + 4):
            manager.finalize_pending()
            aside = Path(manager.init_tmp_checkpoint(step, {"total_steps": step, "val:reward": 1 / step}))
            weights = aside / "policy" / "weights"
            weights.mkdir(parents=True)
            values = torch.sin(values) + step
            told.append([step, values.sum().item()])
            torch.save({"w": values}, weights / "model.pt")
            if job == "killed" and step == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            torch.save(torch.arange(step), aside / "train_dataloader.pt")
            manager.begin_finalization(aside)
        manager.finalize_pending()
        again = manager.get_latest_checkpoint_path()
        seen.append(again and Path(again).name)
    result.write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
