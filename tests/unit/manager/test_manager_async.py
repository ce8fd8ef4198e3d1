"""Saving behind training: what is saved is what was there when save returned, and nothing is lost at the end."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.engines.plain import TorchEngine
from mcore_rlhf.errors import StorageError
from mcore_rlhf.manager.rlhf.controls import AdaptiveKL
from mcore_rlhf.manager.rlhf.sampler import PromptSampler
from mcore_rlhf.manager.rlhf.state import RlhfState
from mcore_rlhf.manager.run import job as save_job
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
from mcore_rlhf.manager.run.options import Event

QUIET = ManagerOptions(catch_signals=False, fsync=False)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk's own patience is not under test."""
    monkeypatch.setattr(os, "fsync", os.fstat)


class Gate:
    """Holds every save back before its first byte, until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached, self.waiting = threading.Event(), threading.Event(), 20.0
        real = save_job.SaveJob._run

        def run(job: save_job.SaveJob) -> None:
            self.reached.set()
            assert self.open.wait(self.waiting)
            real(job)

        monkeypatch.setattr(save_job.SaveJob, "_run", run)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


class Run:
    """A model with large and small tensors, and everything else that a run has."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(torch.nn.Linear(150, 150), torch.nn.Dropout(0.5), torch.nn.Linear(150, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        self.state = RlhfState(algorithm="grpo", kl=AdaptiveKL(0.2, 6.0, 1000))
        self.sampler = PromptSampler(100, seed=3, batch_size=4)

    def step(self) -> float:
        batch = self.sampler.next_batch()
        loss = self.model(torch.randn(4, 150)).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.sampler.acknowledge_all(batch)
        self.state.kl["actor"].update(loss.item(), 4)
        return loss.item() + batch[0].prompt_id

    def manager(self, root: Path, options: ManagerOptions = QUIET) -> CheckpointManager:
        engine = TorchEngine(self.model, self.optimizer, self.scheduler)
        return CheckpointManager(root, engine, data=self.sampler, state=self.state, options=options)


def test_training_goes_on_at_once(tmp_path: Path, gate: Gate) -> None:
    """Everything changes before the first byte is written: weights, moments, schedules, counters, random numbers, prompts."""
    run = Run()
    with run.manager(tmp_path) as manager:
        before = [run.step() for _ in range(3)]
        manager.save(3)
        assert gate.reached.wait(20)
        after = [run.step() for _ in range(3)]
        with torch.no_grad():
            for tensor in [*run.model.parameters(), *run.model.buffers()]:
                tensor.fill_(7.0)
        gate.open.set()
        manager.wait()
    assert len(set(before + after)) == 6
    again = Run()
    with again.manager(tmp_path) as manager:
        assert manager.load() is not None
        assert [again.step() for _ in range(3)] == after


@pytest.mark.parametrize("blocking", [True, False])
def test_every_step_is_resumed_bit_for_bit(tmp_path: Path, blocking: bool) -> None:
    whole, steps_done = Run(), 6
    expected = [whole.step() for _ in range(steps_done)]
    found: list[float] = []
    for start in range(steps_done):
        run = Run()
        with run.manager(tmp_path) as manager:
            resumed = manager.load()
            assert (resumed.step if resumed else 0) == start
            found.append(run.step())
            manager.save(start + 1, blocking=blocking)
    assert found == expected


def test_without_random_states_it_differs(tmp_path: Path) -> None:
    """The control of the test above: it would notice."""
    run = Run()
    with run.manager(tmp_path) as manager:
        run.step()
        manager.save(1, blocking=True)
        expected = run.step()
    again = Run()
    with again.manager(tmp_path) as manager:
        manager.load()
        torch.rand(1)
        assert again.step() != expected


