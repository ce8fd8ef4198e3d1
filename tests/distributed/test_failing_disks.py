"""A disk that refuses on one rank: all ranks hear of it, at the next call; nothing is lost, and the next save works."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from pathlib import Path

import pytest

from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.root import RootLock
from tests.distributed import jobs


def hidden(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if name.startswith(".") and name != ".mcore_rlhf.lock")


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES], ids=["ENOSPC", "EIO", "EACCES"])
def test_in_the_background(pool: WorkerPool, tmp_path: Path, victim: int, number: int) -> None:
    results = pool.run(jobs.fail_in_the_background, tmp_path, victim, number, 1, world_size=3, timeout=60)
    for rank, (save, wait, again, saved) in enumerate(results):
        assert save == ("", ""), "the save itself returns before anything is written"
        assert wait[0] == "StorageError", f"rank {rank}: {wait}"
        assert os.strerror(number) in wait[1]
        assert ".global_step_2.partial-" in wait[1]
        assert again == saved == ("", ""), "an error is raised once, and the next save works"
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("times", [2, 10**9], ids=["passing", "for good"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_disk_that_fails_one_rank_under_the_newest_step(
    pool: WorkerPool, tmp_path: Path, victim: int, times: int
) -> None:
    """All ranks stop, or none does; none goes on from the step before."""
    for told, right in pool.run(jobs.load_from_a_failing_disk, tmp_path, victim, times, world_size=2, timeout=60):
        assert right, told
        assert told[0] == ("" if times == 2 else "Unreadable"), told
        assert times == 2 or (os.strerror(errno.EIO) in told[1] and "global_step_2/actor" in told[1])


@pytest.mark.parametrize(("victim", "call", "limit"), [(1, "pwrite", 5.0), (0, "pwrite", 7.0), (0, "mkdir", 2.0)])
def test_a_disk_that_hangs(pool: WorkerPool, tmp_path: Path, victim: int, call: str, limit: float) -> None:
    """The ranks do not lose each other over it: all hear of it in time, and when the disk answers, the next save is well.

    The time-out is 2 s. Behind training the rank that commits is waited for twice as long, since it may wait itself; before it, half.
    """
    for (first, second, third), took in pool.run(jobs.hang, tmp_path, victim, call, world_size=2, timeout=90):
        assert first[0] in ("Incomplete", "StorageError"), first
        assert second[0] == "StorageError", second
        assert "has not ended: the file system may hang" in second[1] or "has not answered" in second[1]
        assert f"rank {victim} on " in second[1]
        assert max(took) < limit, took
        assert third == ("", ""), third
    assert hidden(tmp_path) == []
    assert [step.step for step in steps.committed(tmp_path)] == [1, 4]


def test_a_disk_that_hangs_after_the_commit_is_waited_for_aloud(pool: WorkerPool, tmp_path: Path) -> None:
    """The step is there: that is no failed save, however long it takes."""
    for told, said in pool.run(jobs.hang_after_the_commit, tmp_path, 4.0, world_size=2, timeout=60):
        assert told == ("", "")
        assert any(str(tmp_path) in text for text in said), said
    assert [step.step for step in steps.committed(tmp_path)] == [1]


@pytest.mark.parametrize("at", ["save", "wait", "close", "load"])
def test_the_next_call_raises(pool: WorkerPool, tmp_path: Path, at: str) -> None:
    for kind, text in pool.run(jobs.fail_until_close, tmp_path, at, world_size=2, timeout=60):
        assert kind == "StorageError"
        assert os.strerror(errno.EIO) in text
    assert steps.committed(tmp_path) == []


def test_a_full_disk(pool: WorkerPool, small_disk: Path) -> None:
    """The real thing: room for one of the two files."""
    for full, after in pool.run(jobs.fill_the_disk, small_disk, 300_000, world_size=3, timeout=60):
        assert full[0] == "StorageError"
        assert "No space left" in full[1]
        assert "Free some space" in full[1]
        assert after == ("", "")
    assert hidden(small_disk) == []


def test_a_read_only_root(pool: WorkerPool, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, timeout=20)
    for kind, text in pool.run(jobs.start, small_disk, world_size=2, timeout=30):
        assert kind == "StorageError"
        assert str(small_disk) in text
        assert "ead-only" in text


def test_another_run_on_the_root(pool: WorkerPool, tmp_path: Path) -> None:
    lock = RootLock(tmp_path)
    try:
        for kind, text in pool.run(jobs.start, tmp_path, world_size=3, timeout=30):
            assert kind == "StorageError"
            assert f"another run saves here: process {os.getpid()} on {socket.gethostname()}" in text
    finally:
        lock.release()
    assert pool.run(jobs.start, tmp_path, world_size=3, timeout=30) == [("", "")] * 3


def test_a_root_that_is_a_file(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "root").write_text("not a folder")
    for kind, text in pool.run(jobs.start, tmp_path / "root", world_size=2, timeout=30):
        assert kind == "StorageError"
        assert str(tmp_path / "root") in text
