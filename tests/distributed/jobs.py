"""What the ranks of the tests in this folder do; run by the resident workers."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_rlhf.engines.base import LiveState, LoadRequest, PreparedLoad
from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.manager.rlhf.state import RlhfState
from mcore_rlhf.manager.run import commit, job
from mcore_rlhf.manager.run.manager import CheckpointManager, ManagerOptions
from mcore_rlhf.manager.run.options import Event
from mcore_rlhf.storage import waiting
from tests.distributed.sharded_engine import ShardedEngine

NUMEL = 12_000


def options(**more: Any) -> ManagerOptions:
    return ManagerOptions(**{"timeout": 60.0, "fsync": False, "catch_signals": False, **more})


def engine(seed: int, numel: int = NUMEL) -> ShardedEngine:
    return ShardedEngine(dist.get_rank(), dist.get_world_size(), numel, seed)


def outcome(action: Callable[[], object]) -> tuple[str, str]:
    """The class and the text of what an action raises; two empty strings if it does not."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@contextmanager
def failing_writes(number: int, inside: Path, after: int = 0) -> Iterator[None]:
    """From the given one on, writes below a folder fail with this error number."""
    real, count = os.pwrite, [0]

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(str(inside)):
            count[0] += 1
            if count[0] > after:
                raise OSError(number, os.strerror(number))
        return real(fd, data, offset)

    os.pwrite = pwrite
    try:
        yield
    finally:
        os.pwrite = real


def values_of(root: Path, numel: int = NUMEL, which: str | int = "auto") -> tuple[int, dict[str, list[float]]]:
    """What this rank loads."""
    fresh = engine(seed=77, numel=numel)
    with CheckpointManager(root, fresh, options=options()) as manager:
        loaded = manager.load(which)
    return loaded.step if loaded else -1, {name: values.tolist() for name, values in fresh.values.items()}


def is_seed(loaded: tuple[int, dict[str, list[float]]], step: int, seed: int, numel: int = NUMEL) -> bool:
    expected = engine(seed, numel).values
    return loaded[0] == step and all(torch.equal(torch.tensor(loaded[1][name]), expected[name]) for name in expected)


# ---- a disk that refuses


def fail_in_the_background(root: Path, victim: int, number: int, after: int) -> list[tuple[str, str]]:
    """A rank's writes fail behind the training loop; what wait, the next save and its wait raise."""
    live = engine(seed=1)
    with CheckpointManager(root, live, options=options()) as manager:
        manager.save(1, blocking=True)
        live.reset(2)
        told = []
        with failing_writes(number, root, after if dist.get_rank() == victim else 10**9):
            told.append(outcome(lambda: manager.save(2)))
            told.append(outcome(manager.wait))
        told.append(outcome(manager.wait))
        live.reset(3)
        told.append(outcome(lambda: manager.save(3)))
    assert is_seed(values_of(root, which=1), 1, 1)
    assert is_seed(values_of(root), 3, 3)
    return told


def load_from_a_failing_disk(root: Path, victim: int, times: int) -> tuple[tuple[str, str], bool]:
    """A rank's disk fails under the newest step; what an automatic resume raises, and whether it loaded that step, or nothing."""
    live, real, left = engine(seed=1), os.open, [times]
    with CheckpointManager(root, live, options=options()) as manager:
        manager.save(1, blocking=True)
        live.reset(2)
        manager.save(2, blocking=True)
        live.reset(9)

        def failing(path: Any, *args: Any, **more: Any) -> int:
            if dist.get_rank() == victim and "global_step_2/actor" in str(path) and left[0]:
                left[0] -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return real(path, *args, **more)

        os.open = failing
        try:
            told = outcome(lambda: manager.load("auto"))
        finally:
            os.open = real
        expected = engine(seed=9 if told[0] else 2)
    return told, all(torch.equal(values, expected.values[name]) for name, values in live.values.items())


