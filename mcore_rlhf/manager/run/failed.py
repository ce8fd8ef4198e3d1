"""What a root says of a save that failed after its newest step, until another one is committed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mcore_rlhf.errors import CheckpointError, in_a_line
from mcore_rlhf.storage.manifest import utc_time
from mcore_rlhf.storage.notes import FolderNotes

FAILED = "failed_save.json"
"""In a root: the save that failed last."""


@dataclass(frozen=True, slots=True)
class FailedSave:
    """A save that failed, so that its step is not there.

    Args:
        step: The step.
        why: One line.
        time: When, UTC, ISO 8601.
    """

    step: int
    why: str
    time: str

    @classmethod
    def note(cls, root: Path, step: int, error: BaseException) -> None:
        """Leave it in a root; a disk that takes nothing does not take this either."""
        with suppress(CheckpointError):
            FolderNotes(root).say(FAILED, cls(step, in_a_line(error), utc_time()))

    @classmethod
    def forget(cls, root: Path) -> None:
        """A step was committed."""
        FolderNotes(root).remove(FAILED)

    @classmethod
    def read(cls, root: Path) -> FailedSave | None:
        """That of a root; None where there is none, or none that can be read."""
        with suppress(CheckpointError):
            return FolderNotes(root).said(cls, FAILED)
        return None

    def __str__(self) -> str:
        return f"step {self.step} was not saved: {self.why} ({self.time})"
