"""When to save: small objects, each of which is asked at every step boundary and answers with a reason or not at all.

Intervals and deadlines are counted on the monotonic clock, so a wall clock that is set back or forward in the middle of a
run changes nothing. Ranks can see different times and signals: one rank asks, the others follow it. Signals that ask a run
to stop are remembered, and looked at between two steps.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Protocol

from mcore_rlhf.errors import UsageError

Clock = Callable[[], float]
"""Seconds that never run backwards."""

SLURM_END = "SLURM_JOB_END_TIME"
"""When the job ends, in seconds since 1970. Source: Slurm 23.02, manual page of ``sbatch``, output environment variables."""

Handler = Callable[[int, FrameType | None], object]

_IMPATIENT_S = 5.0
"""A scheduler and torchrun may each pass on the same signal: what comes so soon is taken for the first one's echo."""


@dataclass(frozen=True, slots=True)
class SavePoint:
    """A step boundary at which could be saved.

    Args:
        step: Steps that are done.
        seconds_since_save: Time since the last save was started, or since the run was.
        seconds_to_deadline: Time until the job is ended; None where nobody ends it.
        signalled: Number of the signal that asks the run to stop; 0 where there is none.
        last: Whether this was the last step.
        last_save_seconds: How long the last save took until it was committed; 0 before the first one.
        step_seconds: How long a step takes.
        saves: How many saves this process has started.
    """

    step: int
    seconds_since_save: float = 0.0
    seconds_to_deadline: float | None = None
    signalled: int = 0
    last: bool = False
    last_save_seconds: float = 0.0
    step_seconds: float = 0.0
    saves: int = 0


class SavePolicy(Protocol):
    """Says when to save."""

    def wants(self, at: SavePoint) -> str | None:
        """Why to save now, for the log; None where there is no reason to."""
        ...


@dataclass(frozen=True, slots=True)
class EverySteps:
    """At every multiple of ``n`` steps, whatever was saved in between.

    Raises:
        UsageError: ``n`` is not positive.
    """

    n: int

    def __post_init__(self) -> None:
        _require_positive("the number of steps between saves", self.n)

    def wants(self, at: SavePoint) -> str | None:
        """See :class:`SavePolicy`."""
        return f"every {self.n} steps" if at.step > 0 and at.step % self.n == 0 else None


@dataclass(frozen=True, slots=True)
class EveryMinutes:
    """At the first step boundary at which the last save is this long ago.

    Raises:
        UsageError: ``minutes`` is not positive.
    """

    minutes: float

    def __post_init__(self) -> None:
        _require_positive("the number of minutes between saves", self.minutes)

    def wants(self, at: SavePoint) -> str | None:
        """See :class:`SavePolicy`."""
        return f"every {self.minutes:g} minutes" if at.seconds_since_save >= 60 * self.minutes else None


@dataclass(frozen=True, slots=True)
class BeforeDeadline:
    """Once, at the last step boundary from which a save can still be trusted to end in time.

    The time that is kept free is that of the last save times ``factor``, plus ``seconds``, plus one more step, because the
    next boundary is a step away.

    Args:
        factor: How much slower than the last one the save may be.
        seconds: Kept free in any case.

    Raises:
        UsageError: One of them is negative.
    """

    factor: float = 2.0
    seconds: float = 60.0

    def __post_init__(self) -> None:
        if self.factor < 0 or self.seconds < 0:
            raise UsageError(
                f"the margin before a deadline should not be negative, found {self.factor} × save + {self.seconds} s"
            )

    def wants(self, at: SavePoint) -> str | None:
        """See :class:`SavePolicy`."""
        if at.seconds_to_deadline is None:
            return None
        margin = self.factor * at.last_save_seconds + self.seconds + at.step_seconds
        saved_in_margin = at.saves > 0 and at.seconds_to_deadline + at.seconds_since_save <= margin
        if at.seconds_to_deadline > margin or saved_in_margin:
            return None
        return f"the deadline is in {max(at.seconds_to_deadline, 0):.0f} s"


