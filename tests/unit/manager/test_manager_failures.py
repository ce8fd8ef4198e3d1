"""What a failed save is to a run of one process: an error, or an event after which training goes on."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from mcore_rlhf.cli.app import app
from mcore_rlhf.engines.plain import TorchEngine
from mcore_rlhf.errors import StorageError, UsageError
from mcore_rlhf.manager.run import job, retention, steps
from mcore_rlhf.manager.run.failed import FAILED, FailedSave
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
from mcore_rlhf.manager.run.options import Event
from mcore_rlhf.manager.run.retention import KeepLast, Retention


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Refuses to write while it is set."""
    refuses, real = threading.Event(), os.pwrite

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if refuses.is_set() and "global_step_" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(5, "Input/output error")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(job, "_FIRST_PAUSE_S", 0.01)
    return refuses


def manager(root: Path, **more: object) -> CheckpointManager:
    options = ManagerOptions(catch_signals=False, fsync=False, **more)  # type: ignore[arg-type]
    return CheckpointManager(root, torch.nn.Linear(200, 200), options=options)


def test_an_error_of_the_last_save_is_raised_at_the_end(tmp_path: Path, disk: threading.Event) -> None:
    """Nothing is left then that could go on, and who started the run should hear of it."""
    run = manager(tmp_path, on_error="continue")
    run.save(1, blocking=True)
    disk.set()
    run.save(2, blocking=True)
    run.save(3)
    with pytest.raises(StorageError, match="Input/output error"):
        run.close()
    assert [step.step for step in steps.committed(tmp_path)] == [1]


@pytest.mark.parametrize("error", [MemoryError(), KeyError("exp_avg"), RuntimeError("CUDA error: no memory")])
def test_an_error_of_others_is_named(tmp_path: Path, error: Exception) -> None:
    """Its text may be empty, or half a sentence."""

    class Scaler:
        broken = False

        def state_dict(self) -> dict[str, object]:
            if self.broken:
                raise error
            return {"scale": 1.0}

        def load_state_dict(self, state: dict[str, object]) -> None: ...

    heard, scaler = list[Event](), Scaler()
    options = ManagerOptions(catch_signals=False, fsync=False, on_error="continue", on_event=heard.append)
    engine = TorchEngine(torch.nn.Linear(2, 2), scaler=scaler)
    with CheckpointManager(tmp_path, engine, options=options) as run:
        run.save(1, blocking=True)
        scaler.broken = True
        run.save(2)
        end = time.monotonic() + 10
        while not (tmp_path / FAILED).exists() and time.monotonic() < end:
            time.sleep(0.01)
        said = CliRunner().invoke(app, ["steps", str(tmp_path)]).output
        scaler.broken = False
        run.save(3)
    name = type(error).__name__
    (failed,) = [event.text for event in heard if event.kind == "failed"]
    assert failed.startswith(f"{name}: {error}" if str(error) else f"{name};")
    assert f"step 2 was not saved: {name}" in said


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("name", ["mcore_rlhf save", "mcore_rlhf copy", "mcore_rlhf watch", "mcore_rlhf waiting"])
def test_where_there_is_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, lazy: bool) -> None:
    """A container may have as many processes as it may: nothing is waited for that never began."""
    real, full = threading.Thread.start, [False]

    def start(thread: threading.Thread) -> None:
        if full[0] and thread.name == name:
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    model = torch.nn.Linear(200, 200)
    engine = TorchEngine(model, torch.optim.AdamW(model.parameters()))
    options = ManagerOptions(catch_signals=False, fsync=False, on_error="continue", save_timeout=30, lazy_snapshot=lazy)
    with CheckpointManager(tmp_path, engine, options=options) as run:
        run.save(1, blocking=True)
        full[0] = True
        run.save(2)
        run.before_step()
        run.wait()
        full[0] = False
        run.save(3)
    lost = name in ("mcore_rlhf save", "mcore_rlhf watch")
    assert [step.step for step in steps.committed(tmp_path)] == ([1, 3] if lost else [1, 2, 3])


