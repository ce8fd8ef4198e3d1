"""torchdata's own StatefulDataLoader: with its prompts acknowledged, none is skipped or repeated by crashes."""

from __future__ import annotations

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
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, [PROJECT, trainers / "needs"])), OMP_NUM_THREADS="1")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.trainers.torchdata_job",
        str(rng.randrange(1 << 30)),
        str(workers),
        str(histories),
    ]
    done = subprocess.run(command, env=env, cwd=PROJECT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [f"{number}: 0 repeated, 0 skipped" for number in range(histories)]
