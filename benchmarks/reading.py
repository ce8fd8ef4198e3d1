"""Rows 9, 11, 13, 16: opening, verifying, and the command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mcore_rlhf import iter_weights
from mcore_rlhf.convert import ConvertOptions, prepare
from mcore_rlhf.core.execute import FileRun
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.storage.reading import OpenFiles
from mcore_rlhf.verify.audit import Ledger
from mcore_rlhf.verify.checkpoint import Depth, verify

from .checkpoints import Checkpoint, make
from .measure import Contest, Spread, cold, warm
from .reshape import reshape
from .table import Row

_GOLDEN = Path(__file__).parents[1] / "tests" / "goldens" / "megatron" / "tp2pp2dp2_bf16_do" / "iter_0000002"
_RANKS = 512


def row_9(folder: Path, gigabytes: float, rounds: int) -> Iterator[Row]:
    checkpoint = make(folder, gigabytes, 2)
    contest = Contest({"open": lambda: open_checkpoint(checkpoint.root, ReadOptions())}).run(max(rounds, 20), 3)
    for of in ("wall", "cpu"):
        spread = [1e3 * figure for figure in contest.spread("open", of).figures]
        text = f"{min(spread):.3g} / {sorted(spread)[len(spread) // 2]:.3g} / {max(spread):.3g}"
        yield Row(9, f"open {gigabytes:g} GB, 2 ranks: {of}", sorted(spread)[len(spread) // 2], " ms", 20, 5, text)
    read = Spread([_from_disk(checkpoint) for _ in range(3)])
    yield Row(
        9, "bytes from the disk ÷ bytes of the source, whole reshape, cold", read.median, "×", 1.05, 1.01, str(read)
    )
    viewed, needed = _one_rank(checkpoint)
    yield Row(9, "bytes of pages touched ÷ bytes needed by one rank of TP4", viewed / needed, "×", 1.05, 1.01)


def _from_disk(checkpoint: Checkpoint) -> float:
    """What a whole conversion with all checks reads, with nothing in the page cache."""
    target = checkpoint.root.parent / "out"
    shutil.rmtree(target, ignore_errors=True)
    cold(checkpoint.files)
    before = _read_bytes()
    reshape(checkpoint, target, 4)
    read = _read_bytes() - before
    shutil.rmtree(target)
    return read / checkpoint.nbytes


def _read_bytes() -> int:
    with open("/proc/self/io") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


@dataclass
class _Counting:
    """The mapped files, and which of their pages were asked for."""

    files: OpenFiles
    pages: dict[str, set[int]] = field(default_factory=dict)

    def view(self, file: str, byte_offset: int, nbytes: int) -> memoryview:
        pages = range(byte_offset >> 12, (byte_offset + nbytes + 4095) >> 12)
        self.pages.setdefault(file, set()).update(pages)
        return self.files.view(file, byte_offset, nbytes)

    def release(self, file: str, byte_offset: int, nbytes: int) -> None:
        self.files.release(file, byte_offset, nbytes)


class _Nowhere:
    def write(self, key: str, byte_offset: int, data: memoryview) -> None:
        pass


def _one_rank(checkpoint: Checkpoint) -> tuple[int, int]:
    """Bytes of all pages that loading one new rank touches, and the bytes of its tensors."""
    job = prepare(checkpoint.root, ConvertOptions(write=WriteOptions(tp=4)))
    needed = 0
    with OpenFiles(checkpoint.root) as files:
        counting = _Counting(files)
        for planned in job.plans():
            plan = planned.plan
            if "mp_rank_00" in plan.file:
                FileRun(plan, planned.records, counting, _Nowhere(), Ledger(())).run()
                needed += sum(copy.numel * copy.source.dtype.itemsize for copy in plan.copies)
    return sum(len(pages) << 12 for pages in counting.pages.values()), needed


def row_22(folder: Path, gigabytes: float, rounds: int) -> Iterator[Row]:
    checkpoint = make(folder, gigabytes, 2)
    for tp_rank, tp_size in ((0, 1), (1, 2), (1, 4)):
        touched, from_disk = _weights(checkpoint, tp_rank, tp_size)
        whose = "all weights" if tp_size == 1 else f"one rank of TP{tp_size}"
        text = f"{from_disk:.3g}× from a cold disk, what the kernel reads ahead included"
        what = (
            f"bytes of pages touched ÷ bytes of the weights that iter_weights gives: {whose}, of TP2, {gigabytes:g} GB"
        )
        yield Row(22, what, touched, "×", 1.05, 1.01, text)


def _weights(checkpoint: Checkpoint, tp_rank: int, tp_size: int) -> tuple[float, float]:
    """Bytes of the pages that were asked for, and of those that came from the disk, for each byte that is given."""
    view, pages = OpenFiles.view, defaultdict[str, set[int]](set)

    def counting(files: OpenFiles, file: str, byte_offset: int, nbytes: int) -> memoryview:
        pages[file].update(range(byte_offset >> 12, (byte_offset + nbytes + 4095) >> 12))
        return view(files, file, byte_offset, nbytes)

    cold(checkpoint.files)
    before, OpenFiles.view = _read_bytes(), counting  # type: ignore[method-assign, assignment]
    try:
        given = sum(tensor.nbytes for _, tensor in iter_weights(checkpoint.root, tp_rank=tp_rank, tp_size=tp_size))
    finally:
        OpenFiles.view = view  # type: ignore[method-assign]
    touched = sum(len(numbers) << 12 for numbers in pages.values())
    return touched / given, (_read_bytes() - before) / given


def row_11(folder: Path, gigabytes: float, rounds: int) -> Iterator[Row]:
    checkpoint = make(folder, gigabytes, 2)
    contest = Contest(
        {"read": lambda: _read(checkpoint), "verify": lambda: _verify(checkpoint, 2)},
        before=lambda: cold(checkpoint.files),
    ).run(rounds, 1)
    ratio = contest.ratio("read", "verify", "wall")
    yield Row(
        11, f"speed of verify ÷ cold read (2 threads), {gigabytes:g} GB", ratio.median, "×", 0.9, None, str(ratio), True
    )
    warm(checkpoint.files)
    contest = Contest({"verify": lambda: _verify(checkpoint, 1)}).run(rounds, 1)
    for of in ("cpu", "wall"):
        speeds = sorted(checkpoint.nbytes / 1e9 / figure for figure in contest.spread("verify", of).figures)
        text = f"{speeds[0]:.3g} / {speeds[len(speeds) // 2]:.3g} / {speeds[-1]:.3g}"
        what = f"verify, warm, one worker, {gigabytes:g} GB: bytes ÷ {of} time"
        yield Row(11, what, speeds[len(speeds) // 2], " GB/s", 6, 8, text, True)


def _read(checkpoint: Checkpoint) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda path: warm([path]), checkpoint.files))


def _verify(checkpoint: Checkpoint, workers: int) -> None:
    verdict = verify(checkpoint.root, ReadOptions(), Depth.FULL, workers)
    assert verdict.intact, verdict.problems


def row_13(folder: Path, rounds: int) -> Iterator[Row]:
    checkpoint = make(folder, 0.02, 2)
    commands = {"--help": ["--help"], "inspect of a small checkpoint": ["inspect", str(checkpoint.root)]}
    contest = Contest({name: partial(_command, line) for name, line in commands.items()}).run(rounds)
    for name, bar, stretch in (("--help", 0.15, 0.1), ("inspect of a small checkpoint", 0.35, 0.2)):
        for of in ("wall", "cpu"):
            spread = contest.spread(name, of)
            yield Row(13, f"mcore-rlhf {name}, whole process: {of}", spread.median, " s", bar, stretch, str(spread))


def _command(line: list[str]) -> None:
    environment = {**os.environ, "NO_COLOR": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # as it is installed: with its bytecode kept
    subprocess.run([sys.executable, "-m", "mcore_rlhf", *line], check=True, capture_output=True, env=environment)


def row_16(folder: Path, rounds: int) -> Iterator[Row]:
    """A genuine file of one of Megatron's ranks, 512 times: its pickle is scanned, read, and made into places of tensors."""
    many = folder / "ranks"
    many.mkdir(exist_ok=True)
    data = (_GOLDEN / "mp_rank_00_000" / "model_optim_rng.pt").read_bytes()
    for rank in range(_RANKS):
        (many / f"{rank}.pt").write_bytes(data)
    read_pt(many, "0.pt")  # imports
    figures = []
    for _ in range(rounds):
        start = time.process_time()
        for rank in range(_RANKS):
            read_pt(many, f"{rank}.pt")
        figures.append(time.process_time() - start)
    spread = Spread(figures)
    yield Row(16, f"open {_RANKS} rank files of Megatron's: cpu", spread.median, " s", 1.5, 0.6, str(spread))
