"""What is waited for longer than a person waits without a word: a line after ten seconds, and then one every minute.

One thread watches for all that wait, so that a wait costs microseconds: most last no longer. Who waits for the same thing at once, such as
the connections of one store, waits together, and each answer counts as one for all.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import StorageError, log_of
from . import threads

_log = log_of("mcore_rlhf.waiting")

FIRST_S, AGAIN_S = 10.0, 60.0
_TICK_S = 0.5


class _Wait:
    """What is waited for: by how many, since when in vain, and when that is said next."""

    def __init__(self) -> None:
        self.count = 0
        self.moved()

    def moved(self) -> None:
        self.since = time.monotonic()
        self.next = self.since + FIRST_S

    def is_long(self, now: float) -> bool:
        if now < self.next:
            return False
        self.next = now + AGAIN_S
        return True


class _Watch:
    def __init__(self) -> None:
        self._lock, self._waits = threading.Lock(), dict[str, _Wait]()
        self._runs = False

    def begin(self, what: str) -> None:
        with self._lock:
            wait = self._waits.setdefault(what, _Wait())
            wait.count += 1
            if not self._runs:
                with suppress(StorageError):  # then nothing is said of this wait
                    threads.begin("mcore_rlhf waiting", self._run)
                    self._runs = True

    def end(self, what: str) -> None:
        with self._lock:
            wait = self._waits[what]
            wait.count -= 1
            wait.moved()
            if not wait.count:
                del self._waits[what]

    def _run(self) -> None:
        while self._look():
            time.sleep(_TICK_S)

    def _look(self) -> bool:
        """Say what has been waited for too long; whether it is worth looking again."""
        with self._lock:
            now = time.monotonic()
            long = [(what, now - wait.since) for what, wait in self._waits.items() if wait.is_long(now)]
            self._runs = bool(self._waits)
        for what, seconds in long:
            _log.warning("waits for %s, since %.0f s", what, seconds)
        return self._runs


_watch = _Watch()


def _anew() -> None:
    global _watch  # a thread does not survive a fork, nor does what others wait for
    _watch = _Watch()


os.register_at_fork(after_in_child=_anew)


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Say, where it takes long, what is waited for meanwhile.

    Args:
        what: Completes "waits for …": what, where, and what it hangs on; the same text is the same wait.
    """
    watch = _watch
    watch.begin(what)
    try:
        yield
    finally:
        watch.end(what)
