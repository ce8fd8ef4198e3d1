"""``mcore-rlhf demo``: train real Megatron on the CPU, reshape its checkpoint, resume on other layouts, and prove it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo import placed_state
from mcore_rlhf.demo.configs import Parallel, TinyGPT
from mcore_rlhf.demo.jobs import Run
from mcore_rlhf.demo.proof import Conversion, DemoReport, Row, count_equal, render, table
from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.errors import Unsupported, UsageError
from mcore_rlhf.formats.base import WriteOptions

if TYPE_CHECKING:
    import torch

    from mcore_rlhf.demo.placed_state import StateKey

__all__ = ["DemoReport", "render", "run_demo", "table"]

SAVED_AT, END = 2, 4
MODEL = TinyGPT(
    hidden_size=256,
    ffn_hidden_size=512,
    kv_channels=64,
    num_query_groups=4,
    vocab_size=4090,  # padded to 4096 rows on 1, 2 and 4 tensor-parallel ranks: their losses can be compared
    dropout=0.0,
)
SOURCE = Parallel(tp=2, pp=2)
TARGETS = {"one": Parallel(dp=2), "tp4": Parallel(tp=4)}
_JOB_TIMEOUT = 300.0


def run_demo(folder: Path | None = None, say: Callable[[str], None] = lambda line: None) -> DemoReport:
    """Train, save, reshape to two other layouts and back, resume each, and compare with the uninterrupted run.

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
    with _workplace(folder) as place, WorkerPool(SOURCE.world_size) as pool:
        say(f"starting {SOURCE.world_size} processes with megatron-core on the CPU")
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
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder\nGive a new one to --dir, or none.")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


@dataclass(frozen=True, slots=True)
class _Seen:
    losses: dict[int, float]
    state: dict[StateKey, torch.Tensor]


def prove(pool: WorkerPool, place: Path, say: Callable[[str], None], model: TinyGPT) -> Iterator[Row]:
    """The demonstration itself, one row per resumed run.

    Args:
        pool: As many workers as the layout of the source has ranks.
        place: Folder for the checkpoints.
        say: Gets a line at a time on what is being done.
        model: What is trained.
    """
    demo = _Demo(pool, place, say, model)
    whole = demo.train(place / "source")
    yield demo.resumed("source", SOURCE, whole, None)
    for name, parallel in TARGETS.items():
        conversion = demo.reshape("source", name, parallel)
        yield demo.resumed(name, parallel, whole, conversion)
    conversion = demo.reshape(name, "back", SOURCE)
    yield demo.resumed("back", SOURCE, whole, conversion, f", by way of {title(parallel)}")


@dataclass(frozen=True, slots=True)
class _Demo:
    pool: WorkerPool
    place: Path
    say: Callable[[str], None]
    model: TinyGPT

    def train(self, root: Path) -> _Seen:
        """Train without interruption, and save on the way."""
        self.say(f"training a small GPT at {title(SOURCE)}: {END} steps, saved after step {SAVED_AT}")
        run = Run(self.model, SOURCE, steps=END, save=str(root), save_at=(SAVED_AT,), states_at=(SAVED_AT,))
        return self._run(run)

    def reshape(self, source: str, target: str, parallel: Parallel) -> Conversion:
        """Convert a checkpoint, optimizer included."""
        self.say(f"reshaping {source} to {title(parallel)}, optimizer included")
        write = WriteOptions(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp)
        started = time.monotonic()
        job = convert(self.place / source, self.place / target, ConvertOptions(write=write, fsync=False))
        return Conversion(job.nbytes, time.monotonic() - started)

    def resumed(
        self, name: str, parallel: Parallel, whole: _Seen, conversion: Conversion | None, remark: str = ""
    ) -> Row:
        """Load a checkpoint in megatron-core, look at all that it holds, train on, and compare."""
        self.say(f"resuming {name} in megatron-core at {title(parallel)}: steps {SAVED_AT + 1} to {END}")
        found = self._run(Run(self.model, parallel, steps=END, load=str(self.place / name), states_at=(SAVED_AT,)))
        uninterrupted = {step: loss for step, loss in whole.losses.items() if step > SAVED_AT}
        tensors, equal = count_equal(whole.state, found.state)
        layout, exact = title(parallel) + remark, parallel == SOURCE
        return Row(layout, tensors, equal, uninterrupted, found.losses, exact, conversion)

    def _run(self, run: Run) -> _Seen:
        reports = self.pool.run(placed_state.train, run, world_size=run.parallel.world_size, timeout=_JOB_TIMEOUT)
        return _Seen(reports[0].losses, placed_state.assembled(piece for report in reports for piece in report.pieces))


def title(parallel: Parallel) -> str:
    """The degrees that are not 1, and always TP and PP."""
    data = f"×DP{parallel.dp}" if parallel.dp > 1 else ""
    return f"TP{parallel.tp}×PP{parallel.pp}{data}"
