"""Kills of asynchronous GRPO at random moments: no prompt is skipped or trained on twice, and what was finished is given back."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rlhf.manager.run import steps
from tests.crash.async_grpo import GROUP, PROMPTS, expected

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
    assert not rest, "the run stops at the end of an epoch"
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
    history(tmp_path / "run", 6, rng, 120)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_kills(tmp_path: Path, rng: random.Random) -> None:
    history(tmp_path / "run", 100, rng, 1500)
