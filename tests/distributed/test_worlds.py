"""Actor and critic live in worlds of their own, and still save in one commit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.manager.run import steps
from tests.distributed import world_jobs
from tests.helpers.damage import flip_a_bit


def run(pool: WorkerPool, job: object, folder: Path, *args: object) -> list[object]:
    return pool.run(job, folder, *args, world_size=3, timeout=60)  # type: ignore[arg-type]


def hidden(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if name.startswith(".") and name != ".mcore_rlhf.lock")


def test_one_step_of_two_worlds(pool: WorkerPool, tmp_path: Path) -> None:
    after = run(pool, world_jobs.save_together, tmp_path)
    found = steps.committed(tmp_path / "root")
    assert [(step.step, step.roles) for step in found] == [(1, ("actor", "critic")), (2, ("actor", "critic"))]
    assert hidden(tmp_path / "root") == []
    results = run(pool, world_jobs.load_together, tmp_path)
    assert [(result["step"], result["seed"]) for result in results] == [(2, [2])] * 3
    assert [result["rng"] for result in results] == after, (
        "every rank of every world goes on with its own random numbers"
    )
    assert all("random states of every rank" in result["report"] for result in results)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_all_worlds_skip_a_step_that_is_damaged_for_one(pool: WorkerPool, tmp_path: Path, role: str) -> None:
    run(pool, world_jobs.save_together, tmp_path)
    path = tmp_path / "root" / "global_step_2" / role / "moments.pt"
    flip_a_bit(path)
    results = run(pool, world_jobs.load_together, tmp_path)
    assert [(result["step"], result["seed"]) for result in results] == [(1, [1])] * 3


@pytest.mark.parametrize("victim", ["actor 0", "actor 1", "critic 0"])
def test_what_fails_in_one_world_fails_in_all(pool: WorkerPool, tmp_path: Path, victim: str) -> None:
    for failed, after in run(pool, world_jobs.one_rank_fails, tmp_path, victim):
        assert failed[0], "no rank may think that it was saved"
        assert after == ("", "")
    assert [step.step for step in steps.committed(tmp_path / "root")] == [1, 3]
    assert hidden(tmp_path / "root") == []


@pytest.mark.parametrize("victim", ["actor 0", "actor 1", "critic 0"])
def test_what_cannot_begin_in_one_world_is_not_waited_for_in_the_others(
    pool: WorkerPool, tmp_path: Path, victim: str
) -> None:
    for (failed, seconds), (after, _) in run(pool, world_jobs.one_rank_cannot_begin, tmp_path, victim):
        assert "division by zero" in failed[1], failed
        assert seconds < 20, "of the sixty that a part is waited for"
        assert after == ("", "")
    assert [step.step for step in steps.committed(tmp_path / "root")] == [1, 3]
    assert hidden(tmp_path / "root") == []


@pytest.mark.parametrize("victim", ["actor 1", "critic 0"])
def test_what_went_in_waves_in_one_world_comes_again_in_all(pool: WorkerPool, tmp_path: Path, victim: str) -> None:
    """Twice in a row is once too often: then all say so, and the next save is well."""
    for told in run(pool, world_jobs.come_again, tmp_path, victim, 48 << 20):
        assert [bool(kind) for kind, _ in told] == [False, False, False, True, False]
    assert [step.step for step in steps.committed(tmp_path / "root")] == [1, 5]
    assert hidden(tmp_path / "root") == []


@pytest.mark.parametrize("absent", ["actor", "critic"])
def test_a_world_that_does_not_save(pool: WorkerPool, tmp_path: Path, absent: str) -> None:
    names = [name for name, size in world_jobs.SIZES.items() for _ in range(size)]
    for name, (kind, text) in zip(names, run(pool, world_jobs.one_world_does_not_save, tmp_path, absent), strict=True):
        assert kind == ("" if name == absent else "Incomplete"), text
        if name == "actor" != absent:
            assert "critic-00000 did not deliver" in text
        elif name != absent:
            assert "did not start the save" in text
    assert steps.committed(tmp_path / "root") == []


def test_without_an_identity(pool: WorkerPool, tmp_path: Path) -> None:
    for kind, text in run(pool, world_jobs.without_an_identity, tmp_path):
        assert kind == "UsageError"
        assert "the same transaction id" in text


@pytest.mark.parametrize("lazy", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_all_worlds_of_a_host_share_its_memory(pool: WorkerPool, tmp_path: Path, lazy: bool) -> None:
    """An eighth of what they copy; by what the kernel says that their processes grew together."""
    whole, eighth = 3 * 96_000_000, 36_000_000
    results = run(pool, world_jobs.save_through_one_pool, tmp_path, eighth, lazy)
    assert all(saved for _, _, saved in results)
    assert [held for _, held, _ in results] == [0] * 3, "another world may need it before the next save"
    grown = sum(grown for grown, _, _ in results)
    assert 0 < grown < eighth + 3 * 6_000_000, "buffers of files besides"
    assert whole > 3 * eighth


_DIES = """
import os, sys, threading, time
from pathlib import Path
import torch
from mcore_rlhf.engines.plain import TorchEngine
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
from mcore_rlhf.manager.run.world import Worlds
root, name, limit = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.manual_seed(1)
live = TorchEngine(torch.nn.ParameterDict({f"w{i}": torch.nn.Parameter(torch.rand(1 << 20)) for i in range(16)}))
options = ManagerOptions(worlds=Worlds(name, {"actor": 1, "critic": 1}), max_host_memory=limit, timeout=5.0, on_error="continue",
                         fsync=False, catch_signals=False)
with CheckpointManager(root, {name: live}, options=options) as manager:
    manager.reserve()
    print("here", flush=True)
    for step in map(int, sys.stdin):
        manager.save(step, transaction=f"step {step}")
        try:
            manager.wait()
        finally:
            print(step, manager._saver.unsaved is None, flush=True)
"""


class _World:
    def __init__(self, root: Path, name: str, limit: int) -> None:
        command = [sys.executable, "-c", _DIES, str(root), name, str(limit)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def save(self, step: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"%d\n" % step)
        self.process.stdin.flush()

    def said(self) -> bytes:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        with suppress(BrokenPipeError):
            self.process.communicate()


@pytest.mark.slow
def test_a_world_that_is_killed_while_it_saves_holds_no_memory(tmp_path: Path, seed: int) -> None:
    """It is killed at any moment; the other one loses that step only, and the next with a new one in its place."""
    root, limit, chance = tmp_path / "root", 24 << 20, random.Random(seed)
    worlds = {name: _World(root, name, limit) for name in ("actor", "critic")}
    try:
        assert [world.said() for world in worlds.values()] == [b"here"] * 2
        for step in (1, 2):
            for world in worlds.values():
                world.save(step)
            time.sleep(0.1 * chance.random())
            worlds["critic"].end()
            assert worlds["actor"].said().startswith(b"%d " % step)
            worlds["critic"] = _World(root, "critic", limit)
            assert worlds["critic"].said() == b"here"
        for world in worlds.values():
            world.save(3)
        assert worlds["actor"].said() == b"3 True"
    finally:
        for world in worlds.values():
            world.end()
