"""What happened to everything on the way: said before anything is written, and kept in the manifest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum


class Fate(str, Enum):
    """What became of a thing."""

    KEPT = "kept"
    DERIVED = "derived"
    CHANGED = "changed"
    LOST = "lost"
    NOTE = "note"


@dataclass(slots=True)
class Report:
    """Lines of ``(fate, text)`` in the order in which they were noted."""

    lines: list[tuple[Fate, str]] = field(default_factory=list)

    def add(self, fate: Fate, text: str) -> None:
        """Note a line once."""
        if (fate, text) not in self.lines:
            self.lines.append((fate, text))

    def extend(self, other: Iterable[tuple[Fate, str]]) -> None:
        """Note the lines of another report."""
        for fate, text in other:
            self.add(fate, text)

    @property
    def lossless(self) -> bool:
        """Whether nothing was lost."""
        return not self.lost

    @property
    def lost(self) -> list[str]:
        """What was lost."""
        return [text for fate, text in self.lines if fate is Fate.LOST]

    def as_json(self) -> list[dict[str, str]]:
        """The lines as plain data."""
        return [{"fate": fate.value, "text": text} for fate, text in self.lines]
