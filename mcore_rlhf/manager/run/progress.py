"""How far a save is that goes on behind training, so that one which stands still is noticed, named and left to itself."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mcore_rlhf.storage.paths import human

from .commit import Stopped


@dataclass(slots=True)
class SaveProgress:
    """What a save did last, and when. One thread moves it on, others look at it.

    Attributes:
        where: What it was at last: a file relative to the step's folder, or the step's folder.
        nbytes: How much was written.
        given_up: Whether nobody waits for it any more. What it has copied may since have been overwritten: it ends at its next move.
    """

    where: str = ""
    nbytes: int = 0
    given_up: bool = False
    _moved: float = field(default_factory=time.monotonic)

    @property
    def still_s(self) -> float:
        """For how many seconds it has not moved."""
        return time.monotonic() - self._moved

    def moved(self, where: str | None = None, nbytes: int = 0) -> None:
        """It goes on.

        Args:
            where: What it begins with; None for what it was at.
            nbytes: Bytes that were just written.

        Raises:
            Stopped: It was given up.
        """
        if self.given_up:
            raise Stopped("this save was given up while it stood still")
        self.where = self.where if where is None else where
        self.nbytes += nbytes
        self._moved = time.monotonic()

    @contextmanager
    def unhurried(self) -> Iterator[None]:
        """Something is done that takes its time, and says nothing."""
        self._moved = math.inf
        yield
        self._moved = time.monotonic()

    def __str__(self) -> str:
        """``the last that it did was actor/state.pt, after 1.2 GB``."""
        return f"the last that it was at is {self.where or 'its beginning'}, after {human(self.nbytes)}"
