"""``mcore-rlhf demo``: GRPO on real Megatron on the CPU, killed in the middle of a save, resumed and reshaped, with proof."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo.killing import KillDuringSave
from mcore_rlhf.demo.placed_state import assembled
from mcore_rlhf.demo.proof import Conversion, DemoReport, Row, count_equal, render, table
from mcore_rlhf.demo.rl import continuing
from mcore_rlhf.demo.rl.continuing import Stretch
from mcore_rlhf.demo.rl.metrics import read_metrics
from mcore_rlhf.demo.rl.options import Options
from mcore_rlhf.demo.workers import WorkerError, WorkerPool
from mcore_rlhf.errors import StorageError, Unsupported, UsageError
from mcore_rlhf.families.source import ReadOptions, WriteOptions
from mcore_rlhf.manager.run import steps
from mcore_rlhf.storage.paths import local_path

if TYPE_CHECKING:
    import torch

    from mcore_rlhf.demo.placed_state import StateKey

__all__ = ["DemoReport", "render", "run_demo", "table"]

SAVED_AT, KILLED_AT, END = 10, 20, 24
AFTER = 2
"""Steps that a reshaped run goes on for."""
WORLD = 2
MODEL = Options(tp=2, steps=END, hidden_size=128, dropout=0.1)
_JOB_TIMEOUT = 300.0
_ATTEMPTS = 5


def run_demo(folder: Path | None = None, say: Callable[[str], None] = lambda line: None) -> DemoReport:
    """Train, kill, resume, reshape to other layouts and back, and compare with the uninterrupted run.

    Args:
        folder: Where the checkpoints are left; a temporary folder that is removed if not given.
        say: Gets a line at a time on what is being done.

    Returns:
        The proof; whoever calls shows it.

    Raises:
        Unsupported: megatron-core is not installed.
        UsageError: ``folder`` has something in it.
    """
    require_megatron()
    started = time.monotonic()
    with _workplace(folder) as place, WorkerPool(WORLD) as pool:
        say(f"starting {WORLD} processes with megatron-core on the CPU")
        pool.start()
        rows = tuple(prove(pool, place, say, MODEL))
    return DemoReport(rows, time.monotonic() - started)


def require_megatron() -> None:
    """Refuse where megatron-core is not installed.

    Raises:
        Unsupported: It is not.
    """
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        raise Unsupported(
            "the demonstration trains with real megatron-core, which is not installed\n"
            "Install it (Python 3.10 to 3.13): pip install 'mcore_rlhf[megatron]'   In the project's checkout: make demo"
        )


@contextmanager
def _workplace(folder: Path | None) -> Iterator[Path]:
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="mcore-rlhf-demo-") as name:
            yield Path(name)
        return
    folder = local_path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder\nGive a new one to --dir, or none.")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def prove(pool: WorkerPool, place: Path, say: Callable[[str], None], options: Options) -> Iterator[Row]:
    """The demonstration itself, one row per resumed run.

    Args:
        pool: Two workers.
        place: Folder for the checkpoints.
        say: Gets a line at a time on what is being done.
        options: What is trained, at TP2, with dropout.
    """
    demo = Demo(pool, place, say, options)
    whole = demo.uninterrupted()
    demo.killed()
    yield demo.resumed(whole)
    expected = demo.continued("without dropout at TP2, to compare other layouts with", demo.onward())
    yield demo.compared("TP1×PP2, read in place", expected, demo.onward(tp=1, pp=2))
    conversion, actor = demo.reshaped("actor", "one", WriteOptions(tp=1, pp=1, dp=2))
    yield demo.compared("TP1×PP1×DP2, converted", expected, demo.onward(tp=1, pp=1), actor, conversion)
    conversion, actor = demo.reshaped("one", "back", WriteOptions(tp=2, pp=1, dp=1))
    yield demo.compared("TP2×PP1, converted back", expected, demo.onward(), actor, conversion, exact=True)


@dataclass(frozen=True, slots=True)
class Seen:
    """A run as all its ranks saw it.

    Args:
        lines: The metrics of every step.
        state: The actor's whole tensors at the step that was saved.
    """

    lines: list[dict[str, Any]]
    state: dict[StateKey, torch.Tensor]

    @property
    def losses(self) -> dict[int, float]:
        """By step, those after the save."""
        return {line["step"]: line["loss"] for line in self.lines if line["step"] > SAVED_AT}


@dataclass(frozen=True, slots=True)
class Demo:
    """The parts of the demonstration.

    Args:
        pool: Two workers.
        place: Folder for the checkpoints.
        say: Gets a line at a time on what is being done.
        options: What is trained.
    """

    pool: WorkerPool
    place: Path
    say: Callable[[str], None]
    options: Options

    @property
    def run(self) -> Options:
        """The run that is killed and resumed."""
        run = replace(self.options, output_dir=self.place, experiment_name="run", metrics=self.place / "run.jsonl")
        return replace(run, save_interval=SAVED_AT, async_save=True)

    def onward(self, **degrees: int) -> Options:
        """A run that goes on from the saved step, without dropout, whose random numbers depend on the layout."""
        saved = steps.step_folder(self.run.root, SAVED_AT)
        onward = replace(
            self.run, metrics=None, save_interval=0, resume=str(saved), steps=SAVED_AT + AFTER, dropout=0.0
        )
        return replace(onward, **degrees)  # type: ignore[arg-type]

    def uninterrupted(self) -> Seen:
        """Train without saving anything."""
        self.say(f"training by GRPO at TP2: {END} steps, nothing saved")
        return self._go(replace(self.run, save_interval=0, resume="none", metrics=self.place / "uninterrupted.jsonl"))

    def killed(self) -> None:
        """Train the same run anew, saving, and kill it in the middle of a save.

        Raises:
            StorageError: Every save was over before the kill came.
        """
        self.say(f"training it again, saving every {SAVED_AT} steps; SIGKILL while step {KILLED_AT} is written")
        for _ in range(_ATTEMPTS):
            with KillDuringSave(self.run.root, KILLED_AT, lambda: self.pool.pids) as kill:
                try:
                    self._go(self.run)
                except WorkerError:
                    if not kill.seen:
                        raise
            if [step.step for step in steps.committed(self.run.root)] == [SAVED_AT]:
                self.say(
                    f"killed with {len(kill.seen)} files of step {KILLED_AT} there: step {SAVED_AT} is the newest whole one"
                )
                return
            shutil.rmtree(steps.step_folder(self.run.root, KILLED_AT), ignore_errors=True)  # the save was quicker
        raise StorageError(f"{self.run.root}: {_ATTEMPTS} saves of step {KILLED_AT} were over before the kill came")

    def resumed(self, whole: Seen) -> Row:
        """Go on with the killed run, on new processes, to the end; its metrics are the uninterrupted run's, or not."""
        self.say(f"resuming it: steps {SAVED_AT + 1} to {END}")
        found = self._go(self.run)
        expected, written = read_metrics(self.place / "uninterrupted.jsonl"), read_metrics(self.place / "run.jsonl")
        equal = sum(expected[step] == written.get(step) for step in expected)
        tensors, same = count_equal(whole.state, found.state)
        layout = "TP2×PP1, killed by SIGKILL"
        return Row(layout, tensors, same, whole.losses, found.losses, True, None, (equal, len(expected)))

    def continued(self, how: str, options: Options, actor: Path | None = None) -> Seen:
        """Go on from the saved step, with the actor of another checkpoint where one is given."""
        self.say(f"going on from step {SAVED_AT} {how}: {AFTER} steps")
        return self._go(options, actor)

    def reshaped(self, source: str, target: str, write: WriteOptions) -> tuple[Conversion, Path]:
        """Convert the saved actor, optimizer included."""
        self.say(f"mcore-rlhf convert {source} {target} --to megatron --tp {write.tp} --pp {write.pp} --dp {write.dp}")
        step = steps.step_folder(self.run.root, SAVED_AT)
        source_path = step / source if source == "actor" else self.place / source
        started = time.monotonic()
        options = ConvertOptions(read=ReadOptions(), write=write, fsync=False)
        job = convert(source_path, self.place / target, options)
        return Conversion(job.nbytes, time.monotonic() - started), self.place / target

    def compared(
        self,
        layout: str,
        expected: Seen,
        options: Options,
        actor: Path | None = None,
        conversion: Conversion | None = None,
        exact: bool = False,
    ) -> Row:
        """Go on at a layout, and compare."""
        found = self.continued(f"at {layout}", options, actor)
        tensors, equal = count_equal(expected.state, found.state)
        alike = [
            a == b if exact else a["prompt_ids"] == b["prompt_ids"]
            for a, b in zip(expected.lines, found.lines, strict=False)
        ]
        lines = (sum(alike), len(expected.lines))
        return Row(layout, tensors, equal, expected.losses, found.losses, exact, conversion, lines)

    def _go(self, options: Options, actor: Path | None = None) -> Seen:
        stretch = Stretch(options, SAVED_AT, None if actor is None else str(actor))
        reports = self.pool.run(continuing.go, stretch, world_size=WORLD, timeout=_JOB_TIMEOUT)
        return Seen(reports[0].lines, assembled(piece for report in reports for piece in report.pieces))
