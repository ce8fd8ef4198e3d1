"""A save of one process is killed after each of its operations on the disk, also in the middle of a write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rlhf.manager.run import retention, stream
from mcore_rlhf.manager.run.retention import KeepLast, Retention
from tests.crash.recorder import WRITES, Op, Recorder, replayed
from tests.crash.scenes import QUIET, SingleRun, check_start, committed, copied, leftovers, tree

BEFORE = 8
"""Operations before the commit from which on the other tests look: what is written before is the same as in the first."""
OLD, NEW, OTHER = SingleRun(seed=1), SingleRun(seed=2), SingleRun(seed=3)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several writes per tensor; and the disk's own patience is not under test."""
    monkeypatch.setattr(stream, "WINDOW_BYTES", 30000)
    monkeypatch.setattr(os, "fsync", os.fstat)


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path, Path]:
    """What was there before, where it is saved for the record, and where a crash is tried out."""
    base = tmp_path / "base"
    OLD.save(base, 1)
    return base, copied(base, tmp_path / "live"), tmp_path / "crash"


def recorded(live: Path, base: Path, action: Callable[[], None]) -> list[Op]:
    """The operations of an action; doing them again on what was there before gives what is there now."""
    with Recorder(live).recording() as recorder:
        action()
    again = copied(base, base.with_name("again"))
    replayed(recorder.ops, again)
    assert tree(again) == tree(live), "the recorder has missed something"
    return recorder.ops


def stops(base: Path, ops: list[Op], crash: Path, first: int = 0) -> Iterator[int]:
    """The disk after each number of operations, in ``crash``; once more with each write torn in the middle.

    Args:
        first: How many are done at the first stop.
    """
    rolling = copied(base, crash.with_name("rolling"))
    replayed(ops[:first], rolling)
    copied(rolling, crash)
    yield first
    for number, op in enumerate(ops[first:], first):
        if op.kind == "write" and len(op.data) > 1:
            copied(rolling, crash, linked=True)
            (crash / op.path).unlink()
            shutil.copy2(rolling / op.path, crash / op.path)
            op.apply(crash, torn=True)
            yield number
        op.apply(rolling)
        if op.kind != "fsync":
            copied(rolling, crash, linked=True)
            yield number + 1


def published_at(ops: list[Op], step: int) -> int:
    """How many operations it takes until the step is there."""
    return next(n for n, op in enumerate(ops, 1) if op.kind == "rename" and op.to == f"global_step_{step}")


def test_a_new_step(roots: tuple[Path, Path, Path]) -> None:
    base, live, crash = roots
    ops = recorded(live, base, lambda: NEW.save(live, 2))
    assert sum(op.kind in WRITES for op in ops) > 20
    commit = published_at(ops, 2)
    for number in stops(base, ops, crash):
        expected = {1: OLD, 2: NEW} if number >= commit else {1: OLD}
        assert committed(crash) == sorted(expected), f"killed after {number} operations, before {ops[number:][:1]}"
        check_start(crash, expected, max(expected))


def test_a_step_that_replaces_another(roots: tuple[Path, Path, Path]) -> None:
    base, live, crash = roots
    OTHER.save(base, 2)
    copied(base, live)
    ops = recorded(live, base, lambda: NEW.save(live, 2))
    commit = published_at(ops, 2)
    aside = next(n for n, op in enumerate(ops, 1) if op.kind == "rename" and op.path == "global_step_2")
    assert aside == commit - 1, "the moment without step 2 should be as short as can be"
    for number in stops(base, ops, crash, first=commit - BEFORE):
        assert committed(crash) == ([1] if number == aside else [1, 2])
        check_start(crash, {1: OLD, 2: NEW if number >= commit else OTHER}, 2)


