"""Kill a run in the middle of a save, as a power cut or the OOM killer would."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

_PAUSE = 0.0005
_ENOUGH = 2
"""Files that make a save half done: the first is there and the last is not."""


class KillDuringSave:
    """While it is entered, waits for files of a step to appear, and then sends SIGKILL to all processes of a run at once.

    Args:
        root: The manager's folder.
        step: The step; its files lie in a hidden sibling, ``.global_step_<step>.partial-…``, until it is committed.
        pids: Gives the processes.
    """

    def __init__(self, root: Path, step: int, pids: Callable[[], Sequence[int]]) -> None:
        self._root, self._pattern, self._pids = root, f".global_step_{step}.partial-*/**/*.pt", pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.seen: list[str] = []
        """Files that were there when it struck, relative to the root; empty if it did not."""

    def __enter__(self) -> KillDuringSave:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            files = list(self._root.glob(self._pattern))
            if len(files) >= _ENOUGH:
                for pid in self._pids():
                    os.kill(pid, signal.SIGKILL)
                self.seen = [str(file.relative_to(self._root)) for file in files]
                return
            time.sleep(_PAUSE)