def test_a_disk_that_is_full_after_the_commit_is_freed_by_the_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That the tracker cannot be written keeps no old step from being deleted; it is said in a line."""

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with manager(tmp_path, keep=Retention((KeepLast(1),))) as run:
        run.save(1, blocking=True)
        monkeypatch.setattr(job, "replace_text", full)
        run.save(2, blocking=True)
    assert [step.step for step in steps.committed(tmp_path)] == [2]
    (said,) = [record for record in caplog.records if "after the commit" in record.getMessage()]
    assert f"{tmp_path}: cannot finish: No space left on device" in said.getMessage()
    assert not said.exc_info


@pytest.mark.parametrize("full", [True, False])
def test_what_could_not_be_removed_goes_when_the_disk_is_well_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """Each would take the room of a step until the run is started anew; on a full disk there is not even a lock beside it."""
    fails, real = threading.Event(), retention.remove_tree

    def refusing(folder: Path) -> None:
        if fails.is_set():
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))
        real(folder)

    monkeypatch.setattr(retention, "remove_tree", refusing)
    with manager(tmp_path, keep=Retention((KeepLast(1),))) as run:
        run.save(1, blocking=True)
        fails.set()
        if full:
            monkeypatch.setattr(retention, "_lock", lambda places: None)
        run.save(2, blocking=True)
        (left,) = tmp_path.glob(".global_step_1.partial-*")
        assert (left / "actor" / "state.pt").exists()
        run.save(3, blocking=True)
        fails.clear()
        run.save(4, blocking=True)
        assert not list(tmp_path.glob(".global_step_*"))
    assert [step.step for step in steps.committed(tmp_path)] == [4]


def test_one_that_was_made_good_is_not(tmp_path: Path, disk: threading.Event) -> None:
    with manager(tmp_path, on_error="continue") as run:
        disk.set()
        run.save(1)
        run.wait()
        disk.clear()
        run.save(2)
    assert [step.step for step in steps.committed(tmp_path)] == [2]


def test_a_mistake_in_the_calls_is_always_an_error(tmp_path: Path) -> None:
    with manager(tmp_path / "a") as run:
        run.save(1, blocking=True)
    shutil.copytree(tmp_path / "a", tmp_path / "another")
    with (
        manager(tmp_path / "another", on_error="continue") as run,
        pytest.raises(UsageError, match="neither loaded nor written"),
    ):
        run.save(2, blocking=True)


@pytest.mark.parametrize("mode", ["raise", "continue"])
def test_steps_says_it_until_a_step_is_committed(tmp_path: Path, disk: threading.Event, mode: str) -> None:
    with manager(tmp_path, on_error=mode) as run:
        run.save(1, blocking=True)
        disk.set()
        run.save(2)
        if mode == "raise":
            with pytest.raises(StorageError):
                run.wait()
        run.wait()
        said = CliRunner().invoke(app, ["steps", str(tmp_path)]).output
        assert "note: step 2 was not saved: " in said
        assert "Input/output error" in said
        disk.clear()
        run.save(3, blocking=True)
    assert "was not saved" not in CliRunner().invoke(app, ["steps", str(tmp_path)]).output
    assert not (tmp_path / FAILED).exists()


def test_what_a_stranger_left_there_is_shown_harmlessly(tmp_path: Path) -> None:
    with manager(tmp_path) as run:
        run.save(1, blocking=True)
    (tmp_path / FAILED).write_text('{"step": 2, "why": "\\u001b[2J", "time": "now"}')
    assert "\x1b" not in CliRunner().invoke(app, ["steps", str(tmp_path)]).output
    (tmp_path / FAILED).write_text("[" * 100_000)
    assert CliRunner().invoke(app, ["steps", str(tmp_path)]).exit_code == 0


def test_retries_are_counted_and_said(tmp_path: Path, disk: threading.Event) -> None:
    heard: list[Event] = []
    disk.set()
    run = manager(tmp_path, save_retries=2, on_event=heard.append)
    run.save(1)
    with pytest.raises(StorageError, match="Input/output error"):
        run.close()
    kinds = [event.kind for event in heard]
    kinds.remove("save")  # said by this thread when it has the copy, while the writer's may have failed already
    assert kinds == ["retry", "retry", "failed"]
    assert [int(event.values["attempt"]) for event in heard if event.kind == "retry"] == [1, 2]


def test_a_save_that_waits_for_its_next_attempt_does_not_stand_still(
    tmp_path: Path, disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    def hear(event: Event) -> None:
        heard.append(event.kind)
        if event.kind == "retry":
            disk.clear()

    monkeypatch.setattr(job, "_FIRST_PAUSE_S", 1.5)
    disk.set()
    with manager(tmp_path, save_retries=1, save_timeout=1.0, on_event=hear) as run:
        run.save(1)
    assert "failed" not in heard
    assert [step.step for step in steps.committed(tmp_path)] == [1]


def test_one_that_stands_still_does_not_keep_a_process_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, real, heard = threading.Event(), os.pwrite, list[Event]()

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if ".global_step_2." in path and path.endswith("actor/state.pt"):
            answers.wait(30)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with manager(tmp_path, on_error="continue", save_timeout=0.3, on_event=heard.append) as run:
        run.save(1, blocking=True)
        run.save(2)
        run.save(3, blocking=True)
        answers.set()
    assert [(event.kind, event.step) for event in heard if event.kind == "failed"] == [("failed", 2)]
    (text,) = [event.text for event in heard if event.kind == "failed"]
    assert "of step 2 has made no progress for 0." in text
    assert "the last that it was at is actor/state.pt, after " in text
    assert [step.step for step in steps.committed(tmp_path)] == [1, 3]


def test_what_hangs_after_the_commit_is_said_once_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step is there: that is no failed save, and the next one does not wait for it."""
    answers, real, heard = threading.Event(), job.replace_text, list[Event]()

    def hanging(path: Path, text: str) -> None:
        if text == "1":
            answers.wait(30)
        else:
            real(path, text)

    monkeypatch.setattr(job, "replace_text", hanging)
    with manager(tmp_path, save_timeout=1.0, on_event=heard.append) as run:
        run.save(1, blocking=True)
        run.save(2, blocking=True)
        answers.set()
    assert [step.step for step in steps.committed(tmp_path)] == [1, 2]
    assert [event.kind for event in heard] == ["save", "commit", "save", "commit"]
    said = [record.getMessage() for record in caplog.records if "made no progress" in record.getMessage()]
    assert len(said) == 1
    assert "what follows the commit of step 1" in said[0]


def test_steps_says_nothing_of_a_step_that_is_there(tmp_path: Path) -> None:
    """A rank that hung while others committed leaves its word late."""
    with manager(tmp_path) as run:
        run.save(2, blocking=True)
    FailedSave.note(tmp_path, 2, StorageError("it hung"))
    assert "was not saved" not in CliRunner().invoke(app, ["steps", str(tmp_path)]).output
    FailedSave.note(tmp_path, 3, StorageError("it hung"))
    assert "step 3 was not saved: it hung" in CliRunner().invoke(app, ["steps", str(tmp_path)]).output
