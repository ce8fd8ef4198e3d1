"""Kills of asynchronous GRPO at random moments: no prompt is skipped or trained on twice, and what was finished is given back."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mcore_rlhf import JournalWriter, Rollout, RolloutJournal
from mcore_rlhf.manager.rlhf.consumed import Consumed
from mcore_rlhf.manager.run import steps
from mcore_rlhf.storage.appending import Pace
from tests.crash.async_grpo import GROUP, PROMPTS, expected, forked
from tests.faults.disk import compiled

PROJECT = Path(__file__).resolve().parents[2]


def run(folder: Path, kills: int, seed: int, timeout: int) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.crash.async_grpo", str(folder), f"--kills={kills}", f"--seed={seed}"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=timeout, check=False)
    errors = (folder / "errors").read_text() if (folder / "errors").exists() else ""
    assert done.returncode == 0, f"{done.stderr[-3000:]}{errors[-3000:]}"
    assert not errors, errors[-3000:]
    found: dict[str, int] = json.loads(done.stdout)
    return found


def judge(folder: Path) -> int:
    """Hold the newest step against all that should have been trained on; how many epochs that is."""
    newest = steps.newest(folder / "root")
    assert newest is not None
    extra = json.loads((newest.path / "rlhf" / "rlhf_state.json").read_bytes())["extra"]
    epochs, rest = divmod(extra["samples"], PROMPTS * GROUP)
    assert (rest, Consumed.by(newest.path).pending) == (0, {}), "the run stops at the end of an epoch"
    assert extra["digest"] == expected(epochs), "a sample was skipped, trained on twice, or is not what it was"
    return epochs


def losses(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "losses").read_text().splitlines()]


def history(folder: Path, kills: int, rng: random.Random, timeout: int) -> None:
    done = run(folder, kills, rng.randrange(1 << 32), timeout)
    epochs, found = judge(folder), losses(folder)
    given, lost = sum(one["given"] for one in found), sum(one["lost"] for one in found)
    oldest = max(one["oldest_s"] for one in found)
    print(
        f"kills {done}; {epochs} epochs; {given} rollouts found in the journal by restarts, {lost} not, the oldest {oldest:.3f} s old"
    )
    assert oldest <= 2
    assert not done["trainer"] + done["both"] or given, "the journal was of some use"
    assert len(list((folder / "root" / "journal").glob("*.seg"))) < kills + 10, "what is not needed any more goes"


def test_a_run_that_is_left_alone(tmp_path: Path) -> None:
    run(tmp_path / "run", 0, 0, 100)
    assert judge(tmp_path / "run") >= 1


def test_a_handful_of_kills(tmp_path: Path, rng: random.Random) -> None:
    history(tmp_path / "run", 5, rng, 120)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_kills(tmp_path: Path, rng: random.Random) -> None:
    history(tmp_path / "run", 100, rng, 1500)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_in_rough_weather(tmp_path: Path, rng: random.Random) -> None:
    """The disk fills up, fails and hangs under trainer and producers, clocks jump, journals are torn, and options differ by start."""
    library, folder = compiled(tmp_path), tmp_path / "run"
    if library is None:
        pytest.skip("there is no C compiler for the disk that fails")
    arguments = [str(folder), "--kills=25", f"--seed={rng.randrange(1 << 32)}", "--rough"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.grpo_weather", *arguments],
        cwd=PROJECT, env={**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("errors", "leaks"):
        assert not (folder / name).exists(), (folder / name).read_text()[-3000:]
    assert judge(folder) >= 1
    found = {path.name for path in (folder / "root").iterdir() if not path.name.startswith("global_step_")}
    assert found <= {".mcore_rlhf.lock", "journal", "latest_checkpointed_iteration.txt"}, "nothing is left behind"


def produce(root: Path, number: int) -> None:
    """Write rollouts, close files all the time, and note what is safe."""
    rng = random.Random(number)
    note = os.open(root / f"safe-{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    pace = Pace(0.001, 0.005, segment_nbytes=rng.choice([300, 2000, 10**6]), segment_s=rng.choice([0.02, 10]))
    writer, at = JournalWriter(root, f"producer-{number % 3}", pace=pace), 0
    while True:
        for _ in range(rng.randint(1, 5)):
            writer.add(Rollout(0, number, at, 0, version=0, tensors={"tokens": np.arange(rng.randint(1, 40))}))
            at += 1
        writer.flush()
        os.write(note, b"%d\n" % at)
        time.sleep(rng.random() * 0.004)


def safe(root: Path) -> dict[int, int]:
    """How many rollouts of each producer are safe."""
    texts = {int(path.name.partition("-")[2]): path.read_text().split("\n")[:-1] for path in root.glob("safe-*")}
    return {number: int(lines[-1]) for number, lines in texts.items() if lines}


@pytest.mark.slow
def test_what_is_not_consumed_stays_while_producers_write_close_and_die(tmp_path: Path, rng: random.Random) -> None:
    journal, pids, begun, cursor, gone = RolloutJournal(tmp_path), list[int](), 0, dict[int, int](), 0
    end = time.monotonic() + 20
    try:
        while time.monotonic() < end:
            while len(pids) < 3:
                pids.append(forked(partial(produce, tmp_path, begun), tmp_path / "errors"))
                begun += 1
            there = safe(tmp_path)
            cursor = {number: max(cursor.get(number, 0), many - rng.randint(0, 60)) for number, many in there.items()}
            gone += journal.trim(lambda key, now=cursor: key.position < now.get(key.epoch, 0))  # type: ignore[misc]
            if rng.random() < 0.2:
                os.kill(pid := pids.pop(rng.randrange(3)), signal.SIGKILL)
                os.waitpid(pid, 0)
            found = RolloutJournal(tmp_path)._finished
            lost = [
                (one, at) for one, many in there.items() for at in range(cursor[one], many) if (one, at) not in found
            ]
            assert not lost
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    print(f"{begun} producers, {gone} files have gone, {len(list((tmp_path / 'journal').glob('*.seg')))} are left")
    assert gone > begun
    assert not (tmp_path / "errors").exists()
