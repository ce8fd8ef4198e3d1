"""What the ranks of ``test_going_on`` do: their saves fail, and their training goes on."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from mcore_rlhf.engines.base import LiveState
from mcore_rlhf.errors import UsageError
from mcore_rlhf.manager.run import job, later, retention, steps
from mcore_rlhf.manager.run.commit import Transaction
from mcore_rlhf.manager.run.failed import FailedSave
from mcore_rlhf.manager.run.manager import CheckpointManager
from mcore_rlhf.manager.run.options import Event
from mcore_rlhf.manager.run.retention import KeepLast, Retention
from tests.distributed.jobs import engine, failing_writes, is_seed, options, outcome, values_of
from tests.distributed.sharded_engine import ShardedEngine


class Told(NamedTuple):
    """What a rank met: what its calls raised, what was said, and what the root said of a failed save after steps 2 and 3."""

    raised: list[tuple[str, str]]
    events: list[tuple[str, int | None, str]]
    noted: list[str]


class Replaced(AbstractContextManager[None]):
    """A function of :mod:`os` that does something else on one rank, with what it is given below a folder."""

    def __init__(self, call: str, where: str, instead: Callable[[], None], victim: int) -> None:
        self.call, self.where, self.instead, self.mine = call, where, instead, dist.get_rank() == victim
        self.real = getattr(os, call)

    def __enter__(self) -> None:
        def replaced(path: Any, *args: Any, **more: Any) -> Any:
            found = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)
            if self.where in found:
                self.instead()
            return self.real(path, *args, **more)

        if self.mine:
            setattr(os, self.call, replaced)

    def __exit__(self, *exc: object) -> None:
        setattr(os, self.call, self.real)


def _saved(root: Path, trouble: AbstractContextManager[object], then: Callable[[], None], **more: Any) -> Told:
    """Save 1; save 2 in trouble; then save 3; see that what was committed is right."""
    live, told = engine(seed=1), Told([], [], [])

    def hear(event: Event) -> None:
        told.events.append((event.kind, event.step, event.text))

    def call(action: Callable[[], object]) -> None:
        told.raised.append(outcome(action))

    job._FIRST_PAUSE_S = 0.05
    manager = CheckpointManager(root, live, options=options(on_event=hear, **more))
    manager.save(1, blocking=True)
    live.reset(2)
    with trouble:
        call(lambda: manager.save(2))
        live.reset(3)
        call(manager.wait)
        dist.barrier()  # training does, before a step that all ranks share
        told.noted.append(str(FailedSave.read(root) or ""))
        call(lambda: manager.save(3, blocking=True))
        dist.barrier()
        told.noted.append(str(FailedSave.read(root) or ""))
    then()
    call(manager.close)
    assert is_seed(values_of(root, which=1), 1, 1)
    assert is_seed(values_of(root), 3, 3)
    return told


def fail_for_good(root: Path, victim: int) -> Told:
    """A rank's disk takes nothing of step 2."""

    def refuse() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    return _saved(root, Replaced("pwrite", ".global_step_2.", refuse, victim), lambda: None, on_error="continue")


def get_no_thread(root: Path, victim: int, which: int) -> Told:
    """A rank may have no more threads, when the so manieth of the save of step 2 is to begin: those that ask the disk, and its own."""
    real, begun = threading.Thread.start, [0]

    def start(thread: threading.Thread) -> None:
        if thread.name == "mcore_rlhf save" and dist.get_rank() == victim:
            begun[0] += 1
            if begun[0] == which:
                raise RuntimeError("can't start new thread")
        real(thread)

    return _saved(root, patch.object(threading.Thread, "start", start), lambda: None, on_error="continue")


def fail_once(root: Path, victim: int, call: str, where: str) -> tuple[Told, bool]:
    """A rank's disk refuses once while step 2 is saved, and that is tried again."""
    left = [1]

    def refuse_once() -> None:
        if left:
            left.clear()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    told = _saved(root, Replaced(call, where, refuse_once, victim), lambda: None, save_retries=2)
    return told, is_seed(values_of(root, which=2), 2, 2)


class Meeting(ShardedEngine):
    """An engine whose ranks meet in the group of training, as FSDP's do."""

    def live(self, step: int) -> LiveState:
        met: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(met, f"step {step}")
        assert met == [f"step {step}"] * len(met), met
        return super().live(step)


class Refusing(ShardedEngine):
    """An engine that cannot be saved now."""

    def live(self, step: int) -> LiveState:
        raise UsageError(f"step {step} cannot be saved")


