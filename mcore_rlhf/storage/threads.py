"""Threads for what goes on behind somebody's back. A container that has as many processes as it may have gives no more of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from ..errors import StorageError

P = ParamSpec("P")
T = TypeVar("T")
_BEGINS_S = 30.0
"""After so long a thread is given up that the system has given, and that has not begun."""


class _Begun(threading.Event):
    """Set by a thread that begins. One that then finds no memory ends before that, and Python would wait for it without end.

    Source: CPython 3.10 to 3.14, ``threading.Thread.start`` and ``_bootstrap_inner``.
    """

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has begun.

        Raises:
            RuntimeError: It has not.
        """
        if not super().wait(_BEGINS_S):
            raise RuntimeError(f"one was given, and has not begun within {_BEGINS_S:g} s: it may have found no memory")
        return True


class _Thread(threading.Thread):
    """One that either does its job, or was said not to."""

    def __init__(self, name: str, job: Callable[..., object], args: tuple[object, ...]) -> None:
        super().__init__(target=job, name=name, args=args, daemon=True)
        self._started, self._taken = _Begun(), threading.Lock()

    def start(self) -> None:
        try:
            super().start()
        except RuntimeError:
            if self._taken.acquire(blocking=False):  # else it has begun at this very moment
                raise

    def run(self) -> None:
        if self._taken.acquire(blocking=False):
            super().run()


def begin(name: str, job: Callable[..., object], *args: object) -> threading.Thread:
    """Run something on a thread of its own, which does not keep the process from ending.

    Args:
        name: What it is, for people who look at threads.
        job: It.
        args: For it.

    Raises:
        StorageError: The system gives no thread; nothing of the job was done.
    """
    thread = _Thread(name, job, args)
    try:
        thread.start()
    except RuntimeError as error:
        raise _none(name, error) from error
    return thread


def begin_some(count: int, name: str, job: Callable[..., object], *args: object) -> list[threading.Thread]:
    """The same on several threads, or on as many as the system gives.

    Raises:
        StorageError: It gives none.
    """
    threads = list[threading.Thread]()
    for _ in range(count):
        try:
            threads.append(begin(name, job, *args))
        except StorageError:
            if not threads:
                raise
            break
    return threads


class Pool(Executor):
    """Threads that share work: as many as asked for, or as the system gives; one suffices.

    Args:
        threads: How many at most.
        name: What they do, for people who look at threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._most, self._name = max(1, threads), name
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = list[threading.Thread]()
        self._lock, self._undone = threading.Lock(), 0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have something done by the next thread that is free.

        Raises:
            StorageError: The system gives no thread at all.
        """
        future = Future[T]()
        with self._lock:
            if not self._most:
                raise RuntimeError(f"{self._name}: there is work, and its threads were let go")
            if len(self._threads) < min(self._most, self._undone + 1):
                self._begin_one()
            self._undone += 1
        self._work.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """No more work comes: threads end when what is there is done, or at once what nobody has begun is cancelled."""
        with self._lock:
            self._most = 0
        with suppress(Empty):
            while cancel_futures:
                if (task := self._work.get_nowait()) is not None:
                    task[0].cancel()
        self._work.put(None)
        for thread in self._threads if wait else ():
            thread.join()

    def _begin_one(self) -> None:
        try:
            self._threads.append(begin(self._name, self._run))
        except StorageError:
            if not self._threads:
                raise
            self._most = len(self._threads)  # each further one would be waited for as long

    def _run(self) -> None:
        while (task := self._work.get()) is not None:
            _do(*task)
            del task  # what it holds goes now, and not when the next one comes
            with self._lock:
                self._undone -= 1
        # To the next one: an interrupt may have come between a thread's beginning and its being listed.
        self._work.put(None)


def _do(future: Future[T], task: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            result = task()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)


def _none(name: str, error: RuntimeError) -> StorageError:
    return StorageError(
        f"{name}: the system gives no thread for it: {error}\n"
        "Raise the limit on processes: ulimit -u, or pids.max of the container."
    )
