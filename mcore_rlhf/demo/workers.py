"""Resident processes for distributed jobs on one machine, for tests and the demonstration.

    with WorkerPool(8) as pool:
        losses = pool.run(train, config, world_size=4, timeout=60)      # one result per rank

Importing torch and Megatron costs seconds, so one process imports, the workers are forked from it, and they serve
many jobs, of any world size up to their number. A worker that dies or hangs never hangs the caller: all workers are
killed, the error says which rank and where it stood, and the next job gets new ones.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

from mcore_rlhf.demo.worker_nursery import Nursery, Workers
from mcore_rlhf.demo.worker_process import FunctionReference, Job
from mcore_rlhf.demo.worker_reports import WorkerError

__all__ = ["WorkerError", "WorkerPool"]

_PRELOAD = "mcore_rlhf.demo.trainer"
_GRACE = 3.0


class WorkerPool:
    """Processes that keep torch and Megatron imported and run jobs over gloo.

    The processes start with the first job (or on entering the pool) and end with the pool, also when its owner is
    killed. They see no GPU.

    Args:
        size: Number of processes, the largest world size.
        preload: Module imported once, before the processes are forked from one another; it must not start threads.
    """

    def __init__(self, size: int, preload: str = _PRELOAD) -> None:
        self.size = size
        self._preload = preload
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
            return self._collect(nursery, workers, count, timeout)
        except BaseException as error:
            if not (isinstance(error, WorkerError) and error.recoverable):
                self._end_workers()
            raise

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
            self._nursery = Nursery(self._preload)
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
                connection.send(Job(rank, count, store, timeout, tuple(sys.path), call))
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