def hang(root: Path, victim: int, call: str) -> tuple[list[tuple[str, str]], list[float]]:
    """A rank's disk hangs while a step is saved, and through the next save; then it answers again.

    Returns:
        What each save raised, and how long it took.
    """
    live, answers, told, took = engine(seed=1), threading.Event(), list[tuple[str, str]](), list[float]()
    real = getattr(os, call)

    def hanging(path: Any, *args: Any, **options: Any) -> Any:
        where = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)
        if where.startswith(str(root)):
            answers.wait(60)
        return real(path, *args, **options)

    def timed(step: int) -> None:
        began = time.monotonic()
        told.append(outcome(lambda: manager.save(step, blocking=True)))
        took.append(time.monotonic() - began)

    with CheckpointManager(root, live, options=options(timeout=2.0)) as manager:
        manager.save(1, blocking=True)
        live.reset(2)
        setattr(os, call, hanging if dist.get_rank() == victim else real)
        try:
            timed(2)
            timed(3)
        finally:
            answers.set()
            setattr(os, call, real)
        time.sleep(1)
        live.reset(4)
        timed(4)
    assert is_seed(values_of(root, which=1), 1, 1)
    assert is_seed(values_of(root), 4, 4)
    return told, took


def hang_after_the_commit(root: Path, seconds: float) -> tuple[tuple[str, str], list[str]]:
    """The disk of rank 0 hangs for a while, when the step is committed.

    Returns:
        What the save raised, and what was said meanwhile.
    """
    said, handler, real, first = list[str](), logging.Handler(), job.replace_text, waiting.FIRST_S

    def hanging(*args: Any) -> None:
        time.sleep(seconds if dist.get_rank() == 0 else 0)
        real(*args)

    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("mcore_rlhf.waiting")
    log.addHandler(handler)
    waiting.FIRST_S, job.replace_text = 1.0, hanging
    try:
        with CheckpointManager(root, engine(seed=1), options=options(timeout=2.0)) as manager:
            return outcome(lambda: manager.save(1, blocking=True)), said
    finally:
        waiting.FIRST_S, job.replace_text = first, real
        log.removeHandler(handler)


def fail_until_close(root: Path, at: str) -> tuple[str, str]:
    """The error of a background save is raised by the next call, whichever it is."""
    manager = CheckpointManager(root, engine(seed=1), options=options())
    with failing_writes(errno.EIO, root, 2 if dist.get_rank() == 1 else 10**9):
        manager.save(1)
        time.sleep(0.5)
        calls: dict[str, Callable[[], object]] = {
            "save": lambda: manager.save(2), "wait": manager.wait, "close": manager.close, "load": lambda: manager.load("auto"),
        }  # fmt: skip
        told = outcome(calls[at])
    manager.close()
    return told


def fill_the_disk(root: Path, numel: int) -> list[tuple[str, str]]:
    """Two steps that fit, one that does not, and one after room was made."""
    live = engine(1, numel)
    told = []
    with CheckpointManager(root, live, options=options()) as manager:
        manager.save(1, blocking=True)
        filler = root / "filler"
        if dist.get_rank() == 0:
            with filler.open("wb") as file:
                usage = os.statvfs(root)
                file.write(bytes(usage.f_bavail * usage.f_frsize - numel * 4))  # room for one file of two
        dist.barrier()
        live.reset(2)
        told.append(outcome(lambda: manager.save(2, blocking=True)))
        if dist.get_rank() == 0:
            filler.unlink()
        dist.barrier()
        live.reset(3)
        told.append(outcome(lambda: manager.save(3, blocking=True)))
    assert is_seed(values_of(root, numel, which=1), 1, 1, numel)
    assert is_seed(values_of(root, numel), 3, 3, numel)
    return told


def start(root: Path) -> tuple[str, str]:
    """Only make a manager."""

    def make() -> None:
        CheckpointManager(root, engine(1), options=options()).close()

    return outcome(make)


# ---- ranks that do not come


