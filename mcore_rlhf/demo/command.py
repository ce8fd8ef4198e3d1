"""``mcore-rlhf demo``: GRPO on real Megatron on the CPU, killed in the middle of a save, resumed and reshaped, with proof."""

from __future__ import annotations

import math
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from mcore_rlhf.convert import convert
from mcore_rlhf.demo.placed_state import assembled
from mcore_rlhf.demo.rl import continuing
from mcore_rlhf.demo.rl.metrics import read_metrics
from mcore_rlhf.demo.rl.options import Options
from mcore_rlhf.demo.workers import WorkerError, WorkerPool
from mcore_rlhf.errors import StorageError, Unsupported, UsageError
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.installation import to_install
from mcore_rlhf.manager.run import steps
from mcore_rlhf.storage.paths import local_path

if TYPE_CHECKING:
    import torch

    from mcore_rlhf.demo.placed_state import StateKey


_PAUSE = 0.0005
_ENOUGH = 2
"""Files that make a save half done: the first is there and the last is not."""

FP32_TO_FP64 = 2.0**-29
"""How much smaller the roundings of fp64 (2⁻⁵³) are than those of fp32 (2⁻²⁴)."""

SHOWN_STEPS = 2

__all__ = ["DemoReport", "render", "run_demo", "table"]

SAVED_AT, KILLED_AT, END = 10, 20, 24

AFTER = 2
"""Steps that a reshaped run goes on for."""

WORLD = 2

MODEL = Options(tp=2, steps=END, hidden_size=128, dropout=0.1)

_JOB_TIMEOUT = 300.0

_ATTEMPTS = 5


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


@dataclass(frozen=True, slots=True)
class Reshaping:
    """How a checkpoint was reshaped.

    Args:
        nbytes: Bytes of tensors written.
        seconds: Wall time, planning, checks and checksums included.
    """

    nbytes: int
    seconds: float

    @property
    def speed(self) -> float:
        """Bytes per second."""
        return self.nbytes / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class ProofRow:
    """The proof of one resumed run.

    Args:
        layout: What it ran on, and how its checkpoint came about.
        tensors: Whole tensors compared, over all states.
        equal: How many of them are equal in every bit.
        uninterrupted: Losses of the run that was not interrupted, by iteration. On another layout answers are sampled anew, of chances
            that bf16 rounds otherwise, so that its losses are only shown.
        resumed: Losses of the run that was.
        exact: Whether losses have to be equal to the last bit: they have where the layout is that of the source.
        conversion: How its checkpoint was made; None where it is the source's own.
        lines: How many lines of the metrics are equal to the uninterrupted run's, and how many there are: where the row is
            exact everything in them (loss, reward, KL, gradient norm, digests of model and optimizer, to the last bit),
            otherwise the prompts and the learning rate. None where nothing was compared.
        apart: Largest absolute difference of two log-probabilities of fixed answers, computed in fp64 from the weights.
        limit: How far another order of sums may bring them apart, see :func:`rounding_limit`.
    """

    layout: str
    tensors: int
    equal: int
    uninterrupted: dict[int, float]
    resumed: dict[int, float]
    exact: bool
    conversion: Reshaping | None
    lines: tuple[int, int] | None = None
    apart: float = 0.0
    limit: float = 0.0

    @property
    def max_difference(self) -> float:
        """Largest absolute difference of two losses; infinite where one is missing or no number."""
        pairs = [(loss, self.resumed.get(step, math.nan)) for step, loss in self.uninterrupted.items()]
        differences = [abs(resumed - loss) for loss, resumed in pairs]
        return max(differences) if differences and all(map(math.isfinite, differences)) else math.inf

    @property
    def passed(self) -> bool:
        """Whether it is proved."""
        if self.tensors == 0 or self.equal != self.tensors or not math.isfinite(self.max_difference):
            return False
        if self.lines is not None and (self.lines[0] != self.lines[1] or not self.lines[1]):
            return False
        if self.exact:
            return self.max_difference == self.apart == 0.0
        return self.apart <= self.limit < math.inf


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All that the demonstration proved.

    Args:
        rows: One per resumed run.
        seconds: Wall time of everything.
    """

    rows: tuple[ProofRow, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether everything is proved."""
        return bool(self.rows) and all(row.passed for row in self.rows)