@dataclass(frozen=True, slots=True)
class OnSignal:
    """When the run was asked to stop.

    Args:
        signals: By which signals.
    """

    signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1)

    def wants(self, at: SavePoint) -> str | None:
        """See :class:`SavePolicy`."""
        return signal.Signals(at.signalled).name if at.signalled in self.signals else None


@dataclass(frozen=True, slots=True)
class AtEnd:
    """After the last step."""

    def wants(self, at: SavePoint) -> str | None:
        """See :class:`SavePolicy`."""
        return "the last step" if at.last else None


@dataclass(frozen=True, slots=True)
class AnyOf:
    """When at least one of several policies wants it; all their reasons are given."""

    policies: Sequence[SavePolicy] = ()

    def wants(self, at: SavePoint) -> str | None:
        """See :class:`SavePolicy`."""
        reasons = [reason for policy in self.policies if (reason := policy.wants(at))]
        return ", ".join(reasons) or None


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment at which a job is ended, on the monotonic clock.

    Args:
        at: Reading of ``clock`` at that moment.
        clock: Seconds that never run backwards.
    """

    at: float
    clock: Clock = time.monotonic

    @classmethod
    def after(cls, seconds: float, clock: Clock = time.monotonic) -> Deadline:
        """The deadline that is so far from now."""
        return cls(clock() + seconds, clock)

    @classmethod
    def of_job(cls, environ: Mapping[str, str] = os.environ, clock: Clock = time.monotonic) -> Deadline | None:
        """The end of the SLURM job that this process belongs to; None outside of one, and where it has no limit.

        The wall clock is read once, here.

        Raises:
            UsageError: The environment names a moment that is not a number.
        """
        text = environ.get(SLURM_END, "").strip()
        if not text:
            return None
        try:
            end = float(text)
        except ValueError:
            raise UsageError(f"{SLURM_END}: expected seconds since 1970, found {text!r}") from None
        return cls.after(end - time.time(), clock) if end > 0 else None

    def remaining(self) -> float:
        """Seconds until then; negative afterwards."""
        return self.at - self.clock()


@dataclass(slots=True)
class SaveClock:
    """Measures what save policies ask about.

    Args:
        deadline: When the job ends, if anybody ends it.
        clock: Seconds that never run backwards.
    """

    deadline: Deadline | None = None
    clock: Clock = time.monotonic
    _saved_at: float = field(init=False)
    _boundary_at: float = field(init=False)
    _step: int | None = field(init=False, default=None)
    _step_seconds: float = field(init=False, default=0.0)
    _save_seconds: float = field(init=False, default=0.0)
    _saves: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._saved_at = self._boundary_at = self.clock()

    def at(self, step: int, *, signalled: int = 0, last: bool = False) -> SavePoint:
        """The step boundary that was just reached.

        Args:
            step: Steps that are done.
            signalled: The signal that all ranks agreed on, or 0.
            last: Whether this was the last step.
        """
        now = self.clock()
        if step != self._step:  # asking twice at one boundary does not make the step short
            self._step, self._step_seconds, self._boundary_at = step, now - self._boundary_at, now
        left = self.deadline.remaining() if self.deadline is not None else None
        since = now - self._saved_at
        return SavePoint(step, since, left, signalled, last, self._save_seconds, self._step_seconds, self._saves)

    @property
    def step_seconds(self) -> float:
        """How long the last step took; 0 before the second boundary."""
        return self._step_seconds

    def save_started(self) -> None:
        """A save starts now."""
        self._saved_at = self.clock()
        self._saves += 1

    def save_took(self, seconds: float) -> None:
        """The last save was committed, after so many seconds."""
        self._save_seconds = seconds


def _require_positive(what: str, value: float) -> None:
    if not value > 0:
        raise UsageError(f"{what} should be positive, found {value}\nLeave the policy out to switch it off.")


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
