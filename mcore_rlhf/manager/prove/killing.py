"""The moment at which a run is killed, and what it had saved by then, seen from outside."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .command import RunningCommand
from .places import holds_ours, is_committed, is_step, number_aside, number_of, roots, step_in, written_at

Moment = Literal["step-commit", "during-save", "random"]
"""``step-commit``: as soon as step N is committed. ``during-save``: while a later step is being written. ``random``: at any
time between these, drawn from the seed."""

_PAUSE_S = 0.001

_REDRAW = 0.5


@dataclass(frozen=True, slots=True)
class Partial:
    """A step that is being written.

    Args:
        step: Its number.
        files: Files of it that are there, relative to its hidden folder.
        nbytes: Their bytes.
    """

    step: int
    files: tuple[str, ...]
    nbytes: int


class Watch:
    """Looks at a run's steps, again and again.

    Args:
        output: The run's output folder.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        self._root: Path | None = None
        self._committed: dict[Path, int] = {}

    def committed(self) -> list[int]:
        """Numbers of the steps that are whole, oldest first.

        A step that was seen whole is not opened again as long as its folder is there.
        """
        found = []
        for path in self._folders():
            number = number_of(path)
            if number is not None and (path in self._committed or is_committed(path)):
                self._committed[path] = number
                found.append(number)
        return sorted(found)

    def partial(self, after: int = -1) -> Partial | None:
        """A step beyond ``after`` of which files of a role, of the data or of RNG states are being written."""
        for path in self._folders():
            number = number_aside(path) if ".partial-" in path.name else None
            if number is not None and number > after:
                files = dict(_files_in_folders(path))
                if files:
                    return Partial(number, tuple(sorted(files)), sum(files.values()))
        return None

    def _folders(self) -> list[Path]:
        root = self._find()
        if root is None:
            return []
        try:
            names = os.listdir(root)
        except OSError:
            return []
        return [root / name for name in names if is_step(root / name)]

    def _find(self) -> Path | None:
        """The root; looked for again as long as it has no step of ours, as another folder may only be called like a trainer's step."""
        if self._root is None:
            found = next(iter(roots(self._output)), None)
            if found is None or not holds_ours(found):
                return found
            self._root = found
        return self._root


def _files_in_folders(folder: Path) -> Iterator[tuple[str, int]]:
    """Files below a folder with their sizes, except those directly in it: these are messages between ranks."""
    for parent, _, names in os.walk(folder):
        for name in names if Path(parent) != folder else ():
            path = Path(parent, name)
            try:
                yield path.relative_to(folder).as_posix(), path.stat().st_size
            except OSError:
                continue


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill that hit.

    Args:
        resumes_from: The newest step that was committed when every process was dead.
        partial: The step that was being written, or None.
        processes: How many processes were killed.
        seconds: Since the start of the run.
    """

    resumes_from: int
    partial: Partial | None
    processes: int
    seconds: float

    @property
    def phase(self) -> str:
        """Where it hit, in words."""
        if self.partial is None:
            return f"after the commit of step {self.resumes_from}, and no save was under way"
        there = f"{len(self.partial.files)} of its files were there, {self.partial.nbytes} bytes"
        return f"in the middle of the save of step {self.partial.step}: {there}"


@dataclass(frozen=True, slots=True)
class KillPlan:
    """When to strike.

    Args:
        moment: What kind of moment.
        step: Step N: nothing is killed before it is committed.
        last: The last step of the run; when that is committed it is too late.
        span: Seconds from the commit of step N to the end, as the uninterrupted run took them; for ``random``.
        rng: Draws the moment.
    """

    moment: Moment
    step: int
    last: int
    span: float
    rng: random.Random

    def strike(self, command: RunningCommand, watch: Watch, tick: Callable[[], None], attempt: int = 0) -> Kill | None:
        """Wait for the moment, and kill every process.

        Args:
            command: The run.
            watch: Looks at its steps.
            tick: Called while waiting; raises where the time is over.
            attempt: How often it was missed before: the later ones strike earlier.

        Returns:
            What it hit; None where the run came to its end, or to its last commit, or the save was over before.
        """
        committed = _wait(command, tick, lambda: max(watch.committed(), default=-1) >= self.step)
        if committed:
            command.get_ready()
            committed = self._moment(command, watch, tick, attempt)
        if not committed:
            return None
        seconds = command.seconds
        processes = command.kill()
        newest, partial = max(watch.committed(), default=-1), watch.partial()
        if newest >= self.last or (self.moment == "during-save" and partial is None):
            return None
        return Kill(newest, partial, processes, seconds)

    def _moment(self, command: RunningCommand, watch: Watch, tick: Callable[[], None], attempt: int) -> bool:
        if self.moment == "step-commit":
            return True
        if self.moment == "during-save":
            return _wait(command, tick, lambda: watch.partial(self.step) is not None)
        at = time.monotonic() + self.rng.uniform(0, self.span) * _REDRAW**attempt
        return _wait(command, tick, lambda: time.monotonic() >= at)


def _wait(command: RunningCommand, tick: Callable[[], None], until: Callable[[], bool]) -> bool:
    """Whether it became true while the command ran."""
    while not command.ended():
        if until():
            return True
        tick()
        time.sleep(_PAUSE_S)
    return False


def span(root: Path, step: int, last: int) -> float:
    """Seconds between two saves of a run, from the times of their last files; 0 where the first was deleted since."""
    times = []
    for number in (step, last):
        written = written_at(step_in(root, number))
        if not written:
            return 0.0
        times.append(max(nanoseconds for nanoseconds, _ in written.values()) / 1e9)
    return max(0.0, times[1] - times[0])
