"""Real kills: runs of several processes that save all the time get SIGKILL at random moments, and go on exactly."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from mcore_rlhf.demo.workers import WorkerError, WorkerPool
from mcore_rlhf.manager.run import steps
from tests.crash import training


def lines(log: Path) -> list[str]:
    """What was logged; a line that was cut off by the kill is left out."""
    return log.read_text().split("\n")[:-1] if log.exists() else []


class Killer(threading.Thread):
    """Kills some, then all processes of a pool, at a random moment after a random number of steps."""

    def __init__(self, pids: list[int], log: Path, rng: random.Random) -> None:
        super().__init__(daemon=True)
        self.pids, self.log = rng.sample(pids, len(pids)), log
        # A line is logged before its step is saved: with three there is one that the save of the second has waited for.
        self.steps, self.delay, self.gap = rng.randint(3, 6), 0.08 * rng.random(), rng.choice([0.0, 0.02])

    def run(self) -> None:
        wanted, end = len(lines(self.log)) + self.steps, time.monotonic() + 60
        while len(lines(self.log)) < wanted and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(self.delay)
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            time.sleep(self.gap)


def killed(pool: WorkerPool, folder: Path, size: int, until: int, rng: random.Random) -> None:
    """One run that does not survive."""
    pool.start()
    killer = Killer(pool.pids, folder / "log", rng)
    killer.start()
    with pytest.raises(WorkerError):
        pool.run(training.train, folder / "root", folder / "log", until, world_size=size, timeout=60)
    killer.join(60)


def history(pool: WorkerPool, folder: Path, size: int, kills: int, rng: random.Random) -> None:
    """Kill a run so many times, let it end, and compare every line with a run that was left alone."""
    until = 5 * kills + 3
    pool.run(training.train, folder / "whole", folder / "expected", until, world_size=size, timeout=120)
    expected = lines(folder / "expected")
    assert len(expected) == until
    caught = 0
    for _ in range(kills):
        killed(pool, folder, size, 10**6, rng)
        committed = [step.step for step in steps.committed(folder / "root")]
        assert committed, "a step that was committed is never lost"
        caught += any(".partial-" in name for name in os.listdir(folder / "root"))
        last = json.loads(lines(folder / "log")[-1])["step"]
        assert last - 2 <= committed[-1] <= last, "at most the step in flight and the one being trained are lost"
    pool.run(training.train, folder / "root", folder / "log", until, world_size=size, timeout=120)
    print(
        f"{caught} of {kills} kills came in the middle of a save; {len(lines(folder / 'log')) - until} steps were repeated"
    )
    done: dict[int, set[str]] = {}
    for line in lines(folder / "log"):
        done.setdefault(json.loads(line)["step"], set()).add(line)
    for line in expected:
        assert done[json.loads(line)["step"]] == {line}, "a step after a kill is not what it was without one"
    hidden = [name for name in os.listdir(folder / "root") if name.startswith(".")]
    assert hidden == [".mcore_rlhf.lock"], "what the kills left behind was cleaned up"


@pytest.fixture
def own_pool() -> WorkerPool:
    return WorkerPool(2, preload="tests.distributed.preload")


def test_two_ranks(own_pool: WorkerPool, tmp_path: Path, rng: random.Random) -> None:
    with own_pool as pool:
        history(pool, tmp_path, 2, 3, rng)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_more_ranks(own_pool: WorkerPool, tmp_path: Path, rng: random.Random, size: int) -> None:
    own_pool.size = size
    with own_pool as pool:
        history(pool, tmp_path, size, 10, rng)
