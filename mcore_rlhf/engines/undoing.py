"""Taking back what was done, where a later part of the same load refuses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType


@dataclass(slots=True)
class Undo:
    """Runs what was noted, last first, if its ``with`` block is left by an error; otherwise forgets it."""

    _steps: list[Callable[[], object]] = field(default_factory=list)

    def note(self, step: Callable[[], object]) -> None:
        """Say how something is put back that is about to change."""
        self._steps.append(step)

    def __enter__(self) -> Undo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._steps:
            self._put_back()

    def _put_back(self) -> None:
        # Others' code: what refuses even its own former state refused the new one before it changed anything, as far
        # as anybody can tell, and the rest must be put back all the same.
        try:
            with suppress(Exception):
                self._steps.pop()()
        finally:
            if self._steps:
                self._put_back()
