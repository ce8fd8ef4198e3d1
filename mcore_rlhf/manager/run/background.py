"""What goes on behind training, and what a hung file system may not keep it from: jobs on threads of their own."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from functools import partial

from mcore_rlhf.storage.waiting import waiting_for

from .options import LOG


class Background:
    """Runs one job at a time on a thread of its own.

    Args:
        name: What the jobs are, for messages: ``saving into …``.

    Attributes:
        error: What the job raised, as long as nobody has joined it.
        given_up: Whether it was said that the job hangs; what it raises after that is no news.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: BaseException | None = None
        self.given_up = False
        self._thread: threading.Thread | None = None
        self._guard = partial(_at_exit, self)
        atexit.register(self._guard)

    @property
    def busy(self) -> bool:
        """Whether a job is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None]) -> None:
        """Run a job; the one before must have been waited for."""
        assert self._thread is None, "wait for the last job first"

        def run() -> None:
            try:
                job()
            except BaseException as error:  # raised by the next call, on the caller's thread
                self.error = error

        self._thread = threading.Thread(target=run, name="mcore_rlhf save", daemon=True)
        self._thread.start()

    def ended_within(self, seconds: float) -> bool:
        """Wait for the job, but no longer than that."""
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.busy

    def join(self) -> BaseException | None:
        """Wait for the job.

        Returns:
            What it raised, once; None where it is well, or there was none.
        """
        if self._thread is not None:
            with waiting_for(self.name):
                self._thread.join()
            self._thread = None
        error, self.error = self.error, None
        told, self.given_up = self.given_up, False
        return None if told else error

    def close(self) -> None:
        """Nothing will be started any more."""
        atexit.unregister(self._guard)


def _at_exit(background: Background) -> None:
    """The process ends without ``close``: the last save is finished all the same."""
    if background._thread is None:
        return
    LOG.warning("the process ends without CheckpointManager.close(): waiting for %s", background.name)
    error = background.join()
    if error is not None:
        LOG.error("%s failed: %s", background.name, error)