@pytest.mark.parametrize(
    "text", [None, "", "\0" * 8, "another-host"], ids=["lost", "empty", "zeroed", "another host's"]
)
def test_a_replacement_whose_lock_is_of_no_use(roots: tuple[Path, Path, Path], text: str | None) -> None:
    """A restart on another host, or after a power failure: the holder of the root's lock brings it to an end."""
    base, live, crash = roots
    OTHER.save(base, 2)
    copied(base, live)
    ops = recorded(live, base, lambda: NEW.save(live, 2))
    commit = published_at(ops, 2)
    for number in (commit - 1, commit):
        copied(base, crash)
        replayed(ops[:number], crash)
        (lock,) = crash.glob(".global_step_2.lock-*")
        lock.unlink() if text is None else lock.write_text(text)
        with NEW.manager(crash):
            pass
        assert [name for name in leftovers(crash) if ".old-" in name] == []
        lock.unlink(missing_ok=True)  # what remains of another host waits for a day
        shutil.rmtree(next(crash.glob(".global_step_2.partial-*"), crash / "none"), ignore_errors=True)
        check_start(crash, {1: OLD, 2: NEW if number == commit else OTHER}, 2)


def test_with_the_deletion_of_old_steps(roots: tuple[Path, Path, Path]) -> None:
    base, live, crash = roots
    ops = recorded(live, base, lambda: NEW.save(live, 2, replace(QUIET, keep=Retention((KeepLast(1),)))))
    commit = published_at(ops, 2)
    gone = next(n for n, op in enumerate(ops, 1) if op.kind == "rename" and op.path == "global_step_1")
    assert gone > commit
    for number in stops(base, ops, crash, first=commit - BEFORE):
        expected = ({1: OLD} if number < gone else {}) | ({2: NEW} if number >= commit else {})
        assert committed(crash) == sorted(expected)
        check_start(crash, expected, max(expected))


def test_the_clean_up_is_killed_as_well(roots: tuple[Path, Path, Path]) -> None:
    base, live, crash = roots
    OTHER.save(base, 2)
    copied(base, live)
    ops = recorded(live, base, lambda: NEW.save(live, 2))
    commit = published_at(ops, 2)
    for killed_at in (commit - 2, commit - 1, commit):
        half = copied(base, live.with_name("half"))
        replayed(ops[:killed_at], half)
        copied(half, live)
        cleaning = recorded(live, half, lambda: [*retention.clean_up(live)] and None)
        assert cleaning
        for _ in stops(half, cleaning, crash):
            check_start(crash, {1: OLD, 2: NEW if killed_at >= commit else OTHER}, 2)


def test_a_rename_that_the_disk_lost(roots: tuple[Path, Path, Path]) -> None:
    """A disk that lies about fsync: the step's rename is lost, and everything after it is there."""
    base, live, crash = roots
    ops = recorded(live, base, lambda: NEW.save(live, 2))
    commit = published_at(ops, 2)
    copied(base, crash)
    replayed(ops[: commit - 1] + ops[commit:], crash)
    assert (crash / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert leftovers(crash), "the unpublished step should still be there"
    check_start(crash, {1: OLD}, 1)


def test_a_lost_rename_of_a_replacement(roots: tuple[Path, Path, Path]) -> None:
    base, live, crash = roots
    OTHER.save(base, 2)
    copied(base, live)
    ops = recorded(live, base, lambda: NEW.save(live, 2))
    commit = published_at(ops, 2)
    copied(base, crash)
    replayed(ops[: commit - 1] + ops[commit:], crash)
    check_start(crash, {1: OLD}, 1)


def test_everything_is_on_the_disk_before_it_appears(roots: tuple[Path, Path, Path]) -> None:
    """A crash of the whole machine loses what was not synced: files and folders before the rename, the root after it."""
    base, live, _ = roots
    ops = recorded(live, base, lambda: NEW.save(live, 2, replace(QUIET, fsync=True)))
    commit = published_at(ops, 2)
    staging = ops[commit - 1].path
    synced = {op.path: number for number, op in enumerate(ops[:commit]) if op.kind == "fsync"}
    changed = {op.path: number for number, op in enumerate(ops[:commit]) if op.kind in WRITES}
    files = {path for path in changed if path.startswith(f"{staging}/") and "/.parts/" not in path}
    assert len(files) == len([path for path in (live / "global_step_2").rglob("*") if path.is_file()])
    assert all(synced[path] > changed[path] for path in files)
    folders = {str(path.relative_to(live)) for path in (live / "global_step_2").rglob("*") if path.is_dir()}
    assert {path.replace("global_step_2", staging) for path in folders} | {staging} <= set(synced)
    assert changed[f"{staging}/manifest.json"] == max(changed[path] for path in files), "the manifest comes last"
    assert ops[commit].kind == "fsync", "the root is synced at once, before anything of the old state is removed"
    assert ops[commit].path == "."
