"""Copies behind training, and copies in waves: what is saved is what was there at save(), and memory is bounded."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from mcore_rlhf.engines.plain import TorchEngine
from mcore_rlhf.engines.until_step import UntilStep
from mcore_rlhf.errors import StorageError, UsageError
from mcore_rlhf.manager.run import job, later, steps
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
from mcore_rlhf.manager.run.options import Event
from mcore_rlhf.manager.run.staging import HostStaging, StepFile
from mcore_rlhf.manager.run.stream import Stream
from mcore_rlhf.manager.run.write import RankWriter
from mcore_rlhf.storage import host_pool
from tests.helpers.latest import copied_at_the_latest

MIB = 1 << 20


def options(**given: Any) -> ManagerOptions:
    return ManagerOptions(catch_signals=False, fsync=False, **{"lazy_snapshot": True, **given})


class Run:
    """A model of which a forward pass changes the buffers, and nothing else."""

    def __init__(self, width: int = 200, frozen: bool = False) -> None:
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, width)
        )
        self.model[0].weight.requires_grad_(not frozen)
        self.model.register_buffer("counts", torch.zeros(50_000))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def passes(self) -> torch.Tensor:
        counts: Any = self.model.counts
        counts += 1
        loss = self.model(torch.randn(4, self.model[0].in_features)).pow(2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        return loss

    def step(self) -> float:
        loss = self.passes()
        self.optimizer.step()
        return loss.item()

    def manager(self, root: Path, given: ManagerOptions) -> CheckpointManager:
        return CheckpointManager(root, TorchEngine(self.model, self.optimizer), options=given)


def saved(root: Path, step: int) -> bytes:
    return (root / f"global_step_{step}/actor/state.pt").read_bytes()


@pytest.mark.parametrize("limit", [None, 1])
def test_it_is_what_a_blocking_save_saves(tmp_path: Path, limit: int | None) -> None:
    """At once, or in waves through a quarter of the memory, where buffers find no room beside the rest and are waited for."""
    run = Run()
    with (
        patch.object(host_pool, "LEAST", MIB // 4),
        run.manager(tmp_path, options(max_host_memory=limit)) as manager,
        copied_at_the_latest() as waited,
    ):
        run.step()
        manager.save(1, blocking=True)
        manager.save(2)
        assert manager._saver._staging._last[-1].wraps == (limit is not None)
        run.passes()
        assert bool(waited) == (limit is not None), "no pass waits"
        run.optimizer.step()
        manager.save(3, blocking=True)
    assert len(waited) == 1
    assert saved(tmp_path, 1) == saved(tmp_path, 2) != saved(tmp_path, 3)


def test_frozen_parameters_wait_too_and_buffers_do_not(tmp_path: Path) -> None:
    run = Run(frozen=True)
    with run.manager(tmp_path, options()) as manager, copied_at_the_latest():
        manager.save(1)
        staged = manager._saver._job.snapshot.files  # type: ignore[union-attr]
        later = [share.stream is manager._saver._staging._last[-1] for share in staged[0].shares]  # type: ignore[union-attr]
        assert sum(later) == 2, "both weights"
        assert len(later) - sum(later) == 1, "the large buffer"
        manager.before_step()


@pytest.mark.parametrize("where", ["group", "attribute"])
def test_one_that_is_made_for_cuda_graphs_is_copied_at_once(where: str, tmp_path: Path) -> None:
    """A graph's replay calls no hooks; torch keeps the flag in the groups, Transformer Engine at the optimizer."""
    run = Run()
    run.step()
    if where == "group":
        run.optimizer.param_groups[0]["capturable"] = True
    else:
        run.optimizer.capturable = True  # type: ignore[attr-defined]
    with run.manager(tmp_path, options()) as manager, copied_at_the_latest() as waited:
        manager.save(1)
        assert manager._saver._staging._last[-1].ended  # type: ignore[union-attr]
    assert waited == []


def test_training_ends_without_another_step(tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path, options()) as manager:
        manager.save(1)
    assert [step.step for step in steps.committed(tmp_path)] == [1]


