"""A save that fails or hangs ends no run that says so: it is tried again, or left, and the next one is well on all ranks."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from pathlib import Path

import pytest
import torch

from mcore_rlhf import CheckpointManager, KeepBest, KeepLast, ManagerOptions, Retention
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.options import Event
from tests.distributed import failed_saves
from tests.distributed.test_failing_disks import hidden

NOTHING = ("", "")


def there(root: Path) -> list[int]:
    return [step.step for step in steps.committed(root)]


@pytest.mark.parametrize("victim", [0, 1])
def test_training_goes_on_without_a_step(pool: WorkerPool, tmp_path: Path, victim: int) -> None:
    for rank, told in enumerate(pool.run(failed_saves.fail_for_good, tmp_path, victim, world_size=2, timeout=60)):
        assert told.raised == [NOTHING] * 4
        ((_, step, text),) = [event for event in told.events if event[0] == "failed"]
        assert step == 2
        assert rank != victim or os.strerror(errno.EIO) in text, text
        assert told.noted[0].startswith("step 2 was not saved: "), told.noted
        assert told.noted[1] == "", "step 3 was"
    assert there(tmp_path) == [1, 3]
    assert hidden(tmp_path) == []


@pytest.mark.parametrize(
    ("victim", "call", "where"),
    [(0, "pwrite", ".global_step_2."), (1, "pwrite", ".global_step_2."), (0, "mkdir", ".global_step_2."), (0, "rename", ".global_step_2.")],
)  # fmt: skip
def test_what_failed_once_is_saved(pool: WorkerPool, tmp_path: Path, victim: int, call: str, where: str) -> None:
    for told, right in pool.run(failed_saves.fail_once, tmp_path, victim, call, where, world_size=2, timeout=60):
        assert told.raised == [NOTHING] * 4
        assert right, "the state of then, not of now"
        ((_, step, text),) = [event for event in told.events if event[0] in ("retry", "failed")]
        assert step == 2
        assert text.endswith("tried again in 0.05 s (1 of 2)")
    assert there(tmp_path) == [1, 2, 3]
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("retries", [0, 1])
def test_ranks_that_meet_in_the_groups_of_training_all_come_or_none(
    pool: WorkerPool, tmp_path: Path, retries: int
) -> None:
    """Were one not to come, the others would take what training sends next for its answer."""
    for saved, trained in pool.run(failed_saves.meet_in_training, tmp_path, 1, retries, world_size=2, timeout=60):
        assert trained == [True] * 3
        assert saved == ([2, 3] if retries else [3])
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("victim", [0, 1])
def test_what_went_in_waves_comes_again(pool: WorkerPool, tmp_path: Path, victim: int) -> None:
    """9 MiB of each rank: more than the least that each is left."""
    (first, said), (second, heard) = pool.run(
        failed_saves.come_again, tmp_path, victim, 10 << 20, world_size=2, timeout=90
    )
    assert first == second
    assert len(said) == len(heard) == 1
    assert "at a later step (1 of 2)" in said[0]
    assert there(tmp_path) == [first]
    assert hidden(tmp_path) == []


@pytest.mark.parametrize(("victim", "which"), [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)])
def test_a_rank_that_gets_no_thread(pool: WorkerPool, tmp_path: Path, victim: int, which: int) -> None:
    """A container may have as many processes as it may: that step is lost, and nobody waits for what never began."""
    results = pool.run(failed_saves.get_no_thread, tmp_path, victim, which, world_size=2, timeout=60)
    for rank, told in enumerate(results):
        assert told.raised == [NOTHING] * 4
        ((_, step, text),) = [event for event in told.events if event[0] == "failed"]
        assert step == 2
        assert rank != victim or "the system gives no thread for it" in text, text
    assert there(tmp_path) == [1, 3]
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("victim", [0, 1])
def test_what_fails_every_time_is_an_error(pool: WorkerPool, tmp_path: Path, victim: int) -> None:
    for save, wait, again in pool.run(failed_saves.fail_too_often, tmp_path, victim, world_size=2, timeout=60):
        assert save == again == NOTHING
        assert wait[0] == "StorageError"
        assert os.strerror(errno.EIO) in wait[1]
    assert there(tmp_path) == [2]
    assert hidden(tmp_path) == []


@pytest.mark.parametrize(("victim", "call"), [(0, "pwrite"), (1, "pwrite"), (0, "rename"), (1, "open"), (0, "mkdir")])
def test_what_stands_still_is_left(pool: WorkerPool, tmp_path: Path, victim: int, call: str) -> None:
    """Step 3 is saved while step 2 still hangs, and nothing of that is taken for newer when the disk answers."""
    results = pool.run(failed_saves.stand_still, tmp_path, victim, call, world_size=2, timeout=90)
    for rank, told in enumerate(results):
        assert told.raised == [NOTHING] * 4
        texts = [text for kind, step, text in told.events if (kind, step) == ("failed", 2)]
        assert texts, f"rank {rank}"
        if rank == victim:
            (text,) = texts
            assert ("has not answered" if call == "mkdir" else "of step 2 has made no progress for") in text
            assert f"rank {victim} on {socket.gethostname()}" in text
            assert str(tmp_path) in text
    assert there(tmp_path) == ([1, 2, 3] if call == "rename" else [1, 3]), "a rename that hung is done in the end"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_late_is_met_again(pool: WorkerPool, tmp_path: Path, late: int) -> None:
    for told, failed in pool.run(failed_saves.come_late, tmp_path, late, 3.0, world_size=3, timeout=60):
        assert told == [NOTHING] * 6
        assert len(failed) == 1
        assert "training goes on" in failed[0]
    assert there(tmp_path) == [1, 3, 4]


@pytest.mark.parametrize(("left", "retries"), [(0.5, 1), (0.0, 1), (0.5, 0), (0.0, 0)])
def test_a_full_disk_is_freed_by_the_rules(pool: WorkerPool, small_disk: Path, left: float, retries: int) -> None:
    """The oldest goes a moment earlier than it would have, also where not even a lock finds room; the newest that is there stays."""
    results = pool.run(failed_saves.fill_up, small_disk, 150_000, left, retries, world_size=2, timeout=60)
    for told in results:
        assert told.raised[:2] + told.raised[3:] == [NOTHING] * 3
        assert told.raised[2] == NOTHING if retries else "No space left" in told.raised[2][1]
    kinds = [event[:2] for event in results[0].events]
    assert kinds.index(("delete", 1)) < kinds.index(("retry" if retries else "commit", 3 if retries else 4))
    assert there(small_disk) == ([3, 4] if retries else [2, 4])


def test_a_full_disk_costs_none_of_the_best(small_disk: Path) -> None:
    """The step that finds no room would be better than the best that is there; it may never come."""
    model, deleted = torch.nn.Linear(700, 700), list[int | None]()
    rules = Retention([KeepLast(1), KeepBest("reward")])

    def hear(event: Event) -> None:
        deleted.extend([event.step] if event.kind == "delete" else [])

    given = ManagerOptions(keep=rules, on_error="continue", catch_signals=False, fsync=False, on_event=hear)
    with CheckpointManager(small_disk, model, options=given) as manager:
        for step, reward in enumerate((1.0, 9.0, 2.0, 10.0, 3.0), 1):
            manager.save(step, {"reward": reward}, blocking=True)
            if step == 3:
                filler = small_disk / ".filler"
                filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 1_000_000))
            if step == 4:
                assert there(small_disk) == [2, 3]
                filler.unlink()
    assert deleted == [1, 3]
    assert there(small_disk) == [2, 5]
