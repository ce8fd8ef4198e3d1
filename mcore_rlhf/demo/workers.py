"""Resident processes for distributed jobs on one machine, for tests and the demonstration.

    with WorkerPool(8) as pool:
        losses = pool.run(train, config, world_size=4, timeout=60)      # one result per rank

Importing torch and Megatron costs seconds, so one process imports (the *nursery*, see :mod:`.worker_process`), the workers are
forked from it, and they serve many jobs, of any world size up to their number. A worker that dies or hangs never hangs the
caller: all workers are killed, the error says which rank and where it stood, and the next job gets new ones.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from mcore_rlhf.demo import worker_process
from mcore_rlhf.demo.worker_process import FunctionReference, WorkerJob

_LINES = 30

_START_TIMEOUT = 240.0

__all__ = ["WorkerError", "WorkerPool"]

_PRELOAD = "mcore_rlhf.demo.trainer"

_GRACE = 3.0


class WorkerError(RuntimeError):
    """A job failed on some rank.

    Args:
        rank: The rank that failed first, or that the others were waiting for.
        reason: What happened there.
        details: Traceback or stacks, and the end of the log.
    """

    def __init__(self, rank: int, reason: str, details: str) -> None:
        super().__init__(f"rank {rank} {reason}\n{details}")
        self.rank = rank
        self.reason = reason
        self.details = details

    @property
    def recoverable(self) -> bool:
        """Whether every rank has come back, so that the workers can go on."""
        return self.reason == "raised"


@dataclass(frozen=True, slots=True)
class Reports:
    """The files into which the workers of a pool write.

    Args:
        folder: Of the pool: ``worker_N.log`` (what was printed) and ``worker_N.stacks`` (dumped at a time-out).
    """

    folder: Path

    def read(self, name: str) -> str:
        """All of a file; nothing if it is not there."""
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def tail(self, name: str) -> str:
        """The last lines of a file."""
        return "\n".join(self.read(name).splitlines()[-_LINES:])

    def raised(self, rank: int, traceback: str) -> WorkerError:
        """A rank raised; its traceback comes last, where readers look."""
        return WorkerError(rank, "raised", f"{self.tail(f'worker_{rank}.log')}\n{traceback}".strip())

    def died(self, rank: int) -> WorkerError:
        """A rank's process ended."""
        return WorkerError(rank, "died", self.tail(f"worker_{rank}.log"))

    def unfinished(self, first: WorkerError | None, waiting: int, count: int, timeout: float) -> WorkerError:
        """A job in which workers ended or did not come back: their stacks tell whether they hung.

        Args:
            first: The first failure that was reported, if any.
            waiting: A rank that has not come back.
            count: Ranks of the job.
            timeout: Seconds that it had.
        """
        stacks = {rank: self.tail(f"worker_{rank}.stacks") for rank in range(count)}
        if first is not None and not stacks[first.rank]:
            return first if first.reason == "died" else WorkerError(first.rank, "raised, others hang", first.details)
        # those that sit in a collective wait for the one that does not
        suspects = [rank for rank, stack in stacks.items() if stack and "distributed_c10d" not in stack]
        details = "\n".join(f"rank {rank}:\n{stack}" for rank, stack in stacks.items())
        return WorkerError((suspects or [waiting])[0], f"was not done in {timeout:g} s", details)


@dataclass(frozen=True, slots=True)
class Workers:
    """Processes that were forked together and end together.

    Args:
        connections: One per worker, in the order of their ranks.
        lifeline: Write end of the pipe that they watch.
        pids: Of the processes.
    """

    connections: list[Connection]
    lifeline: int
    pids: list[int]

    def end(self) -> None:
        """Kill them and what they started, whatever they are doing."""
        os.close(self.lifeline)
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        for connection in self.connections:
            connection.close()


class Nursery:
    """A process with everything imported, from which workers are forked in no time.

    Args:
        preload: Module to import.
        first: Folders where it looks for modules before all others.
    """

    def __init__(self, preload: str, first: tuple[str, ...] = ()) -> None:
        self.reports = Reports(Path(tempfile.mkdtemp(prefix="workers-")))
        self._control, theirs = socket.socketpair()
        with theirs, (self.folder / "nursery.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", worker_process.__name__, preload, str(self.folder), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_environment(first),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is the owner's to handle
            )
        self._end = weakref.finalize(self, _end, self._control, self._process, self.folder)

    @property
    def folder(self) -> Path:
        """Where logs, stacks and rendezvous files go."""
        return self.reports.folder

    def fork(self, count: int) -> Workers:
        """Get new workers.

        Args:
            count: How many.

        Raises:
            WorkerError: If they do not come up, for example because the import failed.
        """
        theirs_lifeline, lifeline = os.pipe()
        pairs = [socket.socketpair() for _ in range(count)]
        with contextlib.suppress(BrokenPipeError):
            socket.send_fds(self._control, [b"f"], [theirs_lifeline, *(theirs.fileno() for _, theirs in pairs)])
        os.close(theirs_lifeline)
        for _, theirs in pairs:
            theirs.close()
        workers = Workers([Connection(ours.detach()) for ours, _ in pairs], lifeline, [])
        self._await(workers)
        return workers

    def _await(self, workers: Workers) -> None:
        deadline = time.monotonic() + _START_TIMEOUT
        for rank, connection in enumerate(workers.connections):
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    raise EOFError
                workers.pids.append(connection.recv())
            except (EOFError, ConnectionResetError):
                workers.end()
                raise WorkerError(rank, "did not start", self.reports.tail("nursery.log")) from None

    def close(self) -> None:
        """End the process; it also ends with this object, and with the owner."""
        self._end()


