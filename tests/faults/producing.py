"""A producer of rollouts whose disk fails, and the driver that takes them."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mcore_rlhf import JournalWriter, PromptSampler, Rollout, RolloutJournal
from mcore_rlhf.errors import CheckpointError, StorageError
from mcore_rlhf.storage.appending import Pace
from tests.faults.scene import Scene, complaints


@dataclass
class Produce(Scene):
    """A producer of rollouts, some of which are confirmed, and a driver that trims meanwhile; then both again, when the disk is well."""

    number: int
    on_error: Literal["continue", "raise"] = "continue"
    _raised: list[str] = field(init=False, default_factory=list)

    def lay_out(self) -> None:
        self.base.mkdir(exist_ok=True)
        with JournalWriter(self.base, "before", pace=_PACE) as writer:
            writer.add(_rollout(0))

    def act(self) -> str:
        self._raised, self._safe = [], {0}
        try:
            writer = JournalWriter(self.live, "producer", pace=_PACE, on_error=self.on_error, on_problem=self._hear)
        except CheckpointError as error:
            self._raised.append(f"{error}")
            return "refused"
        for at in range(1, 7):
            with suppress(StorageError):
                writer.add(_rollout(at))
                writer.flush(20)
                self._safe = set(range(at + 1))
        self._drive()
        with suppress(StorageError):
            writer.close()
        return "hindered" if self._raised else "written"

    def _hear(self, problem: StorageError | None) -> None:
        self._raised += [] if problem is None else [f"{problem}"]

    def _drive(self) -> None:
        try:
            journal = RolloutJournal(self.live)
            journal.trim(lambda key: False)
        except CheckpointError as error:
            self._raised.append(f"{error}")

    def judge(self, word: str) -> list[str]:
        wrong = [found for text in self._raised for found in complaints(text, self.number, self.live) if self.number]
        with JournalWriter(self.live, "after", pace=_PACE) as writer:
            writer.add(_rollout(7))
        journal = RolloutJournal(self.live)
        taken = [journal.take(_PROMPTS[at], 0).rollouts for at in range(8)]
        lost = [at for at in (*self._safe, 7) if not taken[at]]
        wrong += [f"confirmed, and lost: {lost}"] if lost else []
        everything = journal.trim(lambda key: True)
        left = sorted(re.sub("-[0-9a-f]{16}", "", path.name) for path in (self.live / "journal").iterdir())
        wrong += [] if everything and left == ["journal.json"] else [f"left for ever: {left}"]
        return wrong


_PACE = Pace(write_s=0, sync_s=0.001, segment_nbytes=200)
_PROMPTS = PromptSampler(8, seed=1).next_batch(8)


def _rollout(at: int) -> Rollout:
    return Rollout.of(_PROMPTS[at], 0, version=0, tokens=np.arange(5))
