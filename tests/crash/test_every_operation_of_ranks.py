"""Several ranks write one step: all are killed after each operation of any of them, or one of them is while the others go on."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch

from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.manager.run import steps, stream
from mcore_rlhf.manager.run.manager import CheckpointManager
from tests.crash.recorder import Killed, Op, Recorder, replayed
from tests.crash.scenes import QUIET, Ranks, committed, copied, leftovers, tree
from tests.distributed.sharded_engine import ShardedEngine

NUMEL = 6000
OLD, NEW = 1, 2


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "WINDOW_BYTES", 4000)
    monkeypatch.setattr(os, "fsync", os.fstat)


def engines(size: int, seed: int) -> list[ShardedEngine]:
    return [ShardedEngine(rank, size, NUMEL, seed) for rank in range(size)]


def based(tmp_path: Path, size: int) -> Path:
    """A root with step 1."""
    root = tmp_path / "base"
    root.mkdir()
    ranks = Ranks(root, {"": engines(size, OLD)})
    ranks.save(1)
    assert not ranks.errors
    return root


def check_start(root: Path, seeds: dict[int, int]) -> None:
    """The next start, on a single rank, cleans up and loads each of the steps."""
    fresh = ShardedEngine(0, 1, NUMEL, seed=99)
    with CheckpointManager(root, fresh, options=QUIET) as manager:
        assert not leftovers(root), leftovers(root)
        for which, step in [("auto", max(seeds)), *((number, number) for number in seeds if number != max(seeds))]:
            fresh.reset(98)
            loaded = manager.load(which)
            assert loaded is not None
            assert loaded.step == step
            for name, values in ShardedEngine(0, 1, NUMEL, seeds[step]).values.items():
                assert torch.equal(fresh.values[name], values)


def published_at(ops: list[Op]) -> int:
    return next(n for n, op in enumerate(ops, 1) if op.kind == "rename" and op.to == "global_step_2")


@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replaces"])
def test_all_are_killed(tmp_path: Path, rng: random.Random, replaces: bool) -> None:
    base = based(tmp_path, 3)
    if replaces:
        Ranks(base, {"": engines(3, 3)}).save(2)
    live, rolling, crash = copied(base, tmp_path / "live"), copied(base, tmp_path / "rolling"), tmp_path / "crash"
    recorder = Recorder(live, before=lambda op: time.sleep(rng.random() / 500))  # another interleaving every time
    ranks = Ranks(live, {"": engines(3, NEW)})
    with recorder.recording():
        ranks.save(2)
    assert not ranks.errors
    commit = published_at(recorder.ops)
    assert len(recorder.ops) > 50
    for number, op in enumerate(recorder.ops, 1):
        op.apply(rolling)
        if op.kind == "write" and len(op.data) < 100 and number < commit - 5:
            continue  # headers and the like; the same file is looked at a moment later
        copied(rolling, crash, linked=True)
        between = replaces and number == commit - 1
        there = number >= commit or (replaces and not between)
        assert committed(crash) == ([1, 2] if there else [1]), f"killed after {op}"
        second = {2: NEW} if number >= commit else {2: 3} if replaces else {}
        check_start(crash, {1: OLD, **second})
    assert tree(rolling) == tree(live), "the recorder has missed something"


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_one_is_killed(tmp_path: Path, rng: random.Random, victim: int) -> None:
    """The others say who is missing; the step is there as a whole or not at all, and the one before is."""
    base = based(tmp_path, 3)
    whole = Recorder(copied(base, tmp_path / "whole"))
    done: list[str] = []
    whole.before = lambda op: done.append(threading.current_thread().name)
    with whole.recording():
        Ranks(whole.root, {"": engines(3, NEW)}).save(2)
    count = done.count(f"{victim:05d}")
    assert count > 10
    for survives in sorted(rng.sample(range(count), 3)):
        _one_killed(copied(base, tmp_path / f"killed_{survives}"), victim, survives)


def _one_killed(live: Path, victim: int, survives: int) -> None:
    """One rank's thread ends before its operation of that number, and does not even clean up."""
    name, done = f"{victim:05d}", [0]

    def before(op: Op) -> None:
        if threading.current_thread().name == name:
            if done[0] >= survives:
                raise Killed
            done[0] += 1

    ranks = Ranks(live, {"": engines(3, NEW)}, timeout=2.0)
    with Recorder(live, before=before).recording():
        ranks.save(2)
    if not ranks.errors:  # another rank was first to make a folder this time, and this one had less to do
        assert done[0] <= survives
        assert committed(live) == [1, 2]
        return check_start(live, {1: OLD, 2: NEW})
    assert isinstance(ranks.errors.get(name), Killed)
    survivors = {rank: error for rank, error in ranks.errors.items() if rank != name}
    published = committed(live) == [1, 2]
    if published:
        assert steps.read_manifest(live / "global_step_2").step == 2
    else:
        assert committed(live) == [1]
        assert len(survivors) == 2
        assert all(isinstance(error, CheckpointError) for error in survivors.values()), survivors
        if victim:
            assert any(f"rank {name}" in str(error) or f"rank {victim}" in str(error) for error in survivors.values())
    after = copied(live, live.with_name("after"))  # there, the dead thread's locks are not held
    return check_start(after, {1: OLD, 2: NEW} if published else {1: OLD})


def test_the_leftovers_of_a_dead_save_do_not_disturb_the_next(tmp_path: Path, rng: random.Random) -> None:
    base = based(tmp_path, 2)
    live = copied(base, tmp_path / "live")
    with Recorder(live).recording() as recorder:
        Ranks(live, {"": engines(2, 3)}).save(2)
    crash = copied(base, tmp_path / "crash")
    replayed(recorder.ops[: rng.randrange(10, published_at(recorder.ops))], crash)
    ranks = Ranks(crash, {"": engines(2, NEW)})
    ranks.save(2)  # no start in between
    assert not ranks.errors
    check_start(crash, {1: OLD, 2: NEW})
