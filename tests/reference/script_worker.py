"""One rank of a script of Megatron-LM on the CPU, with the drop-in or without: ``python script_worker.py JOB.json RANK``.

The script, what it trains, and how it saves and loads are Megatron's own. Stand-ins beyond those of the demonstration are named functions
here; the losses and gradient norms that Megatron would log are written down in full.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import dataloader

from tests.reference import dist_jobs, rollout_stubs


def main(job: dict[str, Any], rank: int) -> None:
    """Run a job.

    Args:
        job: ``script`` and its ``args``; ``world``, ``port``; ``out``, where to write what was seen; ``install``, the drop-in's arguments,
            or none; ``kill``, the iteration behind which every rank ends itself.
        rank: This process's.
    """
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["world"], "MASTER_PORT": job["port"]}
    os.environ.update({name: str(value) for name, value in where.items()}, MASTER_ADDR="127.0.0.1")
    os.environ.update(job.get("environment", {}), SCRIPT_OUT=f"{job['out']}.{rank}")
    from mcore_rlhf.demo import cpu_megatron

    cpu_megatron.import_megatron()
    keep_random_numbers_from_loaders()
    if job.get("rollouts"):
        rollout_stubs.stand_in_for_packages()
    from megatron.training import initialize, training

    dist_jobs.write_in_this_process()
    training.initialize_megatron = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    initialize._compile_dependencies = lambda: None
    training.training_log = observed(training.training_log, job, rank)
    if job.get("rollouts"):
        rollout_stubs.stand_in_for_packed_attention()
        rollout_stubs.stand_in_for_engine()
    if job.get("install") is not None:
        from mcore_rlhf.integrations import megatron_lm

        megatron_lm.install(**job["install"])
    sys.argv = [job["script"], *job["args"]]
    runpy.run_path(job["script"], run_name="__main__")


def keep_random_numbers_from_loaders() -> None:
    """Let a new iterator of a data loader draw its seed without moving the generator: on a GPU dropout has another one."""
    create = dataloader._BaseDataLoaderIter.__init__

    def created(self: Any, *args: Any, **named: Any) -> None:
        state = torch.get_rng_state()
        create(self, *args, **named)
        torch.set_rng_state(state)

    dataloader._BaseDataLoaderIter.__init__ = created  # type: ignore[method-assign]


def observed(log: Callable[..., Any], job: dict[str, Any], rank: int) -> Callable[..., Any]:
    """Megatron's ``training_log``, which is called behind every iteration, and what is seen then."""
    seen: dict[int, list[float]] = {}

    @functools.wraps(log)
    def training_log(*args: Any, **named: Any) -> Any:
        given = inspect.signature(log).bind(*args, **named).arguments
        losses = [float(value.flatten()[0]) for value in given["loss_dict"].values()]
        seen[given["iteration"]] = [*losses, float(given["grad_norm"])]
        Path(f"{job['out']}.{rank}").write_text(json.dumps(seen))
        if job.get("kill") == given["iteration"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return log(*args, **named)

    return training_log


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