def test_one_that_writes_to_weights_is_noticed(tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path, options()) as manager:
        manager.save(1, blocking=True)
        with copied_at_the_latest():
            manager.save(2)
            with torch.no_grad():
                run.model[2].weight.mul_(0.5)
            manager.before_step()
            with pytest.raises(StorageError, match=r"role actor: 2\.weight was written to after save\(\)"):
                manager.wait()
            manager.save(3)
            manager.before_step()
            with torch.no_grad():
                run.model[2].weight.mul_(0.5)
        manager.wait()
    assert [step.step for step in steps.committed(tmp_path)] == [1, 3]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("write", ["of the whole", "of a part"])
def test_one_that_writes_to_weights_that_are_dealt_out_is_noticed(mesh: DeviceMesh, write: str) -> None:
    """torch counts it at the tensor, and not at the rank's memory of it."""
    module = torch.nn.Linear(8, 8)
    fully_shard(module, mesh=mesh)
    until = UntilStep.of([module], torch.optim.AdamW(module.parameters()))
    assert until is not None
    since, weight = until.versions(), module.weight
    assert until.changed(since) is None
    with torch.no_grad():
        if write == "of the whole":
            weight.mul_(0.5)
        else:
            weight.to_local().mul_(0.5)  # type: ignore[operator]
    assert until.changed(since) == "weight"


@pytest.mark.parametrize("kind", [{"fused": True}, {"foreach": True}, {}])
def test_an_optimizer_that_no_role_names_waits_too(tmp_path: Path, kind: dict[str, bool]) -> None:
    """A fused one writes what torch does not count."""
    run, lone = Run(), torch.nn.Linear(8, 8)
    for module in (run.model, lone):
        module.requires_grad_()
    stranger = torch.optim.AdamW(run.model[2].parameters(), lr=0.1, **kind)  # type: ignore[arg-type]
    elsewhere = torch.optim.SGD(lone.parameters(), lr=0.1)
    with run.manager(tmp_path, options()) as manager, copied_at_the_latest() as waited:
        run.step()
        manager.save(1, blocking=True)
        manager.save(2)
        run.passes()
        lone(torch.ones(8)).sum().backward()
        elsewhere.step()
        early = len(waited)
        stranger.step()
        counted = len(waited)
        manager.before_step()  # also where nobody waited: nothing is copied otherwise, and nobody ends
        assert (early, counted) == (0, 1)
        manager.save(3, blocking=True)
    assert saved(tmp_path, 1) == saved(tmp_path, 2) != saved(tmp_path, 3)
    stranger.step()


@pytest.mark.parametrize("again", [False, True])
def test_memory_that_is_given_back_is_noticed(tmp_path: Path, again: bool) -> None:
    """As trainers do that send weights to host memory for a rollout; torch counts no write."""
    run = Run(width=2000)
    with run.manager(tmp_path, options()) as manager, copied_at_the_latest():
        manager.save(1)
        storage = run.model[2].weight.untyped_storage()
        nbytes = storage.nbytes()
        storage.resize_(0)
        if again:
            held = torch.ones(nbytes, dtype=torch.uint8)
            storage.resize_(nbytes)
            del held
        manager.before_step()
        with pytest.raises(StorageError, match=r"^actor/.*pt, record .*: its memory was given back after save\(\)"):
            manager.wait()
    assert [step.step for step in steps.committed(tmp_path)] == []


def test_an_optimizer_without_hooks_is_copied_as_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Own:
        def __init__(self, params: Any) -> None:
            self.inner = torch.optim.SGD(params, lr=1.0)
            self.param_groups, self.state = self.inner.param_groups, self.inner.state

        def state_dict(self) -> dict[str, Any]:
            return self.inner.state_dict()

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.inner.load_state_dict(state)

        def step(self) -> None:
            with torch.no_grad():
                for param in self.param_groups[0]["params"]:
                    param.data.fill_(3.0)

    model = torch.nn.Linear(200, 200)
    optimizer: Any = Own(model.parameters())
    assert UntilStep.of([model], optimizer) is None
    before = model.weight.detach().clone()
    with (
        caplog.at_level("INFO"),
        CheckpointManager(tmp_path, TorchEngine(model, optimizer), options=options()) as manager,
    ):
        manager.save(1)
        optimizer.step()
    assert torch.equal(
        torch.load(tmp_path / "global_step_1/actor/state.pt", weights_only=True)["model"]["weight"], before
    )
    assert "role actor is copied inside save()" in caplog.text