def _short_of_patience(root: Path, live: ShardedEngine, **more: Any) -> CheckpointManager:
    """A manager that soon stops waiting: the ranks make it together, as a busy machine lets them start seconds apart."""
    dist.barrier()
    return CheckpointManager(root, live, options=options(timeout=2.0, **more))


def one_makes_no_manager(root: Path, absent: int) -> tuple[str, str]:
    """One rank is held up before it makes its manager, until the others have given it up; then it finds nobody either."""
    dist.barrier()
    if dist.get_rank() == absent:
        dist.barrier()
    told = outcome(lambda: CheckpointManager(root, engine(seed=1), options=options(timeout=3.0)))
    if dist.get_rank() != absent:
        dist.barrier()
    return told


def one_does_not_save(root: Path, absent: int, call: str) -> tuple[tuple[str, str], bool]:
    """All ranks but one make a call of the manager; what they are told, and whether all were told before that one did anything."""
    manager = _short_of_patience(root, engine(1))
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: manager.save(1, blocking=True), "load": lambda: manager.load("auto"),
        "wait": manager.wait, "maybe_save": lambda: manager.maybe_save(1),
    }  # fmt: skip
    said = [root.parent / f"{root.name}-{rank}-told" for rank in range(dist.get_world_size())]
    if dist.get_rank() == absent:
        return ("", ""), _appear([path for rank, path in enumerate(said) if rank != absent])
    told = outcome(calls[call])
    said[dist.get_rank()].touch()
    return told, True


def _appear(paths: list[Path]) -> bool:
    """Whether files appear, in less than the patience of a whole job."""
    end = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def one_dies_in_the_background(root: Path, victim: int, retries: int = 0) -> tuple[str, str]:
    """A rank is killed while its part is written."""
    live = engine(1)
    commit._GRACE_S, job._FIRST_PAUSE_S = 0.1, 0.02
    manager = _short_of_patience(root, live, save_retries=retries)
    manager.save(1, blocking=True)
    live.reset(2)
    if dist.get_rank() == victim:
        real = os.pwrite

        def pwrite(fd: int, data: Any, offset: int) -> int:
            if ".partial-" in os.readlink(f"/proc/self/fd/{fd}"):
                os.kill(os.getpid(), signal.SIGKILL)
            return real(fd, data, offset)

        os.pwrite = pwrite
    manager.save(2)
    told = outcome(manager.wait)
    (root / f"told-{dist.get_rank()}").write_text(f"{told[0]}: {told[1]}")
    return told


def different_steps(root: Path) -> list[tuple[str, str]]:
    live = engine(1)
    with CheckpointManager(root, live, options=options()) as manager:
        told = [outcome(lambda: manager.save(5 + dist.get_rank(), blocking=True))]
        told.append(outcome(lambda: manager.save(7, blocking=True)))
    return told


class Broken(ShardedEngine):
    """An engine that fails where it is told to, on one rank."""

    def __init__(self, seed: int, where: str, victim: int, error: Exception) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size(), NUMEL, seed)
        self.where, self.error = where if dist.get_rank() == victim else "", error

    def live(self, step: int) -> LiveState:
        if self.where == "live":
            raise self.error
        return super().live(step)

    def prepare_load(self, request: LoadRequest) -> PreparedLoad:
        if self.where == "prepare_load":
            raise self.error
        return super().prepare_load(request)


