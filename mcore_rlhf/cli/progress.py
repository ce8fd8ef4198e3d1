"""How far long work has come: a bar on a terminal, a line every few seconds elsewhere, always on standard error."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from mcore_rlhf.errors import printable
from mcore_rlhf.execution.run import Progress

from .guard import PROGRESS
from .logs import QUIET, SHOWN
from .output import duration, of_total, rate, size

_BAR_EVERY_S = 0.1
_LINE_EVERY_S = 5.0
_JSON_EVERY_S = 1.0


@contextmanager
def shown_progress(stages: int = 0) -> Iterator[Progress]:
    """The progress of a command, shown until the end of the block.

    Args:
        stages: How many stages there will be; 0 where nobody knows.
    """
    reporter = _reporter()
    reporter.stages = stages
    try:
        yield reporter
    except BaseException:
        reporter.close(completed=False)
        raise
    reporter.close(completed=True)


def _reporter() -> _Reporter:
    context = click.get_current_context(silent=True)
    told = {} if context is None else context.meta
    wanted = "none" if told.get(QUIET) else told.get(PROGRESS, "auto")
    if wanted == "none":
        return _Reporter()
    if wanted == "json":
        return _JsonLines()
    return _Bar() if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else _Lines()


class _Reporter(Progress):
    """Counts bytes, and shows them now and then; this one shows nothing."""

    every_s: float = float("inf")
    stages: int = 0

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._text, self._total, self._done, self._number = "", 0, 0, 0
        self._began = self._shown = time.monotonic()

    def stage(self, text: str, total_bytes: int) -> None:
        """End the stage before, and begin another."""
        self._end()
        with self._lock:
            self._number += 1
            numbered = f" (stage {self._number} of {max(self._number, self.stages)})" if self.stages > 1 else ""
            self._text, self._total, self._done = printable(f"{text}{numbered}"), total_bytes, 0
            self._began = self._shown = time.monotonic()
        SHOWN.info("%s: %s", self._text, size(total_bytes) if total_bytes else "…")
        self._begin_stage()

    def advance(self, nbytes: int) -> None:
        """Count, and show what was counted if the last time is long enough ago. Totals are estimates: never more than they say."""
        with self._lock:
            self._done = min(self._done + nbytes, self._total) if self._total else self._done + nbytes
            now = time.monotonic()
            if now - self._shown < self.every_s:
                return
            self._shown = now
        self._show()

    def note(self, text: str) -> None:
        """Say it at once."""
        SHOWN.info("%s", text)
        self._say(text)

    def close(self, *, completed: bool) -> None:
        """End the last stage."""
        if completed:
            self._end()

    def _end(self) -> None:
        if self._text:
            seconds = time.monotonic() - self._began
            SHOWN.info("%s: done, %s", self._text, self._moved(seconds))
            self._end_stage(seconds)
        self._text = ""

    def _moved(self, seconds: float) -> str:
        return (
            f"{size(self._done)} in {duration(seconds)}, {rate(self._done, seconds)}"
            if self._done
            else duration(seconds)
        )

    def _left(self, seconds: float) -> float | None:
        """Seconds that are left, at the speed so far; None where nobody knows."""
        return seconds * (self._total - self._done) / self._done if self._total and self._done else None

    def _begin_stage(self) -> None:
        pass

    def _show(self) -> None:
        pass

    def _end_stage(self, seconds: float) -> None:
        pass

    def _say(self, text: str) -> None:
        try:
            print(printable(text), file=sys.stderr, flush=True)
        except OSError:
            self.every_s = float("inf")  # nobody listens any more; the work goes on


class _JsonLines(_Reporter):
    """A JSON object a line, for schedulers."""

    every_s = _JSON_EVERY_S

    def _begin_stage(self) -> None:
        self._tell(done=False)

    def _show(self) -> None:
        self._tell(done=False)

    def _end_stage(self, seconds: float) -> None:
        self._tell(done=True)

    def note(self, text: str) -> None:
        """As an object of its own."""
        SHOWN.info("%s", text)
        self._say(json.dumps({"note": text}))

    def _tell(self, *, done: bool) -> None:
        seconds = time.monotonic() - self._began
        left = 0.0 if done else self._left(seconds)
        facts = {
            "stage": self._text.partition(" (stage ")[0], "number": self._number, "stages": max(self._number, self.stages),
            "bytes": self._done, "total": self._total or None, "seconds": round(seconds, 3),
            "left_seconds": None if left is None else round(left, 3), "done": done,
        }  # fmt: skip
        self._say(json.dumps(facts))


class _Lines(_Reporter):
    """Plain lines, for logs."""

    every_s = _LINE_EVERY_S

    def _begin_stage(self) -> None:
        self._say(f"{self._text}: {size(self._total)}" if self._total else f"{self._text} …")

    def _show(self) -> None:
        seconds = time.monotonic() - self._began
        if not self._total:
            self._say(f"{self._text}: {size(self._done)}, {rate(self._done, seconds)}")
            return
        left = self._left(seconds) or 0.0
        share = 100 * self._done // self._total
        self._say(
            f"{self._text}: {of_total(self._done, self._total)} ({share} %), {rate(self._done, seconds, self._total)}, "
            f"{duration(left)} left"
        )

    def _end_stage(self, seconds: float) -> None:
        self._say(f"{self._text}: done, {self._moved(seconds)}")


class _Bar(_Reporter):
    """A bar, with bytes, speed and the time that is left."""

    every_s = _BAR_EVERY_S

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[moved]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True, markup=False, highlight=False),
            transient=True,
        )
        self._task: Any = None
        self._bar.start()

    def _say(self, text: str) -> None:
        self._bar.console.print(printable(text))

    def _begin_stage(self) -> None:
        self._task = self._bar.add_task(self._text, total=self._total or None, moved="")

    def _show(self) -> None:
        seconds = time.monotonic() - self._began
        done = of_total(self._done, self._total) if self._total else size(self._done)
        self._bar.update(self._task, completed=self._done, moved=f"{done}, {rate(self._done, seconds, self._total)}")

    def _end_stage(self, seconds: float) -> None:
        self._bar.remove_task(self._task)

    def close(self, *, completed: bool) -> None:
        """End the last stage and take the bar off the screen."""
        super().close(completed=completed)
        self._bar.stop()
