"""torchdata's own StatefulDataLoader: with its prompts acknowledged, none is skipped or repeated by crashes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainers.lab import PROJECT


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("workers", "histories"), [(0, 20), (2, 2)])
def test_crashes(trainers: Path, rng: random.Random, workers: int, histories: int) -> None:
    numbers = map(str, (rng.randrange(1 << 30), workers, histories))
    assert lines_of(trainers, "torchdata_job", *numbers) == [
        f"{one}: 0 repeated, 0 skipped" for one in range(histories)
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("to", ["verl", "rlinf"])
def test_a_loader_goes_on_from_openrlhfs_position(trainers: Path, rng: random.Random, to: str, workers: int) -> None:
    numbers = map(str, (rng.randrange(1 << 30), workers))
    assert lines_of(trainers, "position_job", to, *numbers)[-1] == "7 batches, the same"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("to", "workers"), [("verl", 0), ("rlinf", 2)])
def test_a_loader_goes_on_from_accelerates_position(trainers: Path, to: str, workers: int) -> None:
    assert lines_of(trainers, "accelerate_position_job", to, str(workers))[-1] == "7 batches, the same"


def lines_of(trainers: Path, job: str, *arguments: str) -> list[str]:
    """What a process prints that has torchdata."""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, [PROJECT, trainers / "needs"])), OMP_NUM_THREADS="1")
    command = [sys.executable, "-W", "ignore", "-m", f"tests.trainers.{job}", *arguments]
    done = subprocess.run(command, env=env, cwd=PROJECT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_from_which_one_key_was_taken(trainers: Path, workers: int) -> None:
    """torchdata stops at the first batch, or goes on with the same one; but for a sampler's own state, which no other key speaks of."""
    (found,) = map(json.loads, lines_of(trainers, "torchdata_job", "keys", str(workers)))
    assert len(found) > 8
    sampler = "_sampler_iter_state/sampler_iter_state"
    wrong = {key: seen for key, seen in found.items() if not key.endswith(sampler) and seen[0] != seen[1]}
    assert not wrong
    assert [seen for key, seen in found.items() if key.endswith(sampler)] == [["goes on", "another batch"]]
