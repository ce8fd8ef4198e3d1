"""Schedules of a clip range, an entropy bonus or any other coefficient: a function of a position, which is saved."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from ...errors import UsageError
from .kinds import Kinds

SCHEDULES: Kinds[Schedule] = Kinds("schedule")
"""Register a schedule of your own: ``@SCHEDULES.register("name")`` above its ``@dataclass``."""


@dataclass
class Schedule(ABC):
    """A value that depends on how far training has come, and on nothing else: resuming restores it exactly."""

    position: int = field(default=0, kw_only=True)

    @abstractmethod
    def at(self, position: int) -> float:
        """The value after ``position`` steps."""

    @property
    def value(self) -> float:
        """The value now."""
        return self.at(self.position)

    def step(self, count: int = 1) -> float:
        """Advance by ``count`` steps; returns the new value."""
        self.position += count
        return self.value


@SCHEDULES.register("constant")
@dataclass
class ConstantSchedule(Schedule):
    """Always the same.

    Args:
        constant: The value.
        position: Steps taken.
    """

    constant: float

    def at(self, position: int) -> float:
        """The constant."""
        return self.constant


@dataclass
class _Ramp(Schedule):
    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"{type(self).__name__}: steps must be at least 1, not {self.steps!r}.")

    def at(self, position: int) -> float:
        """From ``start`` to ``end``, which is exact from ``steps`` on."""
        if position <= 0:
            return self.start
        return self.end if position >= self.steps else self._between(position / self.steps)

    @abstractmethod
    def _between(self, fraction: float) -> float: ...


@SCHEDULES.register("linear")
@dataclass
class LinearSchedule(_Ramp):
    """A straight line, then flat.

    Args:
        start: Value at position 0.
        end: Value from position ``steps`` on.
        steps: Length of the line; at least 1.
        position: Steps taken.
    """

    def _between(self, fraction: float) -> float:
        return self.start + (self.end - self.start) * fraction


@SCHEDULES.register("cosine")
@dataclass
class CosineSchedule(_Ramp):
    """Half a cosine, then flat.

    Args:
        start: Value at position 0.
        end: Value from position ``steps`` on.
        steps: Length of the half wave; at least 1.
        position: Steps taken.
    """

    def _between(self, fraction: float) -> float:
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * fraction)) / 2
