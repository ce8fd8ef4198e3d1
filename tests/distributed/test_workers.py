"""The workers end with their pool, and with them whatever a job started: Megatron's writers leave a manager process behind."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

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


def _runs(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    try:
        return "State:\tZ" not in status.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_a_job_started_ends_with_the_pool() -> None:
    with WorkerPool(2, preload=PRELOAD) as pool:
        children = pool.run(keep_a_manager)
        assert all(map(_runs, children))
    deadline = time.monotonic() + 20
    while any(map(_runs, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, children))