def test_hooks_go_with_the_manager(tmp_path: Path) -> None:
    run = Run()
    with run.manager(tmp_path, options()) as manager:
        for step in (1, 2):
            manager.save(step)
        assert len(run.optimizer._optimizer_step_pre_hooks) == 1  # type: ignore[attr-defined]
    assert len(run.optimizer._optimizer_step_pre_hooks) == 0  # type: ignore[attr-defined]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A writer that writes nothing before it is let go."""
    go, real = threading.Event(), RankWriter.write

    def write(writer: RankWriter, files: Any) -> Any:
        while not go.wait(0.01):
            pass
        return real(writer, files)

    monkeypatch.setattr(RankWriter, "write", write)
    yield go
    go.set()


@pytest.mark.parametrize("given", [{}, {"max_host_memory": 1}])
def test_a_copy_that_stands_still(tmp_path: Path, slow: threading.Event, given: dict[str, Any]) -> None:
    """Where there is room, nobody waits for a disk that hangs; where there is none, the rank and the step are named."""
    run = Run(width=2000)
    with run.manager(tmp_path, options(timeout=0.3, **given)) as manager:
        manager.save(1)
        if given:
            with pytest.raises(
                StorageError, match=r"rank 0 on .*: the copy of step 1 .* stood still for 0.3 s, at .* of"
            ):
                run.step()
        else:
            run.step()
        slow.set()
        run.step()
    assert [step.step for step in steps.committed(tmp_path)] == [1]


def test_training_goes_on_without_a_copy_that_stands_still(tmp_path: Path, slow: threading.Event) -> None:
    run, events = Run(width=2000), list[Event]()
    given = options(timeout=0.3, on_error="continue", max_host_memory=1, on_event=events.append)
    with run.manager(tmp_path, given) as manager:
        manager.save(1)
        run.step()
        slow.set()
        manager.wait()
        assert next(event.text for event in events if event.kind == "failed").endswith("training goes on")
        manager.save(2)
        run.step()
    assert [step.step for step in steps.committed(tmp_path)] == [2]


def test_a_save_that_fails_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(writer: RankWriter, files: Any) -> Any:
        raise StorageError("the disk is gone")

    run = Run(width=2000)
    with run.manager(tmp_path, options(max_host_memory=1)) as manager:
        with monkeypatch.context() as patched:
            patched.setattr(RankWriter, "write", write)
            manager.save(1)
            run.step()
            with pytest.raises(StorageError, match="the disk is gone"):
                manager.wait()
        manager.save(2)
    assert [step.step for step in steps.committed(tmp_path)] == [2]


def test_a_save_that_is_left_to_itself_lets_training_go_on(tmp_path: Path, slow: threading.Event) -> None:
    run = Run(width=2000)
    given = options(max_host_memory=1, save_timeout=0.3, on_error="continue")
    with run.manager(tmp_path, given) as manager:
        manager.save(1)
        started = time.monotonic()
        run.step()
        assert time.monotonic() - started < 20
        slow.set()
        manager.save(2)
        run.step()
    assert [step.step for step in steps.committed(tmp_path)] == [2]


@pytest.mark.parametrize("lazy", [True, False])
def test_waves_take_no_more_memory_than_they_may(tmp_path: Path, lazy: bool) -> None:
    """10 MiB of weights, 20 of moments, through 8."""
    run = Run(width=1200)
    run.step()
    with run.manager(tmp_path, options(lazy_snapshot=lazy, max_host_memory=9 * MIB)) as manager:
        manager.save(1)
        manager.save(2, blocking=True)
        assert manager._saver._staging.nbytes <= 9 * MIB
        manager.reserve()
        assert manager._saver._staging.nbytes <= 9 * MIB
    assert saved(tmp_path, 1) == saved(tmp_path, 2)


