"""What goes on behind training, and what a hung file system may not keep it from: jobs on threads of their own."""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from mcore_rlhf.errors import Incomplete, StorageError
from mcore_rlhf.storage import threads
from mcore_rlhf.storage.waiting import waiting_for

from .options import LOG
from .world import World

_FIRST_POLL_S, _LONGEST_POLL_S = 0.002, 0.25
_NOTICE_S = 1.0
"""How long a rank may take to notice that another one has failed, where all that it does is wait."""
_LOOK_S = 0.25
"""How often a job is looked at that may have to be given up."""


class Left(NamedTuple):
    """A job is left to itself.

    Args:
        error: What is raised in its place; None where it has done what mattered.
    """

    error: BaseException | None


@dataclass(slots=True, eq=False)
class _Run:
    """One job, which ends or is left to itself, whichever comes first."""

    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    left: bool = False
    _deciding: threading.Lock = field(default_factory=threading.Lock)

    def end(self, error: BaseException | None, left: bool = False) -> None:
        with self._deciding:
            if not self.ended.is_set():
                self.error, self.left = error, left
                self.ended.set()


class Background:
    """Runs one job at a time on a thread of its own.

    Args:
        name: What the jobs are, for messages: ``saving into …``.

    Attributes:
        given_up: Whether it was said that the job hangs; what it raises after that is no news.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.given_up = False
        self._run: _Run | None = None
        self._guard = partial(_at_exit, self)
        atexit.register(self._guard)

    @property
    def busy(self) -> bool:
        """Whether a job is running that is waited for."""
        return self._run is not None and not self._run.ended.is_set()

    @property
    def error(self) -> BaseException | None:
        """What the job raised, as long as nobody has joined it."""
        return None if self._run is None else self._run.error

    @property
    def hung(self) -> bool:
        """Whether the job is one that hangs, as was said or as it was left for."""
        return self.given_up or (self._run is not None and self._run.left)

    def start(
        self,
        job: Callable[[], None],
        overdue: Callable[[], Left | None] | None = None,
        unstarted: Callable[[StorageError], None] = lambda error: None,
    ) -> None:
        """Run a job; the one before must have been waited for.

        Args:
            job: It.
            overdue: Asked again and again on another thread, whether the job is to be left to itself; None while all is well.
            unstarted: Hears that there is no thread for the job, which has then failed.
        """
        assert self._run is None, "wait for the last job first"
        current = self._run = _Run()

        def run() -> None:
            try:
                job()
            except BaseException as error:  # raised by the next call, on the caller's thread
                current.end(error)
            else:
                current.end(None)

        def watch(asked: Callable[[], Left | None]) -> None:
            while not current.ended.wait(_LOOK_S):
                if (left := asked()) is not None:
                    current.end(left.error, left=True)

        try:
            if overdue is not None:
                threads.begin("mcore_rlhf watch", watch, overdue)
            threads.begin("mcore_rlhf save", run)
        except StorageError as error:
            unstarted(error)
            current.end(error)

    def leave(self, error: BaseException) -> None:
        """Leave the job to itself, if it still runs: another one may be started."""
        if self._run is not None:
            self._run.end(error, left=True)

    def ended_within(self, seconds: float) -> bool:
        """Wait for the job, but no longer than that."""
        return self._run is None or self._run.ended.wait(seconds)

    def join(self) -> BaseException | None:
        """Wait for the job.

        Returns:
            What it raised, once; None where it is well, or there was none.
        """
        run, error = self._run, None
        if run is not None:
            with waiting_for(self.name):
                run.ended.wait()
            self._run, error = None, run.error
        told, self.given_up = self.given_up, False
        return None if told else error

    def close(self) -> None:
        """Nothing will be started any more."""
        atexit.unregister(self._guard)


def wait_together(world: World, background: Background) -> None:
    """Wait until the jobs of all ranks have ended; or, where one has failed, for a while. Collective.

    They ask each other how far they are, and the answers of all decide, so that all stop at once.
    """
    pause, failed_at = _FIRST_POLL_S, math.inf
    while True:
        ended, now = background.ended_within(pause), time.monotonic()
        error = background.error if ended else None
        waited = background.hung or isinstance(error, Incomplete)  # a time-out has passed already
        flags = [not ended, error is not None, waited, now - failed_at > world.timeout, now - failed_at > _NOTICE_S]
        running, failed, waited, late, noticed = world.any_rank(flags)
        if not running or late or (waited and noticed):
            return
        if (failed or waited) and failed_at == math.inf:
            failed_at = now
        pause = min(2 * pause, _LONGEST_POLL_S)


def _at_exit(background: Background) -> None:
    """The process ends without ``close``: the last save is finished all the same."""
    if background._run is None:
        return
    LOG.warning("the process ends without CheckpointManager.close(): waiting for %s", background.name)
    error = background.join()
    if error is not None:
        LOG.error("%s failed: %s", background.name, error)