def count_equal(expected: dict[StateKey, torch.Tensor], found: dict[StateKey, torch.Tensor]) -> tuple[int, int]:
    """Number of tensors that either model has, and of those that are in both and equal bit for bit."""
    equal = sum(same_bits(expected[key], found[key]) for key in expected.keys() & found.keys())
    return len(expected.keys() | found.keys()), equal


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, type and every bit."""
    import torch

    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def furthest(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    """The largest difference of any rank's values from the first expected ones; infinite where one is no number."""
    differences = [(one - expected[0]).abs().max().item() for one in (*expected, *found)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def rounding_limit(in_fp64: torch.Tensor, in_fp32: torch.Tensor, parameters: int) -> float:
    """How far two computations in fp64 may be apart that differ in the order of sums alone.

    What ``N`` roundings do to a result is, to first order, a sum ``Σ sᵢδᵢ`` with ``|δᵢ| ≤ u``. The same model in fp32 shows
    its size, of the order of ``u·√Σsᵢ²`` where they fall either way. If all fell one way it would be ``u·Σ|sᵢ|``: by Cauchy
    and Schwarz at most ``√N`` times as much. In fp64 ``u`` is 2⁻²⁹ of that in fp32, and both computations are rounded. Every
    weight is multiplied and added once per token: ``N`` is twice the number of weights times that of tokens in a row.

    Args:
        in_fp64: Log-probabilities of fixed answers, (answers, tokens).
        in_fp32: The same, computed in fp32.
        parameters: Weights of the model.
    """
    roundings = 2 * parameters * (in_fp64.shape[1] + 1)
    return 2 * math.sqrt(roundings) * FP32_TO_FP64 * (in_fp64 - in_fp32).abs().max().item()


def render(report: DemoReport) -> list[tuple[str, ...]]:
    """The report as the cells of a table, header first; of the first steps the expected loss, then the resumed one."""
    steps = sorted({step for row in report.rows for step in row.uninterrupted})[:SHOWN_STEPS]
    losses = [text for step in steps for text in (f"loss {step}", "resumed")]
    header = ("resumed on", "tensors equal", "metrics equal", *losses, "log-probs apart", "reshaped")
    return [header, *(_cells(row, steps) for row in report.rows)]


def table(report: DemoReport) -> list[str]:
    """The report as aligned lines of plain text."""
    rows = render(report)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("─" * width for width in widths), *lines[1:], "", verdict(report)]


def verdict(report: DemoReport) -> str:
    """One sentence on whether everything is proved."""
    failed = [row.layout for row in report.rows if not row.passed]
    if failed or not report.rows:
        return f"FAILED: {', '.join(failed) or 'nothing was proved'}"
    return (
        f"Proved in {report.seconds:.0f} s. The run that was killed and resumed wrote the metrics of the one that was not, to the last\n"
        "bit: loss, reward, KL, gradient norm, digests of all parameters and of the optimizer. On every other layout every\n"
        "parameter, fp32 master and moment of Adam is the same in every bit, training goes on with the same prompts and learning\n"
        "rate, and log-probabilities of fixed answers, computed in fp64, are no further apart than another order of sums can\n"
        "bring them. (Losses there are of answers that are sampled anew, of chances that bf16 rounds otherwise.)"
    )


def _cells(row: ProofRow, steps: list[int]) -> tuple[str, ...]:
    losses = [_loss(run, step) for step in steps for run in (row.uninterrupted, row.resumed)]
    apart = "none" if row.apart == 0 else f"{row.apart:.1e}" + (f" (≤ {row.limit:.0e})" if row.limit else "")
    conversion = row.conversion
    speed = f"{conversion.nbytes / 1e6:.0f} MB, {conversion.speed / 1e6:.0f} MB/s" if conversion else "as saved"
    lines = f"{row.lines[0]} of {row.lines[1]}{'' if row.exact else ' (prompts, lr)'}" if row.lines else "–"
    return (
        row.layout,
        f"{row.equal} of {row.tensors}",
        lines,
        *losses,
        apart + ("" if row.passed else " FAILED"),
        speed,
    )


