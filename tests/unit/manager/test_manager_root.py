"""Who may write into a root, what a start finds and cleans up there, and which step is which."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.errors import NotACheckpoint, StorageError, Unreadable, Unsupported, UsageError
from mcore_rlhf.manager.run import root as locking
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
from mcore_rlhf.manager.run.retention import KeepLast, Retention
from mcore_rlhf.manager.run.root import LOCK, RootLock
from mcore_rlhf.storage import patience

QUIET = ManagerOptions(catch_signals=False, fsync=False, asynchronous=False)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk's own patience is not under test."""
    monkeypatch.setattr(os, "fsync", os.fstat)


def model(value: float = 0.0) -> torch.nn.Linear:
    made = torch.nn.Linear(3, 2)
    with torch.no_grad():
        made.weight.fill_(value)
    return made


def saved(root: Path, *numbers: int, offset: float = 0.0) -> None:
    for number in numbers:
        with CheckpointManager(root, model(number + offset), options=QUIET) as manager:
            manager.save(number)


def loaded(root: Path, which: str | int = "auto") -> tuple[int | None, float]:
    live = model(-1.0)
    with CheckpointManager(root, live, options=QUIET) as manager:
        found = manager.load(which)
    return found.step if found else None, live.weight[0, 0].item()


@pytest.mark.parametrize("text", ["1", "7", "release", "", "\0\xff", "2\n2\n"])
def test_a_tracker_is_never_believed(tmp_path: Path, text: str) -> None:
    saved(tmp_path, 1, 2)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text, encoding="latin-1")
    assert loaded(tmp_path) == (2, 2.0)


