"""When to save: small objects, each of which is asked at every step boundary and answers with a reason or not at all.

Intervals and deadlines are counted on the monotonic clock, so a wall clock that is set back or forward in the middle of a
run changes nothing. Ranks can see different times and signals: one rank asks, the others follow it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mcore_rlhf.errors import UsageError

from .signals import SignalFlag as SignalFlag

Clock = Callable[[], float]
"""Seconds that never run backwards."""

SLURM_END = "SLURM_JOB_END_TIME"
"""When the job ends, in seconds since 1970. Source: Slurm 23.02, manual page of ``sbatch``, output environment variables."""


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
