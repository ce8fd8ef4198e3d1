"""A run's history: its events, a JSON line each, for whoever asks later what happened."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rlhf.storage.beneath import append, make_folder

if TYPE_CHECKING:
    from .options import Event

EVENTS_NAME = "events.jsonl"
"""Where ``mcore-rlhf report`` looks for a run's events, in its root."""


@dataclass(frozen=True, slots=True)
class EventLog:
    """A hook that keeps the events of rank 0: ``ManagerOptions(on_event=EventLog(root / "events.jsonl"))``.

    Args:
        path: The file; what is there stays, as a run that resumes goes on in it.
    """

    path: Path

    def __call__(self, event: Event) -> None:
        """Append an event, with the time.

        Raises:
            OSError: It cannot be written, or is a link.
        """
        if event.rank != 0:
            return
        line = {
            "time": time.time(), "kind": event.kind, "step": event.step, "rank": event.rank,
            "values": dict(event.values), "text": event.text,
        }  # fmt: skip
        make_folder(self.path.parent)
        append(self.path, f"{json.dumps(line)}\n".encode())
