"""Lightning's own ``Trainer``, its checkpoints committed: ``python -m tests.trainers.lightning_seam JOB FOLDER RESULT``.

Jobs: ``alone`` (Lightning's own files), ``whole``, ``killed`` (in the middle of the save of step 6), ``failed`` (the disk is full at step
6, and it goes on), ``resumed``, ``last`` (from ``last.ckpt``), ``export`` (from step 10, which is saved under another name), ``STEP`` (from
that step), ``signalled`` (by SLURM, before step 6; killed in the middle of that save) and ``requeued``. With ``torchrun``'s variables it
is DDP. What every step saw, and what was said, is written as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torchdata.stateful_dataloader import StatefulDataLoader

from mcore_rlhf.integrations.lightning_io import CommittedCheckpointIO, StepOptions
from mcore_rlhf.manager.run.retention import KeepBest, KeepLast, Retention
from tests.trainers.seam_kills import Told

LAST, EVERY, EPOCH = 10, 2, 4


class Model(LightningModule):
    """A small one, whose batches and dropout are the step's own: Lightning keeps no random states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
        self.seen: list[list[float]] = Told()
        self.signalled_at = 0

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        step = self.global_step + 1
        if step == self.signalled_at:
            os.kill(os.getpid(), signal.SIGUSR1)
        torch.manual_seed(100 * step + self.global_rank)
        loss: torch.Tensor = self.layers(torch.randn(4, 8) + batch.float().mean()).square().mean()
        self.log("loss", loss)
        rate = self.lr_schedulers().get_last_lr()[0]
        self.seen.append([step, loss.item(), rate, *batch.tolist()])
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def disturbed(job: str) -> None:
    """Have Lightning's own saving be killed, or fail, when it has written its file."""
    own = TorchCheckpointIO.save_checkpoint

    def save(self: Any, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        own(self, checkpoint, path, storage_options)
        if (checkpoint["global_step"] == 6 and job == "killed") or "hpc_ckpt_" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)
        if checkpoint["global_step"] == 6:
            raise OSError(28, "No space left on device")

    TorchCheckpointIO.save_checkpoint = save


def options(job: str) -> StepOptions:
    if job == "best":
        return StepOptions(keep=Retention([KeepLast(1), KeepBest("loss", "min")]))
    return StepOptions(on_error="continue" if job == "failed" else "raise")


def main(job: str, folder: str, result: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcore_rlhf").addHandler(handler)
    # what is resumed has other weights before
    torch.manual_seed(1 if job not in ("resumed", "last", "requeued") and not job.isdecimal() else 9)
    if job in ("killed", "failed", "signalled"):
        disturbed(job)
    callback = ModelCheckpoint(
        folder, every_n_train_steps=EVERY, monitor="loss" if job == "best" else None,
        save_top_k=1 if job in ("failed", "top") else -1, save_last=job in ("whole", "last"),
    )  # fmt: skip
    path: str | None = None if job in ("alone", "requeued") else folder
    of_slurm = [SLURMEnvironment(auto_requeue=True)] if SLURMEnvironment.detect() else []
    if job in ("last", "export") or job.isdecimal():
        step = LAST if job == "export" else job
        path = str(next(Path(folder).glob("last.ckpt" if job == "last" else f"*step={step}.ckpt")))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", max_steps=LAST, callbacks=[callback],
        plugins=[] if job == "alone" else [CommittedCheckpointIO(options(job)), *of_slurm], default_root_dir=folder,
        logger=False, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    model = Model()
    model.signalled_at = 6 if job == "signalled" else 0
    # with torch's own loader Lightning begins the epoch's batches anew
    trainer.fit(model, StatefulDataLoader(list(range(EPOCH * 3)), batch_size=3), ckpt_path=path)
    if job == "export":
        trainer.save_checkpoint(f"{folder}/export-step={LAST}.ckpt")
    rank = f"-{trainer.global_rank}" if world > 1 else ""
    result.with_name(f"{result.stem}{rank}.json").write_text(json.dumps({"seen": model.seen, "said": said}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