def test_without_a_tracker(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert loaded(tmp_path) == (1, 1.0)


def test_a_tracker_that_cannot_be_written_does_not_fail_the_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").mkdir()
    saved(tmp_path, 1)
    assert loaded(tmp_path) == (1, 1.0)
    assert "after the commit" in caplog.text
    assert not [name for name in os.listdir(tmp_path) if ".tmp-" in name]


def test_two_runs_on_one_root(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, model(), options=QUIET) as first:
        with pytest.raises(StorageError, match="another run saves here") as refused:
            CheckpointManager(tmp_path, model(), options=QUIET)
        assert f"process {os.getpid()} on {socket.gethostname()}" in str(refused.value)
        assert "output_dir" in str(refused.value)
        first.save(1)
    assert loaded(tmp_path) == (1, 0.0)


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without ``flock``."""

    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("no_locks")
def test_two_runs_on_one_root_without_locks_on_one_host(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(tmp_path, model(), options=QUIET) as first:
        assert "this file system has no locks" in caplog.text
        with pytest.raises(StorageError, match=f"another run saves here: process {os.getpid()} on"):
            CheckpointManager(tmp_path, model(), options=QUIET)
        first.save(1)
    assert (tmp_path / LOCK).read_bytes() == b""  # it has ended, and whoever comes next need not wonder
    caplog.clear()
    assert loaded(tmp_path) == (1, 0.0)
    assert "nobody knows" not in caplog.text


@pytest.mark.usefixtures("no_locks")
@pytest.mark.parametrize("told", [{"pid": 2**22 + 1}, {"started": 1}], ids=["ended", "the number is another's now"])
def test_a_dead_run_without_locks_keeps_nobody_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, told: dict[str, int]
) -> None:
    about = {"host": socket.gethostname(), "pid": os.getpid(), "since": "yesterday", **told}
    (tmp_path / LOCK).write_text(json.dumps(about))
    saved(tmp_path, 1)
    assert "nobody knows" not in caplog.text


@pytest.mark.usefixtures("no_locks")
def test_two_runs_on_one_root_without_locks_on_two_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The later one cannot know that the first lives, and says so; the first one stops, and breaks nothing."""
    first = CheckpointManager(tmp_path, model(1.0), options=QUIET)
    first.save(1)
    with monkeypatch.context() as there:
        there.setattr(socket, "gethostname", lambda: "another-host")
        later = CheckpointManager(tmp_path, model(2.0), options=QUIET)
    assert f"process {os.getpid()} on {socket.gethostname()}, since" in caplog.text
    assert "nobody knows whether it still lives" in caplog.text
    with pytest.raises(StorageError, match=r"another run saves here: process .* on another-host"):
        first.save(2)
    first.close()
    later.load()
    later.save(2)
    later.close()
    assert loaded(tmp_path) == (2, 1.0)


def test_a_lock_that_the_disk_fails_at_is_not_one_that_it_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int, how: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(StorageError, match="cannot lock: Input/output error"):
        RootLock(tmp_path)


@pytest.mark.parametrize("late", [False, True])
def test_a_save_that_hung_takes_no_root_of_a_manager_that_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """It may come to the lock when that was released, or be at it just then."""
    lock, real = RootLock(tmp_path), locking.open_to_lock
    (tmp_path / LOCK).unlink()  # as by somebody who removed the root

    def opened(path: Path) -> int:
        fd = real(path)
        lock.release()
        return fd

    if late:
        monkeypatch.setattr(locking, "open_to_lock", opened)
    else:
        lock.release()
    with pytest.raises(StorageError, match="is closed, and saves nothing more"):
        lock.hold()
    monkeypatch.undo()
    RootLock(tmp_path).release()  # nobody has it


def test_a_lock_that_the_disk_failed_at_is_taken_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = RootLock(tmp_path)
    (tmp_path / LOCK).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", lambda fd, how: os.fstat(-1))
        with pytest.raises(StorageError, match="cannot lock"):
            lock.hold()
    lock.hold()
    with pytest.raises(StorageError, match="another run saves here"):
        RootLock(tmp_path)


def test_one_run_writes_while_another_only_reads(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with CheckpointManager(tmp_path, model(), options=QUIET) as writing:
        before = sorted(os.listdir(tmp_path))
        live = model()
        with CheckpointManager(tmp_path, live, options=ManagerOptions(read_only=True, catch_signals=False)) as reading:
            assert reading.load() is not None
            with pytest.raises(UsageError, match="only reads"):
                reading.save(2)
        assert sorted(os.listdir(tmp_path)) == before
        writing.save(2)


def test_a_refused_start_keeps_nothing(tmp_path: Path) -> None:
    """The root is free again at once, although the object that failed to be made may live on in a traceback."""
    (tmp_path / "global_step_1").mkdir()
    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mcore_rlhf.manager.run.manager.clean_up", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError) as failure:
            CheckpointManager(tmp_path, model(), options=QUIET)
        kept.append(failure)
    saved(tmp_path, 1)
    assert sorted(os.listdir(tmp_path)) == [".mcore_rlhf.lock", "global_step_1", "latest_checkpointed_iteration.txt"]


def test_a_lock_of_a_run_that_wrote_nonsense(tmp_path: Path) -> None:
    (tmp_path / ".mcore_rlhf.lock").write_text("nonsense")
    saved(tmp_path, 1)
    assert json.loads((tmp_path / ".mcore_rlhf.lock").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("there", [True, False])
def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path, there: bool) -> None:
    """Emptying it and writing our name into it would destroy whatever file of the user's it leads to."""
    other, root = tmp_path / "thesis.txt", tmp_path / "root"
    if there:
        other.write_text("years of work")
    root.mkdir()
    (root / LOCK).symlink_to(other)
    with pytest.raises(StorageError, match="a symbolic link, which is not followed"):
        RootLock(root)
    assert other.exists() is there
    assert not there or other.read_text() == "years of work"


def test_a_root_that_was_removed_under_a_run_is_locked_anew(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with CheckpointManager(root, model(), options=QUIET) as manager:
        manager.save(1)
        shutil.rmtree(root)
        manager.save(2)
        with pytest.raises(StorageError, match="another run saves here"):
            CheckpointManager(root, model(), options=QUIET)
        manager.save(3)
    assert [step.step for step in steps.committed(root)] == [2, 3]
    CheckpointManager(root, model(), options=QUIET).close()


def test_another_run_that_came_into_a_removed_root_keeps_it(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with CheckpointManager(root, model(), options=QUIET) as manager:
        shutil.rmtree(root)
        with CheckpointManager(root, model(), options=QUIET) as other:
            for _ in range(2):
                with pytest.raises(StorageError, match="another run saves here"):
                    manager.save(1)
            other.save(2)
        assert [step.step for step in steps.committed(root)] == [2]


def test_a_clock_that_goes_backwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are ordered by their numbers; neither names nor times of change matter."""
    clock = [2e9]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(time, "time_ns", lambda: int(clock[0] * 1e9))
    for number in (1, 2, 3):
        saved(tmp_path, number)
        os.utime(tmp_path / f"global_step_{number}", (clock[0], clock[0]))
        clock[0] -= 1e8
    assert loaded(tmp_path) == (3, 3.0)
    saved(tmp_path, 3, offset=0.5)  # replaced by a transaction whose id sorts before the old one's
    assert loaded(tmp_path) == (3, 3.5)
    assert [step.step for step in steps.committed(tmp_path)] == [1, 2, 3]


def test_an_older_step_is_saved_later_by_another_run(tmp_path: Path) -> None:
    saved(tmp_path, 5, 3)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert loaded(tmp_path) == (3, 3.0)


def test_a_run_that_begins_anew_leaves_the_newer_steps_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing of the old run is lost, nothing resumes from it, and no rule counts it."""
    saved(tmp_path, 2, 4, 6, 8)
    keep = replace(QUIET, keep=Retention([KeepLast(1)]))
    with CheckpointManager(tmp_path, model(0.5), options=keep) as manager:
        manager.save(1)
        manager.save(3)
    assert {step.step: step.state for step in steps.listed(tmp_path)} == dict.fromkeys((2, 3, 4, 6, 8), "committed")
    assert [step.step for step in steps.committed(tmp_path)] == [3]
    assert "left behind by a run that saved step 1" in {s.step: s.quarantined for s in steps.listed(tmp_path)}[8]
    assert loaded(tmp_path) == (3, 0.5)


def test_the_step_that_a_run_went_back_to_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, 2, 4, 6)
    keep = replace(QUIET, keep=Retention([KeepLast(1)]))
    with CheckpointManager(tmp_path, model(), options=keep) as manager:
        assert manager.load(4) is not None
        assert "this step stays while the run goes on" in caplog.text
        for step in (5, 6, 7):
            manager.save(step)
            assert [step.step for step in steps.committed(tmp_path)] == [4, step]


@pytest.mark.parametrize("which", ["auto", 4])
def test_a_run_that_goes_on_from_the_newest_step_keeps_what_its_rules_keep(tmp_path: Path, which: object) -> None:
    saved(tmp_path, 2, 4)
    keep = replace(QUIET, keep=Retention([KeepLast(2)]))
    with CheckpointManager(tmp_path, model(), options=keep) as manager:
        assert manager.load(which) is not None
        manager.save(6)
        assert [step.step for step in steps.committed(tmp_path)] == [4, 6]
        manager.save(8)
        assert [step.step for step in steps.committed(tmp_path)] == [6, 8]


def test_a_step_of_a_newer_release_is_neither_passed_over_nor_replaced(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    manifest = tmp_path / "global_step_2" / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["crc32"]  # as the newer release would have computed it
    manifest.write_text(json.dumps({**content, "version": 99}))
    with CheckpointManager(tmp_path, model(), options=QUIET) as manager:
        with pytest.raises(Unsupported, match="version 99"):
            manager.load("auto")
        assert manager.load(1) is not None
        manager.save(2)
    (aside,) = tmp_path.glob("global_step_2.found-*")
    assert json.loads((aside / "manifest.json").read_text())["version"] == 99


def test_steps_without_manifests_are_no_reason_to_begin_anew(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    for number in (1, 2):
        (tmp_path / f"global_step_{number}" / "manifest.json").unlink()
    with (
        CheckpointManager(tmp_path, model(), options=QUIET) as manager,
        pytest.raises(NotACheckpoint, match="no committed step"),
    ):
        manager.load("auto")


def test_a_step_is_saved_again(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    (tmp_path / "global_step_2" / "actor" / "state.pt").unlink()  # a damaged one may be replaced as well
    saved(tmp_path, 2, offset=0.5)
    assert loaded(tmp_path) == (2, 2.5)
    saved(tmp_path, 2, offset=0.25)
    assert loaded(tmp_path) == (2, 2.25)
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith(".")) == [".mcore_rlhf.lock"]


def test_a_step_that_cannot_be_read_does_not_make_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be sound: under another name nobody would find it, if the save failed then."""
    saved(tmp_path, 1, 2)
    manifest = tmp_path / "global_step_2" / "manifest.json"
    genuine = os.stat

    def fail(path: object, *args: Any, **options: Any) -> os.stat_result:
        if path == manifest:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return genuine(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(patience, "_PAUSES", (0.0,))
    with CheckpointManager(tmp_path, model(), options=QUIET) as manager, monkeypatch.context() as patch:
        patch.setattr(os, "stat", fail)
        with pytest.raises(Unreadable, match=rf"{manifest}: cannot read: Input/output error"):
            manager.save(2, blocking=True)
    assert loaded(tmp_path) == (2, 2)


@pytest.mark.parametrize(
    "file", ["actor/latest_checkpointed_iteration.txt", "latest", "mp_rank_00_model_states.pt", "thesis.txt"]
)
def test_what_is_not_ours_makes_way_and_is_kept(tmp_path: Path, file: str) -> None:
    path = tmp_path / "global_step_2" / file
    path.parent.mkdir(parents=True)
    path.write_text("another program's")
    saved(tmp_path, 1)
    saved(tmp_path, 2, 3)
    (aside,) = tmp_path.glob("global_step_2.found-*")
    assert (aside / file).read_text() == "another program's"
    assert [step.step for step in steps.committed(tmp_path)] == [1, 2, 3]
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith(".")) == [".mcore_rlhf.lock"]


def test_an_empty_folder_is_no_step(tmp_path: Path) -> None:
    (tmp_path / "global_step_2").mkdir(parents=True)
    saved(tmp_path, 2)
    assert loaded(tmp_path) == (2, 2.0)


@pytest.mark.parametrize("step", [-1, 1.0, True, "3", None])
def test_what_is_no_step(tmp_path: Path, step: object) -> None:
    with CheckpointManager(tmp_path, model(), options=QUIET) as manager:
        with pytest.raises(UsageError, match="whole number"):
            manager.save(step)  # type: ignore[arg-type]
        manager.save(0)
    assert loaded(tmp_path)[0] == 0


def test_after_close(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, model(), options=QUIET)
    manager.close()
    manager.close()
    with pytest.raises(UsageError, match="closed"):
        manager.save(1)
