"""A few hundred cases with a fixed seed; and the judge finds every kind of broken promise, so that zero means something."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fuzz import verdict
from tests.fuzz.child import CANARY, Limits, run

CASES, SEED = 200, 10
PROJECT = Path(__file__).parents[2]
# Of memory without end: what is private counts what the process of the tests had before it was forked. And with patience: a
# busy machine is no hanging command.
ROOMY = Limits(memory=1 << 50, file=4 << 20)
IMPATIENT = replace(ROOMY, wall=1.0)


def test_no_promise_is_broken(tmp_path: Path) -> None:
    """Replay a failure as it says: ``make fuzz ONLY=<case> SEED=10``."""
    command = [sys.executable, "-m", "tests.fuzz", f"--cases={CASES}", f"--seed={SEED}", f"--dir={tmp_path}"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) cases.* (\d+) with 0, (\d+) with 1, (\d+) with 2\n", done.stdout)
    assert found is not None, done.stdout
    counts = [int(number) for number in found.groups()]
    assert counts[0] == sum(counts[1:]) == CASES
    assert min(counts) >= CASES / 20, "most mutants should be refused, but some are harmless: every way out is tried"


def _fails(arguments: Sequence[str]) -> int:
    raise RuntimeError("on purpose")


def _prints(text: str) -> Callable[[Sequence[str]], int]:
    def main(arguments: Sequence[str]) -> int:
        print(text)
        return 1

    return main


def _sleeps(arguments: Sequence[str]) -> int:
    time.sleep(60)
    return 0


def _is_greedy(arguments: Sequence[str]) -> int:
    return 1 if bytearray(os.urandom(1)) * (400 << 20) else 0


def _asks_for_too_much(arguments: Sequence[str]) -> int:
    return len(bytearray(1 << 51))


def _dies(arguments: Sequence[str]) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def _runs_code(arguments: Sequence[str]) -> int:
    return os.system(f"touch {CANARY}") or 1


def _connects(arguments: Sequence[str]) -> int:
    try:
        subprocess.Popen(["/nonexistent"])
    except OSError:
        return 1
    return 0


def _leaves_a_half(arguments: Sequence[str]) -> int:
    Path("out/target").mkdir()
    return 1


def _leaves_staging(arguments: Sequence[str]) -> int:
    Path("out/.target.partial-1").mkdir()
    return 1


def _writes_a_source(arguments: Sequence[str]) -> int:
    Path("source").mkdir()
    return 0


BROKEN: list[tuple[Callable[[Sequence[str]], int], set[str]]] = [
    (_fails, {verdict.TRACEBACK}),
    (_prints("This is a bug in mcore_rlhf 1.0"), {verdict.TRACEBACK}),
    (_prints("error: out of memory"), {verdict.MEMORY}),
    (_prints("names \x1b[31m"), {verdict.DIRTY}),
    (_prints("names \u202e"), {verdict.DIRTY}),
    (_prints("x" * (1 << 20)), {verdict.DIRTY}),
    (_sleeps, {verdict.HANG}),
    (_is_greedy, {verdict.MEMORY}),
    (_asks_for_too_much, {verdict.MEMORY, verdict.TRACEBACK}),
    (_dies, {verdict.SIGNAL}),
    (_runs_code, {verdict.CODE}),
    (_connects, {verdict.CODE}),
    (_leaves_a_half, {verdict.HALF}),
    (_leaves_staging, {verdict.HALF}),
    (_writes_a_source, {verdict.HALF}),
    (_prints("error: refused"), set()),
]


@pytest.mark.parametrize(("main", "kinds"), BROKEN)
def test_the_judge_finds_it(main: Callable[[Sequence[str]], int], kinds: set[str], tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "out").mkdir(parents=True)
    before = verdict.listing(here)
    ended = run(["convert"], here, IMPATIENT if main is _sleeps else ROOMY, main)
    limits = Limits(resident=ended.peak - 1 if main is _is_greedy else 4 << 30)
    assert verdict.judge("convert source out/target", ended, here, before, limits).keys() == kinds
