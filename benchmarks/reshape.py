"""Rows 3, 4, 5, 18: reshaping against ``cp`` of the same bytes, against loading everything with torch, and in four parts."""

from __future__ import annotations

import filecmp
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.families.options import WriteOptions

from .checkpoints import Checkpoint, make
from .measure import Contest, flush, timed, warm
from .naive import naive
from .table import Row

PAIRS = ((2, 4), (4, 1))


def reshape(checkpoint: Checkpoint, target: Path, tp: int, *, fsync: bool = False) -> None:
    """Reshape with every check that is on by default."""
    convert(checkpoint.root, target, ConvertOptions(write=WriteOptions(tp=tp), fsync=fsync))


def copy(checkpoint: Checkpoint, target: Path, *, fsync: bool = False) -> None:
    """``cp -r``."""
    subprocess.run(["cp", "-r", str(checkpoint.root), str(target)], check=True)
    if fsync:
        flush(target)


def row_3(folder: Path, gigabytes: float, rounds: int) -> Iterator[Row]:
    for source_tp, target_tp in PAIRS:
        contest = _against_cp(folder, gigabytes, rounds, source_tp, target_tp, fsync=False)
        what = f"reshape TP{source_tp}→TP{target_tp} with optimizer ÷ cp -r, {gigabytes:g} GB"
        for of, bar in (("wall", 1.2), ("cpu", 1.3)):
            ratio = contest.ratio("reshape", "cp", of)
            yield Row(3, f"{what}: {of}", ratio.median, "×", bar, 1.0, str(ratio))


def row_4(folder: Path, gigabytes: float, rounds: int) -> Iterator[Row]:
    for source_tp, target_tp in PAIRS:
        contest = _against_cp(folder, gigabytes, rounds, source_tp, target_tp, fsync=True)
        ratio = contest.ratio("reshape", "cp", "wall")
        what = f"reshape TP{source_tp}→TP{target_tp} + fsync ÷ cp -r + fsync, {gigabytes:g} GB: wall"
        yield Row(4, what, ratio.median, "×", 1.2, 1.0, str(ratio))


def _against_cp(folder: Path, gigabytes: float, rounds: int, source_tp: int, target_tp: int, *, fsync: bool) -> Contest:
    checkpoint, target = make(folder, gigabytes, source_tp), folder / "out"
    warm(checkpoint.files)
    return Contest(
        {
            "cp": lambda: copy(checkpoint, target, fsync=fsync),
            "reshape": lambda: reshape(checkpoint, target, target_tp, fsync=fsync),
        },
        before=lambda: shutil.rmtree(target, ignore_errors=True),
    ).run(rounds)


def row_5(folder: Path, gigabytes: float, rounds: int) -> Iterator[Row]:
    checkpoint, target = make(folder, gigabytes, 2), folder / "out"
    for fsync, bar, stretch in ((False, 5.0, 8.0), (True, 3.0, None)):
        warm(checkpoint.files)
        contest = Contest(
            {
                "reshape": partial(reshape, checkpoint, target, 4, fsync=fsync),
                "naive": partial(naive, checkpoint, target, 4, fsync=fsync),
            },
            before=lambda: shutil.rmtree(target, ignore_errors=True),
        ).run(rounds)
        suffix = " + fsync" if fsync else ""
        for of in ("wall", "cpu") if not fsync else ("wall",):
            ratio = contest.ratio("naive", "reshape", of)
            what = f"torch.load all, cat, split, torch.save ÷ reshape{suffix}, TP2→TP4, {gigabytes:g} GB: {of}"
            yield Row(5, what, ratio.median, "×", bar, stretch, str(ratio), at_least=True)


def row_18(folder: Path, gigabytes: float) -> Iterator[Row]:
    checkpoint, plan, one, parts = make(folder, gigabytes, 2), folder / "plan", folder / "one", folder / "parts"
    warm(checkpoint.files)

    def cpu(command: str, *arguments: object) -> float:
        """Of a whole process, its imports included."""
        told = [command, checkpoint.root, *arguments, "--tp", 4]
        whole = [sys.executable, "-m", "mcore_rlhf", *map(str, told)]
        return timed(lambda: subprocess.run(whole, check=True, capture_output=True)).cpu

    alone = ("--workers", 1, "--no-fsync")
    cpu("plan", "--save", plan)
    by_one = cpu("convert", one, *alone)
    of_parts = [cpu("convert", parts, *alone, "--plan", plan, "--part", f"{number}/4") for number in range(1, 5)]
    finished = cpu("convert", parts, *alone, "--finish")
    assert all(filecmp.cmp(path, parts / path.relative_to(one), shallow=False) for path in one.rglob("*.pt"))
    told = f"one {by_one:.2f} s, parts {', '.join(f'{of:.2f}' for of in of_parts)} s, joining {finished:.2f} s"
    what = f"reshape TP2→TP4, {gigabytes:g} GB, same bytes: cpu of one process ÷ slowest of four parts"
    yield Row(18, what, by_one / max(of_parts), "×", 3.2, 3.8, told, at_least=True)
    shutil.rmtree(one)
    shutil.rmtree(parts)
