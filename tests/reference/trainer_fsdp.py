"""One rank of transformers' Trainer under FSDP2 that trains an adapter: its own load, and of what we write of its step.

``python -m tests.reference.trainer_fsdp SHARDED_STATE_DICT|FULL_STATE_DICT FOLDER`` prints as JSON the losses of a run, and of new ones.
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

import accelerate
import torch.distributed as dist
import transformers
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Settings
from mcore_rlhf.verify.checkpoint import verify
from tests.trainers.hf_runs import HALF, adapted, train

_MADE = accelerate.Accelerator.__init__


def _made(self: Any, *args: Any, **given: Any) -> None:
    _MADE(self, *args, **given)
    if (plugin := given.get("fsdp_plugin")) is not None:
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # see accelerate_ranks
        self.state.distributed_type, self.state.fsdp_plugin = DistributedType.FSDP, plugin


def main(kind: str, folder: Path) -> dict[str, Any]:
    """All of it."""
    config = {"version": 2, "state_dict_type": kind, "cpu_ram_efficient_loading": False}
    fsdp: dict[str, Any] = {"fsdp": True, "fsdp_config": config, "ddp_backend": "gloo"}

    def go_on(name: str, step: Path) -> list[Any]:
        return [loss for loss, *_ in train(adapted(9), folder / name, step, **fsdp)]

    whole, step = train(adapted(1), folder / "run", **fsdp)[HALF:], folder / "run" / f"checkpoint-{HALF}"
    found: dict[str, Any] = {"whole": [loss for loss, *_ in whole], "own": go_on("own", step)}
    for by in ("hf-trainer", "dcp", "deepspeed"):
        there, back = (step if by == "hf-trainer" else folder / by), folder / f"from-{by}" / step.name
        if there != step:
            convert(step, there, ConvertOptions(to=by, fsync=False, workers=1))
        written = WriteOptions(like=None if there == step else str(step))
        convert(there, back, ConvertOptions(to="hf-trainer", fsync=False, workers=1, write=written))
        found[by] = go_on(f"after-{by}", back)
    told = forecast(step, loader_named("transformers")[0], Settings(), 1)
    return found | {"intact": verify(step, ReadOptions()).intact, "resumes": told.resumes and not told.doubtful}


if __name__ == "__main__":
    signal.alarm(240)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    _, how, where = sys.argv
    store = dist.FileStore(str(Path(where) / f"store-{os.getpid()}"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    transformers.logging.set_verbosity_error()
    accelerate.Accelerator.__init__ = _made  # type: ignore[method-assign]
    print(json.dumps(main(how, Path(where))), flush=True)
    os._exit(0)