def _loss(run: dict[int, float], step: int) -> str:
    return f"{run[step]:.6f}" if step in run else "–"


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
            f"Install it (Python 3.10 to 3.13): {to_install('megatron')}   In the project's checkout: make demo"
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


def prove(pool: WorkerPool, place: Path, say: Callable[[str], None], options: Options) -> Iterator[ProofRow]:
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
class SeenRun:
    """A run as all its ranks saw it.

    Args:
        lines: The metrics of every step.
        state: The actor's whole tensors at the step that was saved.
        log_probs: What it said there of fixed answers, computed in fp64 by each rank.
        in_fp32: The same of one rank, in fp32.
    """

    lines: list[dict[str, Any]]
    state: dict[StateKey, torch.Tensor]
    log_probs: list[torch.Tensor]
    in_fp32: torch.Tensor

    @property
    def losses(self) -> dict[int, float]:
        """By step, those after the save."""
        return {line["step"]: line["loss"] for line in self.lines if line["step"] > SAVED_AT}

    @property
    def limit(self) -> float:
        """See :func:`rounding_limit`."""
        parameters = sum(tensor.numel() for (kind, _), tensor in self.state.items() if kind == "param")
        return rounding_limit(self.log_probs[0], self.in_fp32, parameters)


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

    def uninterrupted(self) -> SeenRun:
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

    def resumed(self, whole: SeenRun) -> ProofRow:
        """Go on with the killed run, on new processes, to the end; its metrics are the uninterrupted run's, or not."""
        self.say(f"resuming it: steps {SAVED_AT + 1} to {END}")
        found = self._go(self.run)
        expected, written = read_metrics(self.place / "uninterrupted.jsonl"), read_metrics(self.place / "run.jsonl")
        equal = sum(expected[step] == written.get(step) for step in expected)
        tensors, same = count_equal(whole.state, found.state)
        layout = "TP2×PP1, killed by SIGKILL"
        apart = furthest(whole.log_probs, found.log_probs)
        return ProofRow(layout, tensors, same, whole.losses, found.losses, True, None, (equal, len(expected)), apart)

    def continued(self, how: str, options: Options, actor: Path | None = None) -> SeenRun:
        """Go on from the saved step, with the actor of another checkpoint where one is given."""
        self.say(f"going on from step {SAVED_AT} {how}: {AFTER} steps")
        return self._go(options, actor)

    def reshaped(self, source: str, target: str, write: WriteOptions) -> tuple[Reshaping, Path]:
        """Convert the saved actor, optimizer included."""
        self.say(f"mcore-rlhf convert {source} {target} --to megatron --tp {write.tp} --pp {write.pp} --dp {write.dp}")
        step = steps.step_folder(self.run.root, SAVED_AT)
        source_path = step / source if source == "actor" else self.place / source
        started = time.monotonic()
        options = ConvertOptions(read=ReadOptions(), write=write, fsync=False)
        job = convert(source_path, self.place / target, options)
        return Reshaping(job.nbytes, time.monotonic() - started), self.place / target

    def compared(
        self,
        layout: str,
        expected: SeenRun,
        options: Options,
        actor: Path | None = None,
        conversion: Reshaping | None = None,
        exact: bool = False,
    ) -> ProofRow:
        """Go on at a layout, and compare."""
        found = self.continued(f"at {layout}", options, actor)
        tensors, equal = count_equal(expected.state, found.state)
        alike = [
            a == b if exact else (a["prompt_ids"], a["lr"]) == (b["prompt_ids"], b["lr"])
            for a, b in zip(expected.lines, found.lines, strict=False)
        ]
        lines = (sum(alike), len(expected.lines))
        apart, limit = furthest(expected.log_probs, found.log_probs), 0.0 if exact else expected.limit
        return ProofRow(layout, tensors, equal, expected.losses, found.losses, exact, conversion, lines, apart, limit)

    def _go(self, options: Options, actor: Path | None = None) -> SeenRun:
        root = None if actor is None else str(actor)
        reports = self.pool.run(continuing.go, options, SAVED_AT, root, world_size=WORLD, timeout=_JOB_TIMEOUT)
        log_probs = [report.log_probs["fp64"] for report in reports]
        state = assembled(piece for report in reports for piece in report.pieces)
        return SeenRun(reports[0].lines, state, log_probs, reports[0].log_probs["fp32"])
