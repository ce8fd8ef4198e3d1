"""Processes that end badly, and what they leave to the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mcore_rlhf.errors import StorageError
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.manager import CheckpointManager
from tests.crash.scenes import QUIET

HOLDER = """
import os, sys, time, torch
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
manager = CheckpointManager(sys.argv[1], torch.nn.Linear(3, 2), options=ManagerOptions(catch_signals=False))
manager.save(1, blocking=True)
child = os.fork()   # a data loader's worker
if child == 0:
    time.sleep(60)
print(child, flush=True)
time.sleep(60)
"""


def test_a_forked_child_that_outlives_the_trainer_does_not_hold_the_root(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        with pytest.raises(StorageError, match=f"process {process.pid} on"):
            CheckpointManager(tmp_path, torch.nn.Linear(3, 2), options=QUIET)
        process.kill()
        process.wait(20)
        os.kill(child, 0)  # it lives
        with CheckpointManager(tmp_path, torch.nn.Linear(3, 2), options=QUIET) as manager:
            assert manager.load() is not None
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()
        process.stdout.close()
        process.wait(20)


FORGETFUL = """
import sys, time, torch
from mcore_rlhf.manager.run import write as writer
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
real = writer.RankWriter.write
def slow(self, files):
    time.sleep(0.5)
    return real(self, files)
writer.RankWriter.write = slow
manager = CheckpointManager(sys.argv[1], torch.nn.Linear(300, 200), options=ManagerOptions(catch_signals=False))
manager.save(1)
if len(sys.argv) > 2:
    raise RuntimeError("the training loop has a bug")
"""


@pytest.mark.parametrize(
    "crash", [[], pytest.param(["crash"], marks=pytest.mark.slow)], ids=["forgets close", "raises"]
)
def test_a_process_that_ends_without_close(tmp_path: Path, crash: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORGETFUL, str(tmp_path), *crash],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == len(crash), done.stderr
    assert "the process ends without CheckpointManager.close()" in done.stderr
    assert [step.step for step in steps.committed(tmp_path)] == [1]
