"""SIGTERM at any one rank: all ranks save, commit and leave after the same step, with exit code 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.manager.run import steps
from tests.distributed import jobs


@pytest.mark.parametrize("victim", [0, 2])
def test_one_rank_is_signalled(pool: WorkerPool, tmp_path: Path, victim: int) -> None:
    results = pool.run(jobs.train_until_signalled, tmp_path, victim, world_size=3, timeout=60)
    assert results == [(4, True)] * 3
    assert [step.step for step in steps.committed(tmp_path)] == [4]
    loaded = pool.run(jobs.load_and_tell, tmp_path, world_size=3, timeout=60)
    assert [result["step"] for result in loaded] == [4, 4, 4]


TRAINER = """
import sys, time, torch
import torch.distributed as dist
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 2), rank=rank, world_size=2)
with CheckpointManager(folder + "/root", torch.nn.Linear(2, 2), options=ManagerOptions(timeout=120)) as manager:
    step = 0
    while not manager.stopping:
        time.sleep(0.01)
        step += 1
        manager.maybe_save(step)
        if step == 1:
            print("training", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("victim", [0, 1])
def test_the_exit_code_is_zero(tmp_path: Path, victim: int, number: signal.Signals) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", TRAINER, str(tmp_path)]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=pipe, stderr=pipe, text=True, env=environment) for rank in (0, 1)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "training\n"
        time.sleep(0.1)
        processes[victim].send_signal(number)
        told = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0], told
    assert not any("Traceback" in text for text in told)
    assert len(steps.committed(tmp_path / "root")) == 1
