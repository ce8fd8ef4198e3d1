"""What meets a fault in :mod:`.sweeps`, and how that is judged."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from tests.crash.scenes import copied


@dataclass
class Scene(ABC):
    """Something that meets a fault.

    Args:
        folder: For everything that it writes.
    """

    folder: Path

    def __post_init__(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.base, self.live = self.folder / "base", self.folder / "live"
        self.base.mkdir(parents=True)
        self.lay_out()

    def renew(self) -> None:
        """Everything is as it was."""
        copied(self.base, self.live)

    @abstractmethod
    def lay_out(self) -> None:
        """What is there before, in ``base``."""

    @abstractmethod
    def act(self) -> str:
        """Do it, in ``live``, while a call fails.

        Returns:
            What came of it, in a word.
        """

    @abstractmethod
    def judge(self, word: str) -> list[str]:
        """What is wrong with that, now that nothing fails any more."""


def complaints(text: str, number: int, root: Path) -> list[str]:
    """What an error's message lacks."""
    lacks = [] if os.strerror(number) in text else [f"does not say {os.strerror(number)!r}"]
    lacks += [] if str(root) in text else ["names no path"]
    return [f"the message {' and '.join(lacks)}: {text.splitlines()[0]}"] if lacks else []