def meet_in_training(root: Path, victim: int, retries: int) -> tuple[list[int], list[bool]]:
    """One rank fails before, and one role fails beside, an engine whose ranks meet; what training gathers next is what it gave."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first = (Refusing if rank == victim else ShardedEngine)(rank, size, 1000, 1)
    roles = {"actor": first, "critic": Meeting(rank, size, 1000, 1)}
    join, trained, left = Transaction.join, list[bool](), [1]

    def failing(transaction: Transaction, patience: float = 1.0) -> None:
        if rank == victim and transaction.step == 2 and left:
            left.clear()
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(transaction.folder))
        join(transaction, patience)

    def train(step: int) -> None:
        values = [torch.empty(step * 100) for _ in range(size)]
        dist.all_gather(values, torch.full((step * 100,), float(rank)))
        trained.append([one.tolist() for one in values] == [[float(at)] * step * 100 for at in range(size)])

    job._FIRST_PAUSE_S = 0.05
    more = options(on_error="continue", save_retries=retries)
    with CheckpointManager(root, roles, options=more) as manager, patch.object(Transaction, "join", failing):
        told = outcome(lambda: manager.save(1))
        assert told[0] == "UsageError" or (rank != victim and "cannot be saved" in told[1]), told
        train(1)
        first.__class__ = ShardedEngine
        manager.save(2)
        train(2)
        manager.save(3, blocking=True)
        train(3)
    return [step.step for step in steps.committed(root)], trained


def fail_too_often(root: Path, victim: int) -> list[tuple[str, str]]:
    """All attempts fail."""
    job._FIRST_PAUSE_S = 0.05
    live = engine(seed=1)
    with CheckpointManager(root, live, options=options(save_retries=2)) as manager:
        with failing_writes(errno.EIO, root) if dist.get_rank() == victim else nullcontext():
            told = [outcome(lambda: manager.save(1)), outcome(manager.wait)]
        told.append(outcome(lambda: manager.save(2, blocking=True)))
    assert is_seed(values_of(root), 2, 1)
    return told


def come_again(root: Path, victim: int, numel: int) -> tuple[int, list[str]]:
    """A rank's disk refuses once in the midst of waves: at a later step all ranks save what there is then."""
    left, retries, live = [1], list[str](), engine(1, numel)

    def refuse_once() -> None:
        if left:
            left.clear()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def hear(event: Event) -> None:
        retries.extend([event.text] if event.kind == "retry" else [])

    later._FIRST_PAUSE_S, made, step = 0.1, None, 2
    more = options(save_retries=2, max_host_memory=1, on_event=hear)
    with (
        CheckpointManager(root, live, options=more) as manager,
        Replaced("pwrite", ".global_step_2.", refuse_once, victim),
    ):
        manager.save(step)
        while made is None:
            time.sleep(0.02)
            step += 1
            live.reset(step)
            made = manager.maybe_save(step)
    assert is_seed(values_of(root, numel), step, step, numel)
    return step, retries


def stand_still(root: Path, victim: int, call: str) -> Told:
    """A rank's disk hangs at step 2, until step 3 has been saved."""
    answers = threading.Event()

    def let_go() -> None:
        dist.barrier()
        answers.set()
        time.sleep(1)

    trouble = Replaced(call, ".global_step_2.", lambda: answers.wait(60) and None, victim)
    return _saved(root, trouble, let_go, on_error="continue", save_timeout=0.7, timeout=20.0)


def come_late(root: Path, late: int, seconds: float) -> tuple[list[tuple[str, str]], list[str]]:
    """A rank comes to a save when the others have long given it up; nobody is lost for what follows, be it a look or a save."""
    live, told, failed = engine(seed=1), list[tuple[str, str]](), list[str]()

    def hear(event: Event) -> None:
        failed.extend([event.text] if event.kind == "failed" else [])

    dist.barrier()  # a busy machine lets them start seconds apart
    with CheckpointManager(root, live, options=options(on_error="continue", timeout=1.0, on_event=hear)) as manager:
        manager.save(1, blocking=True)
        for step in (2, 3, 4):
            live.reset(step)
            if step == 2 and dist.get_rank() == late:
                time.sleep(seconds)
            told.append(outcome(lambda: manager.save(step, blocking=True)))  # noqa: B023
            dist.barrier()
            told.append(outcome(lambda: manager.maybe_save(step)))  # noqa: B023
    assert is_seed(values_of(root), 4, 4)
    return told, failed


def fill_up(root: Path, numel: int, left: float, retries: int) -> Told:
    """There is room for two steps, which the rules keep, and for a part of a third: that finds none until the first has gone."""
    live, told = engine(1, numel), Told([], [], [])
    job._FIRST_PAUSE_S = 0.05

    def hear(event: Event) -> None:
        told.events.append((event.kind, event.step, event.text))

    def save(step: int) -> None:
        live.reset(step)
        told.raised.append(outcome(lambda: manager.save(step, blocking=True)))

    keep = Retention([KeepLast(2)])
    with CheckpointManager(root, live, options=options(keep=keep, save_retries=retries, on_event=hear)) as manager:
        save(1)
        save(2)
        if dist.get_rank() == 0:
            _fill(root, left)
        dist.barrier()
        save(3)
        save(4)
    assert is_seed(values_of(root, numel), 4, 4, numel)
    return told


def _fill(disk: Path, left: float) -> None:
    """Leave room for so much of a step; what goes with the first is somewhat more than one, since ranks need a few notes."""
    exported = retention.exports_of(disk / "global_step_1")
    exported.mkdir(parents=True)
    (exported / "more").write_bytes(bytes(100_000))
    nbytes = sum(file.stat().st_size for file in (disk / "global_step_1").rglob("*") if file.is_file())
    with (disk / ".filler").open("wb", buffering=0) as filler, suppress(OSError):
        while (usage := os.statvfs(disk)).f_bavail * usage.f_frsize >= int(left * nbytes):
            filler.write(bytes(4096))
