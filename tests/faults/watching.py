"""A watcher whose disk fails while it looks, and goes on looking when that is well again."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.manager import watch
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.retention import KeepLast
from mcore_rlhf.manager.watch import Watcher, WatchEvent
from mcore_rlhf.storage.paths import ReadablePath, storage_error
from tests.faults.scene import Scene, complaints
from tests.unit.manager.roots import make_step

_SAYS = "import sys; open(sys.argv[1], 'a').write(sys.argv[2])"
_LOOKS = 8


@dataclass
class Watch(Scene):
    """Three steps, of which two results are kept; a command that runs on each, outside of what fails."""

    number: int
    _watcher: Watcher | None = field(init=False, default=None)
    _heard: list[WatchEvent] = field(init=False, default_factory=list)
    _raised: str = field(init=False, default="")

    def lay_out(self) -> None:
        watch._LONGEST_PAUSE_S = 0.0
        for step in (1, 2, 3):
            make_step(self.base / "run", step, nbytes=100)

    def renew(self) -> None:
        super().renew()
        self._heard, self._raised, self._watcher = [], "", None
        self._said.unlink(missing_ok=True)

    @property
    def _said(self) -> Path:
        return self.folder / "said"

    def _convert(self, step: int, target: ReadablePath) -> None:
        assert isinstance(target, Path)
        try:
            shutil.rmtree(target, ignore_errors=True)
            source = steps.step_folder(self.live / "run", step)
            for file in sorted(path for path in source.rglob("*") if path.is_file()):
                (target / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
                (target / file.relative_to(source)).write_bytes(file.read_bytes())
        except OSError as error:
            raise storage_error(error, target, "convert") from error

    def _made(self) -> Watcher:
        command = f'{sys.executable} -S -c "{_SAYS}" {self._said} {{step}}'
        ends = (self.live / "run", self.live / "out", self._convert)
        return Watcher(*ends, keep=(KeepLast(2),), command=command, settle=0.0, say=self._heard.append)

    def act(self) -> str:
        try:
            self._watcher = self._made()
        except CheckpointError as error:
            self._raised = f"{error}"
            return "refused"
        for _ in range(_LOOKS):
            self._watcher.look()
        return "hindered" if any(event.kind == "failed" for event in self._heard) else "done"

    def judge(self, word: str) -> list[str]:
        wrong = complaints(self._raised, self.number, self.live) if self._raised else []
        for watcher in (self._watcher or self._made(), None):  # the same goes on, and then the next one
            watcher = watcher or self._made()
            for _ in range(_LOOKS):
                watcher.look()
            watcher.close()
        found = [step.step for step in steps.committed(self.live / "out")]
        wrong += [] if found == [2, 3] else [f"{word}, and the results are {found}"]
        ran = sorted(self._said.read_text()) if self._said.exists() else []
        wrong += [] if ran == ["2", "3"] else [f"{word}, and the command ran on {ran}"]
        left = sorted(os.listdir(self.live / "out" / ".watch"))
        return wrong + ([] if left == ["step-2.json", "step-3.json"] else [f"left for ever: {left}"])
