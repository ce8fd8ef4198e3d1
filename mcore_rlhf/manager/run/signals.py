"""Signals that ask a run to stop are remembered, and looked at between two steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType

from mcore_rlhf.errors import UsageError

Handler = Callable[[int, FrameType | None], object]
_IMPATIENT_S = 5.0
"""A scheduler and torchrun may each pass on the same signal: what comes so soon is taken for the first one's echo."""


class SignalFlag:
    """Remembers the first signal of this process that asks it to stop. Use it in a ``with`` block, or install it.

    Handlers that were there before are still called, but whatever they raise is held back: an exception in the middle
    of a collective would leave the other ranks waiting. :attr:`held_back` keeps it.

    A run that never looks can still be ended: a further signal, some seconds later, does what it would have done without
    us, unless :attr:`noticed` says that the first one is being obeyed.

    Args:
        signals: Which signals; by default SIGTERM (schedulers, torchrun) and SIGUSR1 (``sbatch --signal``).
    """

    def __init__(self, signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        self.signals = tuple(signals)
        self.received = 0
        """Number of the first signal that came; 0 where none did."""
        self.noticed = False
        """Whether somebody has seen the signal, and will end the run."""
        self.held_back: list[BaseException] = []
        self._received_at = 0.0
        self._before: dict[int, Handler | int | None] = {}

    def install(self) -> SignalFlag:
        """Start listening; a second call does nothing.

        Raises:
            UsageError: This is not the main thread, where alone Python can set handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            name = threading.current_thread().name
            raise UsageError(
                f"signals can be caught in the main thread only, and this is thread {name!r}\n"
                "Install the flag in the main thread, or run without saving on signals."
            )
        for number in self.signals:
            if number not in self._before:
                self._before[number] = signal.signal(number, self._remember)
        return self

    def restore(self) -> None:
        """Stop listening, and put the handlers back that were there before.

        Where somebody has set a handler after us, theirs stays; it may still call ours, which passes signals on.
        """
        for number, handler in list(self._before.items()):
            if signal.getsignal(number) == self._remember and handler is not None:
                signal.signal(number, handler)
                del self._before[number]

    def clear(self) -> None:
        """Forget the signal that came."""
        self.received, self.noticed = 0, False

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.received and not self.noticed and time.monotonic() - self._received_at > _IMPATIENT_S:
            self.restore()
            os.kill(os.getpid(), number)
            return
        if not self.received:
            self.received, self._received_at = number, time.monotonic()
        before = self._before.get(number)
        if not callable(before):
            return
        try:
            before(number, frame)
        except BaseException as error:  # even SystemExit: the run ends at the next step boundary, after a save
            self.held_back.append(error)

    def __enter__(self) -> SignalFlag:
        return self.install()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
