"""Runs of transformers' Trainer whose steps are committed, killed while they save, and gone on with; each in a fork of this process.

``python -m tests.reference.seam_worker FOLDER SEED MOST`` kills a run at as many of the calls that change the file system while a step
is saved, and where that is all of them at some moments in between; it prints as JSON what was there after each, and what the run that
went on saw.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

from mcore_rlhf.integrations.transformers_trainer import StepOptions, with_checkpoints
from mcore_rlhf.manager.runs import run_at
from mcore_rlhf.manager.trainer_steps import TrainerSteps
from mcore_rlhf.storage.manifest import Manifest, check
from tests.trainers import hf_runs

LAST, EVERY = 5, 2
"""Steps of a run; it saves at every second one, and at the end."""
_CHANGES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate"}
_MOMENTS = 12
PLAIN = transformers.Trainer
ALONE = StepOptions(timeout=1.0)
"""Says that the run is Trainer's alone."""


def train(
    folder: Path, seed: int, which: Any = None, options: StepOptions | None = None, **arguments: Any
) -> hf_runs.Seen:
    """A run from other weights for every seed; ``which`` is what ``train`` is given."""
    base: Any = PLAIN if options is ALONE else with_checkpoints(PLAIN, options)

    class Told(base):
        def train(self, resume_from_checkpoint: Any = None, *args: Any, **named: Any) -> Any:
            return super().train(which, *args, **named)

    hf_runs.transformers.Trainer = (
        Told  # its own: transformers puts another module in its place as Trainer is first asked for
    )
    try:
        return hf_runs.train(hf_runs.model(seed), folder, **{"max_steps": LAST, "save_steps": EVERY, **arguments})
    finally:
        hf_runs.transformers.Trainer = PLAIN


class Killer:
    """Counts what changes the file system while a step is saved, and kills this process at one of them."""

    def __init__(self, at: int) -> None:
        self.at, self.count, self.saving = at, 0, False
        sys.addaudithook(self._heard)
        save = TrainerSteps.save

        def counted(steps: TrainerSteps, *args: Any, **named: Any) -> Path | None:
            self.saving = True
            try:
                return save(steps, *args, **named)
            finally:
                self.saving = False

        TrainerSteps.save = counted  # type: ignore[method-assign]

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.saving or event not in _CHANGES or (event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def forked(action: Callable[[], object], limit: float = 60.0) -> tuple[int, Any]:
    """Do something in a child: how it ended, and what it returned."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(limit))
            os.dup2(2, 1)
            os.write(write, json.dumps(action()).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    return os.waitpid(child, 0)[1], json.loads(text) if text else None


def counted(folder: Path) -> tuple[int, float]:
    """How many changes a run makes while it saves, and how long it takes."""
    killer, began = Killer(-1), time.monotonic()
    train(folder, 1)
    return killer.count, time.monotonic() - began


def there(folder: Path) -> list[tuple[int, str]]:
    """Every step that Trainer's own resume would see, and what is wrong with it: nothing, if it is as its manifest says."""
    found = []
    for path in sorted(folder.glob("checkpoint-*")):
        manifest = Manifest.read(path / "mcore_rlhf.json")
        problems = check(path, manifest)
        lies = {one.relative_to(path).as_posix() for one in path.rglob("*") if one.is_file()} - {"mcore_rlhf.json"}
        more = sorted(lies ^ manifest.files.keys())
        found.append((int(path.name.partition("-")[2]), problems.describe() if problems else " ".join(more)))
    run = run_at(folder)
    assert [step.step for step in run.listed() if step.resumable] == [step for step, _ in found] if run else not found
    return found


def killed(folder: Path, at: int, after: float) -> dict[str, Any]:
    """Kill a run at a change, or after some seconds, and go on: with us, or every second time with Trainer alone."""

    def run() -> object:
        if after:
            signal.setitimer(signal.ITIMER_REAL, after)
        else:
            Killer(at)
        return train(folder, 1)

    status, _ = forked(run)
    _, found = forked(lambda: there(folder))
    alone = bool(found) and at % 2 == 1
    weights = 9 if found else 1  # with nothing to load, it begins with those of the first run
    code, seen = forked(lambda: train(folder, weights, True if alone else "auto", ALONE if alone else None))
    left = [path.name for path in folder.iterdir() if ".partial-" in path.name or ".old-" in path.name]
    return {
        "at": at, "after": after, "status": status, "there": found, "code": code, "seen": seen, "alone": alone, "left": left,
    }  # fmt: skip


def main(folder: Path, seed: int, most: int) -> list[dict[str, Any]]:
    """All of it, or as many kills as are asked for."""
    hf_runs.imported(folder / "imported")
    _, whole = forked(lambda: train(folder / "whole", 1, options=ALONE))
    _, (changes, seconds) = forked(lambda: counted(folder / "counted"))
    chance = random.Random(seed)
    points = sorted(chance.sample(range(1, changes + 1), min(most, changes)))
    done = [killed(folder / f"at-{at}", at, 0.0) for at in points]
    moments = [chance.uniform(0.0, seconds) for _ in range(_MOMENTS if most >= changes else 0)]
    done += [killed(folder / f"after-{n}", 2 * n, moment) for n, moment in enumerate(moments)]
    return [{"whole": whole, "changes": changes}, *done]


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
