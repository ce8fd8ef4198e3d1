"""One call of the file system after another fails; see :mod:`tests.faults.sweeps`. A sample in ``make test``, all in ``make test-all``."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.sweeps import SWEEPS

SAMPLE = {
    "save behind training, EIO": 13,
    "save again, EIO": 17,
    "save and delete, EIO of reads": 41,
    "save linked, EIO of reads": 31,
    "load, EIO": 29,
    "load, EACCES from there on": 37,
    "prune, EIO from there on": 61,
    "weights, ESTALE of reads from there on": 41,
    "convert, EIO": 37,
    "convert to torch, ENOSPC from there on": 7,
    "rollouts, EIO": 5,
    "watch, EIO": 19,
}
"""Every so manieth call of each."""


def swept(shim: Path, folder: Path, *sweeps: str) -> dict[str, Any]:
    """What came of each, in a process whose disk fails."""
    command = [sys.executable, "-m", "tests.faults.sweeps", str(folder), *sweeps]
    environment = {**os.environ, "LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def sampled(shim: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, Any]:
    """All of the sample, by one process, which imports once."""
    rng = random.Random(f"{pytestconfig.getoption('--seed')}:sweeps")
    asked = [f"{sweep}:{every}:{rng.randint(1, every)}" for sweep, every in SAMPLE.items()]
    return swept(shim, tmp_path_factory.mktemp("sweeps"), *asked)


@pytest.mark.parametrize("sweep", SAMPLE)
def test_a_sample_of_calls(sampled: dict[str, Any], sweep: str) -> None:
    found = sampled[sweep]
    assert found["faults"] > 2, "nothing failed: is the shim preloaded?"
    assert not found["wrong"], json.dumps(found, indent=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sweep", SWEEPS)
def test_every_call(shim: Path, tmp_path: Path, sweep: str) -> None:
    found = swept(shim, tmp_path, sweep)[sweep]
    print(sweep, json.dumps(found["outcomes"]))
    assert found["faults"], "nothing failed: is the shim preloaded?"
    assert not found["wrong"], json.dumps(found, indent=1)