def _end(control: socket.socket, process: subprocess.Popen[bytes], folder: Path) -> None:
    control.close()
    process.kill()
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _environment(first: tuple[str, ...]) -> dict[str, str]:
    """One thread per worker, no GPU, traffic on the loopback interface, this package importable."""
    package = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([*first, package, *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    if Path("/sys/class/net/lo").exists():
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


class WorkerPool:
    """Processes that keep torch and Megatron imported and run jobs over gloo.

    The processes start with the first job (or on entering the pool) and end with the pool, also when its owner is
    killed. They see no GPU.

    Args:
        size: Number of processes, the largest world size.
        preload: Module imported once, before the processes are forked from one another; it must not start threads.
        first: Folders where the processes look for modules before all others, such as another Megatron's.
    """

    def __init__(self, size: int, preload: str = _PRELOAD, first: tuple[str, ...] = ()) -> None:
        self.size = size
        self._preload = preload
        self._first = first
        self._nursery: Nursery | None = None
        self._workers: Workers | None = None
        self._jobs = 0

    def __enter__(self) -> WorkerPool:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    @property
    def running(self) -> bool:
        """Whether the processes are there."""
        return self._workers is not None

    @property
    def pids(self) -> list[int]:
        """The workers' process ids, in the order of their ranks."""
        return list(self._workers.pids) if self._workers is not None else []

    def start(self) -> None:
        """Start the processes, unless they are running.

        Raises:
            WorkerError: If they do not come up.
        """
        self._started()

    def run(
        self,
        function: str | Callable[..., Any],
        *args: Any,
        world_size: int | None = None,
        timeout: float = 120.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Run a function on ranks 0 … ``world_size`` - 1, in a process group of its own.

        Args:
            function: A module-level function, or ``"module:name"``.
            args: Its arguments; they and the results are pickled.
            world_size: Number of ranks; all processes if not given.
            timeout: Seconds for the whole job.
            kwargs: Its keyword arguments.

        Returns:
            One result per rank.

        Raises:
            WorkerError: If a rank raised, died, or was not done in time.
            ValueError: If there are too few processes, or the function is not a module's.
        """
        count = self.size if world_size is None else world_size
        if not 1 <= count <= self.size:
            raise ValueError(f"world_size {count} is not between 1 and the pool's {self.size}")
        call = pickle.dumps((_reference(function), args, kwargs))
        nursery, workers = self._started()
        try:
            self._submit(nursery, workers, count, timeout, call)
            results = self._collect(nursery, workers, count, timeout)
        except BaseException as error:
            if isinstance(error, WorkerError) and error.recoverable:
                _clear(workers, count)
            else:
                self._end_workers()
            raise
        _clear(workers, count)
        return results

    def log(self, rank: int) -> str:
        """What a worker has printed since it was started; that of a killed worker stays until the next job."""
        return self._nursery.reports.read(f"worker_{rank}.log") if self._nursery is not None else ""

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        self._end_workers()
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None

    def _started(self) -> tuple[Nursery, Workers]:
        if self._nursery is None:
            self._nursery = Nursery(self._preload, self._first)
        if self._workers is None:
            try:
                self._workers = self._nursery.fork(self.size)
            except BaseException:
                self.close()
                raise
        return self._nursery, self._workers

    def _end_workers(self) -> None:
        if self._workers is not None:
            self._workers.end()
            self._workers = None

    def _submit(self, nursery: Nursery, workers: Workers, count: int, timeout: float, call: bytes) -> None:
        self._jobs += 1
        store = str(nursery.folder / f"store_{self._jobs}")
        for rank, connection in enumerate(workers.connections[:count]):
            try:
                connection.send(WorkerJob(rank, count, store, timeout, (*self._first, *sys.path), call))
            except (BrokenPipeError, ConnectionResetError):
                raise nursery.reports.died(rank) from None

    def _collect(self, nursery: Nursery, workers: Workers, count: int, timeout: float) -> list[Any]:
        """Wait for every rank; after a first failure only for a moment, since the others may wait for that rank."""
        pending: dict[Any, int] = {connection: rank for rank, connection in enumerate(workers.connections[:count])}
        results: list[Any] = [None] * count
        failure: WorkerError | None = None
        deadline = time.monotonic() + timeout + _GRACE
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise nursery.reports.unfinished(failure, min(pending.values()), count, timeout)
            for connection in ready:
                rank = pending.pop(connection)
                error, results[rank] = _receive(nursery, workers, rank)
                if error is not None and failure is None:
                    failure, deadline = error, time.monotonic() + _GRACE
        if failure is None:
            return results
        raise failure if failure.recoverable else nursery.reports.unfinished(failure, failure.rank, count, timeout)


def _clear(workers: Workers, count: int) -> None:
    """Have ranks that are all done let go of a job: the threads of its process groups wake a hundred times a second, each."""
    for connection in workers.connections[:count]:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # who died since is missed at the next job
            connection.send(None)


def _receive(nursery: Nursery, workers: Workers, rank: int) -> tuple[WorkerError | None, Any]:
    """A rank's failure or its result."""
    try:
        succeeded, answer = workers.connections[rank].recv()
    except (EOFError, ConnectionResetError):
        return nursery.reports.died(rank), None
    if not succeeded:
        return nursery.reports.raised(rank, answer), None
    return None, pickle.loads(answer)  # noqa: S301 - written by our own worker


def _reference(function: str | Callable[..., Any]) -> FunctionReference:
    if isinstance(function, str):
        module, _, name = function.partition(":")
        return FunctionReference(module, name)
    if "<locals>" in function.__qualname__ or "<lambda>" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} is not a module-level function, workers cannot import it")
    return FunctionReference(function.__module__, function.__qualname__, function.__code__.co_filename)