def test_what_cannot_be_together_is_refused() -> None:
    with pytest.raises(UsageError, match="max_host_memory: expected a number of bytes, found 0"):
        ManagerOptions(max_host_memory=0)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """While it is set, the disk refuses what is written after the first wave, and no folder is made."""
    refuses, real, made = threading.Event(), os.pwrite, os.mkdir
    refuses.opening = False  # type: ignore[attr-defined]

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if refuses.is_set() and offset > 5 * MIB:
            raise OSError(5, "Input/output error")
        return real(fd, data, offset)

    def mkdir(path: Any, *args: Any, **named: Any) -> None:
        if refuses.is_set() and refuses.opening and "partial" in str(path):  # type: ignore[attr-defined]
            raise OSError(5, "Input/output error")
        made(path, *args, **named)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "mkdir", mkdir)
    for module in (job, later):
        monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.05)
    return refuses


def after(manager: CheckpointManager, run: Run, first: int, until: str) -> tuple[int, str | None]:
    """Train on until a save is made, or fails; at which step, and why."""
    for step in range(first, first + 200):
        run.step()
        time.sleep(0.01)
        if (reason := manager.maybe_save(step)) is not None:
            return step, reason
    raise AssertionError(f"{until}: no save")


@pytest.mark.parametrize("on_error", ["raise", "continue"])
@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("opening", [True, False], ids=["that cannot begin", "that breaks off"])
def test_a_save_in_waves_comes_again_with_what_there_is(
    tmp_path: Path, refusing: Any, on_error: Any, lazy: bool, opening: bool
) -> None:
    run, heard = Run(width=1200), list[Event]()
    run.step()
    given = options(
        lazy_snapshot=lazy, max_host_memory=9 * MIB, save_retries=3, on_error=on_error, on_event=heard.append
    )
    with run.manager(tmp_path, given) as manager:
        refusing.opening = opening
        refusing.set()
        manager.save(1)
        second, reason = after(manager, run, 2, "the first time")
        assert reason == "the last save failed"
        assert manager._saver._background.ended_within(20)
        refusing.clear()
        third, _ = after(manager, run, second + 1, "the second time")
        run.passes()
        manager.wait()
        there = {name: value.clone() for name, value in run.model.state_dict().items() if name != "counts"}
        assert manager.maybe_save(third + 1) is None
        run.step()
    assert [step.step for step in steps.committed(tmp_path)] == [third]
    assert [int(event.values["attempt"]) for event in heard if event.kind == "retry"] == [1, 2]
    again = Run(width=1200)
    with again.manager(tmp_path, given) as manager:
        manager.load(third)
    assert all(
        torch.equal(again.model.state_dict()[name], there[name]) for name in there if "0." in name or "2." in name
    )


def test_a_save_in_waves_that_always_fails_is_an_error_in_the_end(tmp_path: Path, refusing: Any) -> None:
    run, heard = Run(width=1200), list[Event]()
    given = options(max_host_memory=9 * MIB, save_retries=2, on_event=heard.append)
    manager = run.manager(tmp_path, given)
    refusing.set()
    manager.save(1)
    at, _ = after(manager, run, 2, "first")
    assert manager._saver._background.ended_within(20)
    after(manager, run, at + 1, "second")
    with pytest.raises(StorageError, match="Input/output error"):
        manager.close()
    assert [event.kind for event in heard if event.kind != "save"] == ["failed", "retry", "failed", "retry", "failed"]


def test_what_fits_is_tried_again_as_it_was(tmp_path: Path, refusing: Any) -> None:
    run, heard = Run(width=1200), list[Event]()
    run.step()
    with run.manager(tmp_path, options(max_host_memory=99 * MIB, save_retries=9, on_event=heard.append)) as manager:
        refusing.set()
        manager.save(1)
        run.step()
        refusing.clear()
        manager.wait()
    assert [step.step for step in steps.committed(tmp_path)] == [1]
    assert "retry" in {event.kind for event in heard}


def test_a_stream_that_wraps_is_read_once() -> None:
    source = torch.arange(9 * MIB, dtype=torch.int64).view(torch.uint8)[: 20 * MIB + 13]
    stream = Stream(torch.zeros(8 * MIB, dtype=torch.uint8), [(0, source, "it")])
    stream.start()
    assert b"".join(bytes(window) for window in stream.read(0, source.numel())) == source.numpy().tobytes()
    stream.finish()
    with pytest.raises(StorageError, match="is there no more"):
        next(stream.read(0, 10))


