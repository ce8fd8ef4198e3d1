"""The workers end with their pool, and with them whatever a job started; between two jobs, they let go of what a job left behind."""

from __future__ import annotations

import multiprocessing
import os
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist

from mcore_rlhf.demo.workers import WorkerPool

from .conftest import PRELOAD


def keep_a_manager() -> int:
    """As ``megatron.core.dist_checkpointing.strategies.filesystem_async.get_write_results_queue`` does (0.16.1 to 0.19.2)."""
    manager = multiprocessing.get_context("spawn").Manager()
    dist.barrier()
    globals()["kept"] = manager
    (child,) = multiprocessing.active_children()
    assert child.pid is not None
    return child.pid


class _RaisesAlways:
    """As pydantic's ``MockValSer`` does for every attribute."""

    __slots__ = ("__weakref__", "kept")

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


def leave_groups_behind() -> int:
    """On a parameter that is held by the hook of its gradient, as DeepSpeed and Megatron do; says how many threads there were before."""
    before = len(os.listdir("/proc/self/task"))
    parameter = torch.nn.Parameter(torch.ones(2))
    vars(parameter)["process_group"] = dist.new_group()
    gathered = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    gathered.register_hook(lambda *_: parameter.grad)
    vars(parameter)["gathered"] = gathered
    globals()["odd"] = [_RaisesAlways(), weakref.proxy(_RaisesAlways())]
    dist.barrier()
    return before


def _runs(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    try:
        return "State:\tZ" not in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_a_job_leaves_behind_ends_with_it_or_with_the_pool() -> None:
    """Threads of groups wake a hundred times a second each, and a resident pool does a thousand jobs."""
    with WorkerPool(2, preload=PRELOAD) as pool:
        threads = [pool.run(leave_groups_behind) for _ in range(4)]
        assert threads[1] == threads[2] == threads[3]
        children = pool.run(keep_a_manager)
        assert all(map(_runs, children))
    deadline = time.monotonic() + 20
    while any(map(_runs, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, children))