class LocalError(Exception):
    """Needs two arguments, so that it does not survive being pickled."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


def engine_raises(root: Path, where: str, victim: int, kind: str) -> tuple[list[tuple[str, str]], bool]:
    """What every rank is told, then whether the repaired engine works and nothing has changed."""
    errors = {
        "own": CheckpointError("the cause"),
        "runtime": RuntimeError("the cause"),
        "local": LocalError("the", "cause"),
    }
    broken = Broken(1, "", victim, errors[kind])
    told = []
    with CheckpointManager(root, broken, options=options()) as manager:
        manager.save(1, blocking=True)
        broken.reset(2)
        broken.where = where if dist.get_rank() == victim else ""
        calls = {"live": lambda: manager.save(2), "prepare_load": lambda: manager.load("auto")}
        told.append(outcome(calls[where]))
        unchanged = all(torch.equal(broken.values[name], values) for name, values in engine(2).values.items())
        broken.where = ""
        told.append(outcome(lambda: manager.save(2, blocking=True)))
        told.append(outcome(lambda: manager.load(1)))
    loaded = all(torch.equal(broken.values[name], values) for name, values in engine(1).values.items())
    return told, unchanged and loaded


# ---- loading


def load_and_tell(root: Path, which: str | int = "auto", numel: int = NUMEL, **more: Any) -> dict[str, Any]:
    """Load, and tell everything: the step, the report, what was said, and whether anything was changed."""
    said: list[str] = []

    def hook(event: Event) -> None:
        said.append(str(event))

    live = engine(50, numel)
    step, report, error = None, [], ("", "")
    with CheckpointManager(root, live, options=options(on_event=hook, **more)) as manager:
        try:
            loaded = manager.load(which)
            step, report = (loaded.step, loaded.report.lines) if loaded else (None, [])
        except CheckpointError as failure:
            error = type(failure).__name__, str(failure)
    unchanged = all(torch.equal(live.values[name], values) for name, values in engine(50, numel).values.items())
    return {
        "step": step, "error": error, "said": said, "unchanged": unchanged, "report": [str(line[1]) for line in report],
        "values": {name: values.tolist() for name, values in live.values.items()}, "rng": torch.rand(3).tolist(),
    }  # fmt: skip


def save_steps(root: Path, *steps: int, numel: int = NUMEL) -> list[float]:
    """Save steps whose values are seeded by their number; returns the random numbers after the last one."""
    torch.manual_seed(100 + dist.get_rank())
    live = engine(0, numel)
    with CheckpointManager(root, live, options=options(asynchronous=False)) as manager:
        for step in steps:
            live.reset(step)
            manager.save(step)
    return torch.rand(3).tolist()


def save_in_waves(root: Path, limit: int, numel: int, more: int) -> tuple[int, int, bool]:
    """Save through less memory than is copied, the first rank with a tensor more; what was reserved and held, and whether all came back."""
    live, state = engine(1, numel), RlhfState(extra={"replay": torch.arange(more)} if dist.get_rank() == 0 else {})
    with CheckpointManager(root, live, state=state, options=options(max_host_memory=limit)) as manager:
        manager.reserve()
        reserved = manager._saver._staging.nbytes
        manager.save(1)
        manager.wait()
        held = manager._saver._staging.nbytes
    fresh, found = engine(2, numel), RlhfState()
    with CheckpointManager(root, fresh, state=found, options=options()) as manager:
        manager.load()
    back = all(torch.equal(fresh.values[name], values) for name, values in live.values.items())
    return reserved, held, back and torch.equal(found.extra["replay"], torch.arange(more))  # type: ignore[arg-type]


def save_among_others(root: Path) -> list[tuple[str, str]]:
    """Save into a root with another run's step: unasked, twice, and then as the options say; what each try raises."""
    told, live = [], engine(seed=1)
    with CheckpointManager(root, live, options=options()) as manager:
        told += [outcome(lambda: manager.save(2, blocking=True)) for _ in range(2)]
    with CheckpointManager(root, live, options=options(on_existing="continue")) as manager:
        told.append(outcome(lambda: manager.save(2, blocking=True)))
    return told


# ---- signals


def train_until_signalled(root: Path, victim: int) -> tuple[int, bool]:
    """One rank is sent SIGTERM by itself; all leave after the same step."""
    live, step = engine(0), 0
    with CheckpointManager(root, live, options=options(catch_signals=True)) as manager:
        while not manager.stopping and step < 100:
            step += 1
            live.reset(step)
            if step == 4 and dist.get_rank() == victim:
                os.kill(os.getpid(), signal.SIGTERM)
            manager.maybe_save(step)
        return step, manager.stopping
