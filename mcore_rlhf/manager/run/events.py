"""What the manager says about its work: one structured line in the log, a hook, and TensorBoard's scalars."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LOG = logging.getLogger("mcore_rlhf.manager")

Kind = Literal["save", "commit", "load", "skip", "delete", "clean", "export", "failed"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a step.

    Args:
        kind: ``save``: the live state was copied aside, and training goes on. ``commit``: the step is published. ``load``: a
            step was loaded. ``skip``: a step was passed over on resume. ``delete``, ``clean``: a step, or what a dead run had
            left, was removed. ``export``: a by-product was made. ``failed``: a save, or a by-product, was given up.
        step: The step; None where there is none.
        rank: The rank that says so.
        values: Numbers: ``stall_s``, ``seconds``, ``bytes``, ``gb_per_s``.
        text: One line for people; may be empty.
    """

    kind: Kind
    step: int | None
    rank: int
    values: Mapping[str, float] = field(default_factory=dict)
    text: str = ""

    def __str__(self) -> str:
        """``rank=0 step=50 event=commit seconds=1.2 bytes=…: text``."""
        numbers = [f"{name}={_number(value)}" for name, value in self.values.items()]
        step = [] if self.step is None else [f"step={self.step}"]
        line = " ".join([f"rank={self.rank}", *step, f"event={self.kind}", *numbers])
        return f"{line}: {self.text}" if self.text else line


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.4g}"


Hook = Callable[[Event], None]
_LEVELS: dict[Kind, int] = {"skip": logging.WARNING, "failed": logging.ERROR, "delete": logging.DEBUG}
"""Deleting logs a line of its own, with the size, wherever it is done."""


@dataclass(slots=True)
class Reporter:
    """Passes events on.

    Args:
        rank: This rank.
        hook: The user's own; it may be called from the thread that writes. What it raises is logged.
        tensorboard: Folder for scalars ``checkpoint/stall_s`` and so on, written by rank 0; None for none.
    """

    rank: int
    hook: Hook | None = None
    tensorboard: Path | None = None
    _writer: SummaryWriter | None = None

    def say(self, kind: Kind, step: int | None, text: str = "", **values: float) -> None:
        """Report an event on this rank."""
        event = Event(kind, step, self.rank, values, text)
        LOG.log(_LEVELS.get(kind, logging.INFO), "%s", event)
        for what, listener in (("TensorBoard's writer", self._scalars), ("the on_event hook", self.hook)):
            if listener is not None:
                try:
                    listener(event)
                except Exception:  # nobody who only listens breaks a save
                    LOG.exception("rank=%d: %s failed at %s", self.rank, what, event)

    def _scalars(self, event: Event) -> None:
        if self.tensorboard is None or self.rank != 0 or event.step is None:
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.tensorboard))
        for name, value in event.values.items():
            self._writer.add_scalar(f"checkpoint/{event.kind}/{name}", value, event.step)

    def close(self) -> None:
        """Flush scalars."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
