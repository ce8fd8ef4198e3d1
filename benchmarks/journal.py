"""Row 23: the rollout journal, four producers at once, beside four processes that append and fsync the same bytes. As a module: a producer.

Both begin with finished rollouts in memory, and end when the last byte is safe. The journal encodes, frames and checks them, and makes
them safe within its default second; the others write the same bytes, made beforehand, group by group, with one fsync each.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mcore_rlhf.manager.rlhf.journal_writer import JournalWriter
from mcore_rlhf.manager.rlhf.rollouts import Rollout
from mcore_rlhf.storage.appending import Pace
from mcore_rlhf.storage.framed import OVERHEAD, frame_head

from .measure import Spread
from .table import Row

PRODUCERS = 4
_LARGE_NBYTES = 64 << 10
SIZES = {"small": (50_000, 16), "large": (1_500, 16_384)}
"""Rollouts of each producer, and tokens of each."""


def row_23(folder: Path, rounds: int) -> Iterator[Row]:
    root = folder / "journal"
    for size, (many, tokens) in SIZES.items():
        journal, plain = _contest(root, size, rounds)
        total = PRODUCERS * many
        nbytes = total * (OVERHEAD + len(_rollout(tokens, 0).to_bytes()))
        told = f"{total:,} rollouts of {tokens:,} tokens and log-probabilities, {nbytes / 1e6:.0f} MB"
        if size == "small":
            rates = Spread([total / wall for wall in journal])
            told = (
                f"{rates}; {told}; plain append + fsync of the same bytes takes {_ratio(journal, plain)} of that time"
            )
            yield Row(
                23,
                "rollouts a second into the journal, four producers",
                rates.median,
                " /s",
                50_000,
                100_000,
                told,
                True,
            )
        else:
            ratio = _ratio(plain, journal, inverse=True)
            what = "rate of the journal ÷ plain append + fsync of the same bytes, four producers"
            yield Row(23, what, ratio.median, "×", 0.7, 0.9, f"{ratio}; {told}", True)
    shutil.rmtree(root, ignore_errors=True)


def _ratio(of: list[float], to: list[float], inverse: bool = False) -> Spread:
    """How long one took of the other's time; ``inverse``: of the rates, which is the same the other way round."""
    pairs = zip(of, to, strict=True)
    return Spread([a / b for a, b in pairs] if inverse else [b / a for a, b in pairs])


def _contest(root: Path, size: str, rounds: int) -> tuple[list[float], list[float]]:
    walls: dict[str, list[float]] = {"journal": [], "plain": []}
    for number in range(rounds + 1):
        for how, found in walls.items():
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
            wall = _together(root, how, size)
            if number:  # the first round warms up
                found.append(wall)
    return walls["journal"], walls["plain"]


def _together(root: Path, how: str, size: str) -> float:
    """Seconds from the moment when all producers are ready until the last one is done."""
    producers = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(root), how, size, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(PRODUCERS)
    ]
    for one in producers:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
    start = time.perf_counter()
    for one in producers:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    for one in producers:
        assert one.stdout is not None
        assert one.stdout.readline() == "done\n"
    wall = time.perf_counter() - start
    for one in producers:
        one.communicate()
    return wall


def _rollout(tokens: int, number: int) -> Rollout:
    values = {"tokens": np.arange(tokens, dtype=np.int32), "logprobs": np.linspace(-1, 0, tokens, dtype=np.float32)}
    return Rollout(number % 97, 0, number, 0, version=3, seed=number, reward=0.5, tensors=values)


def _framed(number: int, payload: bytes) -> bytes:
    return frame_head(number, payload) + payload


def _into_journal(root: Path, name: str, rollouts: list[Rollout]) -> Callable[[], None]:
    writer = JournalWriter(root, name)

    def work() -> None:
        for rollout in rollouts:
            writer.add(rollout)
        writer.close()
        assert writer.counts.safe == len(rollouts)

    return work


def _plainly(root: Path, name: str, rollouts: list[Rollout]) -> Callable[[], None]:
    records, group, nbytes = [_framed(number, one.to_bytes()) for number, one in enumerate(rollouts)], list[bytes](), 0
    fd = os.open(root / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    most = Pace().group_nbytes

    def put(group: list[bytes]) -> None:
        for data in group if len(group[0]) >= _LARGE_NBYTES else [b"".join(group)]:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
        os.fsync(fd)

    def work() -> None:
        nonlocal group, nbytes
        for record in records:
            group.append(record)
            nbytes += len(record)
            if nbytes >= most:
                put(group)
                group, nbytes = [], 0
        if group:
            put(group)

    return work


def main() -> None:
    root, how, size, number = sys.argv[1:]
    many, tokens = SIZES[size]
    rollouts = [_rollout(tokens, at) for at in range(many)]
    work = {"journal": _into_journal, "plain": _plainly}[how](Path(root), f"producer-{number}", rollouts)
    print("ready", flush=True)
    sys.stdin.readline()
    work()
    print("done", flush=True)


if __name__ == "__main__":
    main()
