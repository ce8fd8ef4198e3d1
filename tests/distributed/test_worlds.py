"""Actor and critic live in worlds of their own, and still save in one commit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.manager.run import steps
from tests.distributed import world_jobs


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
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    results = run(pool, world_jobs.load_together, tmp_path)
    assert [(result["step"], result["seed"]) for result in results] == [(1, [1])] * 3


@pytest.mark.parametrize("victim", ["actor 0", "actor 1", "critic 0"])
def test_what_fails_in_one_world_fails_in_all(pool: WorkerPool, tmp_path: Path, victim: str) -> None:
    for failed, after in run(pool, world_jobs.one_rank_fails, tmp_path, victim):
        assert failed[0], "no rank may think that it was saved"
        assert after == ("", "")
    assert [step.step for step in steps.committed(tmp_path / "root")] == [1, 3]
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