def test_an_interrupted_stream_ends() -> None:
    stream = Stream(torch.zeros(8 * MIB, dtype=torch.uint8), [(0, torch.zeros(20 * MIB, dtype=torch.uint8), "it")])
    stream.start()
    stream.cancel()
    stream.join()
    assert stream.fence(1.0)


def test_nothing_to_copy() -> None:
    files, stream = HostStaging().staged([])
    assert files == []
    stream.run()
    stream.finish()


@pytest.mark.parametrize("lazy", [True, False])
def test_where_a_script_makes_its_tensors_elsewhere_host_memory_is_host_memory(tmp_path: Path, lazy: bool) -> None:
    """As ``torch.set_default_device("cuda")`` says it; without a GPU, no device can be told from the host but this one."""
    run = Run()
    run.step()
    kept = run.model[2].weight.detach().clone()
    torch.set_default_device("meta")
    try:
        with run.manager(tmp_path, options(lazy_snapshot=lazy)) as manager:
            manager.save(1)
            manager.before_step()
            manager.wait()
            with torch.no_grad():
                run.model[2].weight.zero_()
            assert manager.load(must_exist=True) is not None
    finally:
        torch.set_default_device(None)
    assert torch.equal(run.model[2].weight, kept)


class _Side:
    """Stands for a GPU's stream: what is queued there is done only when somebody waits for it."""

    def __init__(self) -> None:
        self.waited_for = 0

    def synchronize(self) -> None:
        self.waited_for += 1


def test_a_copy_that_is_given_up_waits_for_what_is_queued_on_a_gpu() -> None:
    """Its memory, there and here, is used next."""
    side = _Side()
    sides: Any = {torch.device("cpu"): side}
    stream = Stream(torch.zeros(MIB, dtype=torch.uint8), [(0, torch.zeros(MIB, dtype=torch.uint8), "it")], sides)
    stream.cancel()
    stream.run()
    assert stream.ended
    assert side.waited_for


def test_a_limit_holds_also_where_what_training_changes_is_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Then nothing is left to be copied behind training: all goes through what there is, while training waits."""
    run = Run(width=1200)
    run.model.register_buffer("more", torch.zeros(16 * MIB, dtype=torch.uint8))
    run.step()
    with run.manager(tmp_path, options(max_host_memory=12 * MIB)) as manager:
        manager.save(1, blocking=True)
        for step in (2, 3):
            manager.save(step)
            assert manager._saver._staging.nbytes <= 12 * MIB
            run.passes()
    assert saved(tmp_path, 1) == saved(tmp_path, 2) != saved(tmp_path, 3)
    said = [record.getMessage() for record in caplog.records if "training waits inside save()" in record.getMessage()]
    assert len(said) == 1
    assert "max_host_memory: 17.0 MB of this rank's part may change at any time" in said[0]


def test_what_finds_no_room_beside_the_rest_is_waited_for_and_the_rest_is_not(tmp_path: Path) -> None:
    """A reference has no optimizer that would wait, and is more than there is room for."""
    run = Run(width=1200)
    run.step()
    reference = torch.nn.Linear(1600, 1600)
    kept = reference.weight.detach().clone()
    roles = {"actor": TorchEngine(run.model, run.optimizer), "reference": TorchEngine(reference)}
    given = options(max_host_memory=9 * MIB)
    with CheckpointManager(tmp_path, roles, options=given) as manager, slow_writes() as go_on:
        manager.save(1)
        stream = manager._saver._staging._last[-1]
        with torch.no_grad():
            reference.weight.zero_()
        assert reference.weight.nbytes <= stream.copied < stream.nbytes, "of the actor, something is still to come"
        go_on.set()
        manager.save(2, blocking=True)
        run.step()
        manager.load(1)
        assert torch.equal(reference.weight, kept)
    assert saved(tmp_path, 1) == saved(tmp_path, 2)


@contextmanager
def slow_writes() -> Iterator[threading.Event]:
    """Of the actor nothing is written before that is set."""
    real, go_on = RankWriter._fill, threading.Event()

    def fill(writer: RankWriter, file: StepFile, into: Any) -> Any:
        if file.folder == "actor":
            assert go_on.wait(30)
        return real(writer, file, into)

    with patch.object(RankWriter, "_fill", fill):
        yield go_on
