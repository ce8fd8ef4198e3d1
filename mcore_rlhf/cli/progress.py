"""How far long work has come: a bar on a terminal, a line every few seconds elsewhere, always on standard error."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mcore_rlhf.convert import Progress
from mcore_rlhf.errors import printable

from .output import duration, rate, size

_BAR_EVERY_S = 0.1
_LINE_EVERY_S = 5.0


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """The progress of a command, shown until the end of the block."""
    on_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    reporter: _Bar | _Lines = _Bar() if on_terminal else _Lines()
    try:
        yield reporter
    except BaseException:
        reporter.close(completed=False)
        raise
    reporter.close(completed=True)


class _Reporter(Progress):
    """Counts bytes, and shows them now and then."""

    every_s: float

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._text, self._total, self._done = "", 0, 0
        self._began = self._shown = time.monotonic()

    def stage(self, text: str, total_bytes: int) -> None:
        """End the stage before, and begin another."""
        self._end()
        with self._lock:
            self._text, self._total, self._done = text, total_bytes, 0
            self._began = self._shown = time.monotonic()
        self._begin_stage()

    def advance(self, nbytes: int) -> None:
        """Count, and show what was counted if the last time is long enough ago."""
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._shown < self.every_s:
                return
            self._shown = now
        self._show()

    def close(self, *, completed: bool) -> None:
        """End the last stage."""
        if completed:
            self._end()

    def _end(self) -> None:
        if self._text:
            self._end_stage(time.monotonic() - self._began)
        self._text = ""

    def _begin_stage(self) -> None:
        raise NotImplementedError

    def _show(self) -> None:
        raise NotImplementedError

    def _end_stage(self, seconds: float) -> None:
        raise NotImplementedError


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
        left = seconds * max(0, self._total - self._done) / max(1, self._done)
        share = min(100, 100 * self._done // self._total)
        self._say(
            f"{self._text}: {size(self._done)} of {size(self._total)} ({share} %), {rate(self._done, seconds)}, "
            f"{duration(left)} left"
        )

    def _end_stage(self, seconds: float) -> None:
        moved = f"{size(self._done)} in {duration(seconds)}, {rate(self._done, seconds)}"
        self._say(f"{self._text}: done, {moved if self._done else duration(seconds)}")

    def _say(self, text: str) -> None:
        try:
            print(printable(text), file=sys.stderr, flush=True)
        except OSError:
            self.every_s = float("inf")  # nobody listens any more; the work goes on


class _Bar(_Reporter):
    """A bar, with bytes, speed and the time that is left."""

    every_s = _BAR_EVERY_S

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TextColumn("{task.fields[speed]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True, markup=False, highlight=False),
            transient=True,
        )
        self._task: Any = None
        self._bar.start()

    def _begin_stage(self) -> None:
        self._task = self._bar.add_task(self._text, total=self._total or None, speed="")

    def _show(self) -> None:
        speed = rate(self._done, time.monotonic() - self._began)
        self._bar.update(self._task, completed=self._done, speed=speed)

    def _end_stage(self, seconds: float) -> None:
        self._bar.remove_task(self._task)

    def close(self, *, completed: bool) -> None:
        """End the last stage and take the bar off the screen."""
        super().close(completed=completed)
        self._bar.stop()
