"""NeMo-RL's own replay buffer hands out the same after its state went through a step of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainers.lab import PROJECT

RELEASE = "NeMo-RL-7ea279a"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_its_state_comes_back(trainers: Path, tmp_path: Path) -> None:
    if not (trainers / RELEASE).is_dir():
        pytest.skip(f"{RELEASE}: its repository could not be fetched")
    path = os.pathsep.join(map(str, [PROJECT, trainers / RELEASE, trainers / "needs"]))
    env = dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1")
    command = [sys.executable, "-W", "ignore", "-m", "tests.trainers.nemo_replay_job", str(tmp_path / "root")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, ours = json.loads(done.stdout.splitlines()[-1])
    assert theirs == ours
    assert theirs[1] == [0, 0, 1, 1], "something was handed out"
