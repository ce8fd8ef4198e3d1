"""Threads for what goes on behind somebody's back. A container that has as many processes as it may have gives no more of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..errors import StorageError

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


class Pool(ThreadPoolExecutor):
    """Threads that share work: as many as asked for, or as the system gives; one suffices.

    Args:
        threads: How many at most.
        name: What they do, for people who look at threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(max(1, threads), name)
        self._name = name

    def _adjust_thread_count(self) -> None:  # concurrent.futures.thread of Python 3.10 to 3.14: called as work comes in
        try:
            super()._adjust_thread_count()
        except RuntimeError as error:
            if not self._threads:
                raise _none(self._name, error) from error


def _none(name: str, error: RuntimeError) -> StorageError:
    return StorageError(
        f"{name}: the system gives no thread for it: {error}\n"
        "Raise the limit on processes: ulimit -u, or pids.max of the container."
    )
