"""No deadlock: a rank that does not come, dies or raises is named on the others, in time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcore_rlhf.demo import workers
from mcore_rlhf.demo.workers import WorkerError, WorkerPool
from mcore_rlhf.manager.run import steps
from tests.distributed import jobs
from tests.unit.manager.roots import make_step


@pytest.mark.parametrize(("call", "absent"), [("save", 0), ("save", 1), ("load", 1), ("wait", 1), ("maybe_save", 1)])
def test_a_rank_that_does_not_come(pool: WorkerPool, tmp_path: Path, call: str, absent: int) -> None:
    results = pool.run(jobs.one_does_not_save, tmp_path, absent, call, world_size=3, timeout=90)
    for rank, ((kind, text), in_time) in enumerate(results):
        assert in_time, "the rank was waited for longer than the time-out"
        if rank != absent:
            assert kind == "Incomplete", text
            assert f"rank {rank} on " in text
            assert "Look at the logs" in text
            if call in ("save", "load"):
                assert {"save": "save step 1", "load": "load"}[call] in text
                assert f"without rank {absent}\n" in text, "every rank names who is missing"


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_makes_no_manager(pool: WorkerPool, tmp_path: Path, absent: int) -> None:
    for rank, (kind, text) in enumerate(
        pool.run(jobs.one_makes_no_manager, tmp_path, absent, world_size=3, timeout=60)
    ):
        assert kind == "Incomplete", text
        assert f"rank {rank} on " in text
        assert rank == absent or f"did not come within 3 s: without rank {absent}\n" in text


@pytest.fixture
def survivors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool lets ranks that live speak before it ends them, on a busy machine too."""
    monkeypatch.setattr(workers, "_GRACE", 60.0)


@pytest.mark.usefixtures("survivors")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_in_the_background(pool: WorkerPool, tmp_path: Path, victim: int) -> None:
    with pytest.raises(WorkerError) as failure:
        pool.run(jobs.one_dies_in_the_background, tmp_path, victim, world_size=3, timeout=30)
    assert failure.value.rank == victim, str(failure.value)
    assert [step.step for step in steps.committed(tmp_path)] == [1]
    told = pool.run(jobs.values_of, tmp_path, world_size=3, timeout=30)
    assert [step for step, _ in told] == [1, 1, 1], "the next start goes on from the step before"
    assert [name for name in os.listdir(tmp_path) if ".partial-" in name or ".lock-" in name] == []


@pytest.mark.usefixtures("survivors")
def test_the_survivors_say_who_died(pool: WorkerPool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError):
        pool.run(jobs.one_dies_in_the_background, tmp_path, 1, world_size=3, timeout=30)
    told = {rank: (tmp_path / f"told-{rank}").read_text() for rank in (0, 2)}
    assert "rank 00001 did not deliver its part" in told[0]


@pytest.mark.usefixtures("survivors")
def test_a_dead_rank_is_waited_for_once_however_often_it_is_tried(pool: WorkerPool, tmp_path: Path) -> None:
    """Else the ranks that live would say that their own disk hangs, as they are still waiting."""
    with pytest.raises(WorkerError):
        pool.run(jobs.one_dies_in_the_background, tmp_path, 1, 5, world_size=3, timeout=30)
    told = {rank: (tmp_path / f"told-{rank}").read_text() for rank in (0, 2)}
    assert "rank 00001 did not deliver its part" in told[0]
    assert "the file system may hang" not in told[0] + told[2]


@pytest.mark.parametrize("kind", ["own", "runtime", "local"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("where", ["live", "prepare_load"])
def test_an_engine_that_raises(pool: WorkerPool, tmp_path: Path, where: str, victim: int, kind: str) -> None:
    results = pool.run(jobs.engine_raises, tmp_path, where, victim, kind, world_size=3, timeout=40)
    for rank, (told, sound) in enumerate(results):
        assert told[0][0] == {"own": "CheckpointError", "runtime": "RuntimeError", "local": "LocalError"}[kind] or (
            rank != victim and told[0][0] == "CheckpointError"
        )
        assert "cause" in told[0][1]
        if rank != victim:
            assert f"rank {victim}" in told[0][1]
        assert told[1:] == [("", ""), ("", "")], "the next save and load work"
        assert sound, "what failed changed nothing, and what was loaded is right"


def test_all_ranks_refuse_to_save_among_the_steps_of_another_run(pool: WorkerPool, tmp_path: Path) -> None:
    make_step(tmp_path, 1)
    for first, again, asked in pool.run(jobs.save_among_others, tmp_path, world_size=2, timeout=40):
        for kind, text in (first, again):
            assert kind == "UsageError"
            assert "holds committed steps that this run has neither loaded nor written (1)" in text
        assert asked == ("", "")
    assert [step.step for step in steps.committed(tmp_path)] == [1, 2]


def test_ranks_that_save_different_steps(pool: WorkerPool, tmp_path: Path) -> None:
    for different, after in pool.run(jobs.different_steps, tmp_path, world_size=2, timeout=40):
        assert different[0] == "UsageError"
        assert "step 5" in different[1]
        assert "step 6" in different[1]
        assert after == ("", "")
    assert [step.step for step in steps.committed(tmp_path)] == [7]