def test_a_second_save_waits(tmp_path: Path, gate: Gate) -> None:
    run = Run()
    with run.manager(tmp_path) as manager:
        manager.save(1)
        threading.Timer(0.2, gate.open.set).start()
        manager.save(2)
        assert gate.open.is_set()
        assert [step.step for step in steps.committed(tmp_path)][:1] == [1]
    assert [step.step for step in steps.committed(tmp_path)] == [1, 2]


def test_a_second_save_is_refused(tmp_path: Path, gate: Gate) -> None:
    run = Run()
    with run.manager(tmp_path, ManagerOptions(catch_signals=False, fsync=False, on_busy="refuse")) as manager:
        manager.save(1)
        with pytest.raises(StorageError, match="step 2 is not saved: the one before is still being written"):
            manager.save(2)
        gate.open.set()
        manager.wait()
        manager.save(3)
    assert [step.step for step in steps.committed(tmp_path)] == [1, 3]


def test_staging_is_used_again(tmp_path: Path) -> None:
    run = Run()
    run.step()
    with run.manager(tmp_path) as manager:
        manager.reserve()
        seen = set()
        for step in range(1, 6):
            run.step()
            manager.save(step)
            staging = manager._saver._staging
            seen.add((staging._buffer.data_ptr(), staging.nbytes))
        assert len(seen) == 1
        ((_, nbytes),) = seen
        large = [p for p in run.model.parameters() if p.nbytes > 1 << 16]
        assert nbytes == 3 * sum(-(-p.nbytes // 64) * 64 for p in large), "the model and two moments, nothing else"


def test_a_blocking_save_makes_no_copy(tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path) as manager:
        manager.save(1, blocking=True)
        assert manager._saver._staging.nbytes == 0


def test_listeners_that_fail_do_not_break_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    def hook(event: Event) -> None:
        heard.append(event.kind)
        raise KeyError("the user's own bug")

    class Writer:
        def add_scalar(self, *args: Any) -> None:
            raise OSError("disk full")

        def close(self) -> None:
            pass

    run = Run()
    options = ManagerOptions(catch_signals=False, on_event=hook, tensorboard=tmp_path / "board")
    with run.manager(tmp_path / "root", options) as manager:
        manager.reporter._writer = Writer()  # type: ignore[assignment]
        manager.save(1)
        manager.wait()
        assert manager.load() is not None
    assert sorted(heard) == ["commit", "load", "save"]
    assert "the user's own bug" in caplog.text
    assert [step.step for step in steps.committed(tmp_path / "root")] == [1]


def test_what_fails_after_the_commit_is_no_failed_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def wants(self, step: int) -> bool:
            return True

        def run(self, folder: Path) -> Path:
            raise ValueError(f"cannot export {folder.name}")

    run = Run()
    options = ManagerOptions(catch_signals=False, fsync=False, exports=[Broken()])  # type: ignore[list-item]
    with run.manager(tmp_path, options) as manager:
        manager.save(1, blocking=True)
    assert "cannot export global_step_1" in caplog.text
    assert [step.step for step in steps.committed(tmp_path)] == [1]


def test_an_error_in_the_with_block_still_finishes_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run()

    def train() -> None:
        with run.manager(tmp_path) as manager:
            manager.save(1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert [step.step for step in steps.committed(tmp_path)] == [1]
    with run.manager(tmp_path), caplog.at_level(logging.INFO):
        pass  # the root is free


def test_a_loader_that_shows_its_own_state(tmp_path: Path, gate: Gate) -> None:
    """Another program's loader may hand out what it goes on to change."""

    class Loader:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {"position": [0], "order": torch.arange(4)}

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    loader = Loader()
    with CheckpointManager(tmp_path, torch.nn.Linear(2, 2), data=loader, options=QUIET) as manager:
        manager.save(1)
        loader.state["position"].append(1)
        loader.state["order"].zero_()
        gate.open.set()
        manager.wait()
        manager.load()
    assert loader.state["position"] == [0]
    assert loader.state["order"].tolist() == [0, 1, 2, 3]
