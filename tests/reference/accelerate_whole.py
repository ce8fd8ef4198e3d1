"""One rank of accelerate under FSDP with layers that are frozen: its own load, and of what we write, and what ``will-resume`` says.

``python -m tests.reference.accelerate_whole 1|2 SHARDED_STATE_DICT|FULL_STATE_DICT frozen|tied FOLDER`` prints as JSON the losses of a run,
those of new runs that loaded its step (``own``) and what we made of that by other formats, and what was said of it.
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
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Settings, Thing
from mcore_rlhf.verify.checkpoint import verify
from tests.trainers.hf_runs import HALF, STEPS, _batch, _data, model


def run(version: int, kind: str, what: str, save: Path | None = None, resume: Path | None = None) -> list[float]:
    """The losses of a run, or of one that goes on."""
    made: dict[str, Any] = {"fsdp_version": version, "state_dict_type": kind, "cpu_ram_efficient_loading": False}
    plugin = FullyShardedDataParallelPlugin(**made, use_orig_params=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # see accelerate_ranks
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    accelerator.state._shared_state["device"] = torch.device("cpu")  # which the first FSDP compares with cpu:0
    trained = model(1 if resume is None else 9, tie_word_embeddings=what == "tied")
    for name, parameter in trained.named_parameters():
        parameter.requires_grad_(what == "tied" or not ("embed" in name or "layers.0." in name))
    wrapped, optimizer = accelerator.prepare(trained, torch.optim.AdamW(trained.parameters(), lr=1e-2))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1 / (1 + step)))
    if resume is not None:
        accelerator.load_state(str(resume))
    seen = []
    for step in range(0 if resume is None else HALF, STEPS):
        loss = wrapped(**_batch(_data()[2 * step : 2 * step + 2])).loss
        accelerator.backward(loss)
        for one in (optimizer, schedule):
            one.step()
        optimizer.zero_grad()
        seen.append(loss.item())
        if save is not None and step + 1 == HALF:
            accelerator.save_state(str(save))
    return seen


def main(version: int, kind: str, what: str, folder: Path) -> dict[str, Any]:
    """All of it."""
    step = folder / "run" / "step_2"
    found: dict[str, Any] = {
        "whole": run(version, kind, what, save=step)[HALF:],
        "intact": verify(step, ReadOptions()).intact,
    }
    found["own"] = run(version, kind, what, resume=step)
    for by in ("hf-accelerate", "dcp", "deepspeed"):
        there, back = (step if by == "hf-accelerate" else folder / by), folder / f"from-{by}"
        if there != step:
            convert(step, there, ConvertOptions(to=by, fsync=False, workers=1))
        written = WriteOptions(like=None if there == step else str(step))
        convert(there, back, ConvertOptions(to="hf-accelerate", fsync=False, workers=1, write=written))
        found[by] = run(version, kind, what, resume=back)
    settings = Settings({"distributed_type": "FSDP", "fsdp_config.fsdp_version": version})
    told = {one.thing: one for one in forecast(step, loader_named("accelerate")[0], settings, 1).roles[""]}
    return found | {"said": told[Thing.OPTIMIZER].row.outcome.value, "doubt": told[Thing.OPTIMIZER].why}


if __name__ == "__main__":
    signal.alarm(240)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    _, which, how, of, where = sys.argv
    store = dist.FileStore(str(Path(where) / f"store-{os.getpid()}"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    print(json.dumps(main(int(which), how, of, Path(where))), flush=True)
    os._exit(0)
