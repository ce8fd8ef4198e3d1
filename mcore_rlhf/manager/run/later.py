"""Saves that failed and are tried again at a later step: what was copied in waves is there no more, so what there is then is saved.

Of several worlds none knows whether the others copy in waves, nor may one save alone: where any of them may, each save that failed comes
again as the next one that all of them are told to make.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from mcore_rlhf.errors import UsageError, in_a_line

from .options import ManagerOptions, Reporter

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


@dataclass(slots=True)
class RetryCount:
    """Counts them, on all ranks alike.

    Args:
        options: The manager's.
        reporter: Hears of a save that is to come again.
        in_waves: Whether any rank copies the save at hand in waves; of several worlds, whether any may.
    """

    options: ManagerOptions
    reporter: Reporter
    in_waves: bool = False
    _tried: int = 0
    _waits: bool = False
    _failed_at: float = math.inf

    @property
    def may_be_in_waves(self) -> bool:
        """Whether it matters."""
        return self.options.max_host_memory is not None and self.options.save_retries > 0

    @property
    def retries(self) -> int:
        """How often the save at hand may be tried again behind training."""
        return 0 if self.in_waves else self.options.save_retries

    def takes(self, step: int, error: Exception) -> bool:
        """Whether a save that failed comes again; where it has been tried as often as it may, it does not.

        Args:
            step: The one that is being saved.
            error: What it failed of; a mistake in the calls would come again as well.
        """
        if not self.in_waves or isinstance(error, UsageError) or self._tried == self.options.save_retries:
            self.in_waves, self._tried, self._waits = False, 0, False
            return False
        self._tried, self._waits = self._tried + 1, True
        text = f"{in_a_line(error)}; tried again with what there is at a later step ({self._tried} of {self.options.save_retries})"
        self.reporter.say("retry", step, text, attempt=self._tried)
        return True

    def is_due(self, has_failed: bool) -> bool:
        """Whether one is to come now; of this rank alone.

        Args:
            has_failed: Whether the save at hand has failed here, which nobody has been told yet.
        """
        if self.options.worlds is not None or not (self._waits or (self.in_waves and has_failed)):
            self._failed_at = math.inf
            return False
        now = time.monotonic()
        self._failed_at = min(self._failed_at, now)
        pause = min(math.ldexp(_FIRST_PAUSE_S, max(0, self._tried - self._waits)), _LONGEST_PAUSE_S)
        return now >= self._failed_at + pause

    def begins(self, in_waves: bool) -> None:
        """A save goes on behind training from here."""
        self.in_waves, self._waits, self._failed_at = in_waves, False, math.inf

    def ended_well(self) -> None:
        """The last one did, if any was begun since one failed."""
        if not self._waits:
            self._tried = 0
