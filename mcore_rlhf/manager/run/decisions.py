"""Whether to save at a step boundary, decided alike on all ranks."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from .policies import AnyOf, BeforeDeadline, Deadline, OnSignal, SaveClock, SavePolicy, SignalFlag
from .settings import ManagerOptions
from .world import World


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do at a step boundary.

    Args:
        reason: Why to save; None where there is no reason to.
        stop: Whether a signal asked the run to end.
    """

    reason: str | None
    stop: bool


class Decisions:
    """Asks the policies on one rank, and listens to signals on all.

    Args:
        world: The ranks.
        options: Which policies; see :class:`~.settings.ManagerOptions`.
    """

    def __init__(self, world: World, options: ManagerOptions) -> None:
        self.clock = SaveClock(options.deadline or Deadline.of_job())
        self._world, self._catch = world, options.catch_signals and not options.read_only
        self._policy = _with_defaults(options.save)
        self._signals = SignalFlag()

    def listen(self) -> None:
        """Catch signals from now on, where that is wanted and possible: in the main thread alone."""
        if self._catch and threading.current_thread() is threading.main_thread():
            self._signals.install()

    def close(self) -> None:
        """Put the handlers back that were there before."""
        self._signals.restore()

    def at(self, step: int, last: bool) -> Decision:
        """What to do after a step. Collective: a signal at any one rank counts for all.

        Args:
            step: Steps that are done.
            last: Whether this was the last one.
        """
        number = self._agreed_signal()
        point = self.clock.at(step, signalled=number, last=last)
        reason = self._policy.wants(point) if self._world.coordinates else None
        return Decision(self._world.from_first(reason), stop=number != 0)

    def _agreed_signal(self) -> int:
        numbers = self._signals.signals
        self._signals.noticed = self._signals.received != 0
        flags = self._world.any_flags([self._signals.received == number for number in numbers])
        return next((int(number) for number, flag in zip(numbers, flags, strict=True) if flag), 0)


def _with_defaults(policy: SavePolicy) -> SavePolicy:
    """Signals always save; a deadline does, unless the user's own policy looks after it."""
    own = policy.policies if isinstance(policy, AnyOf) else (policy,)
    deadline = () if any(isinstance(part, BeforeDeadline) for part in own) else (BeforeDeadline(),)
    return AnyOf((OnSignal(), *own, *deadline))
