"""Ranks that save with all options at once, whatever happens to them, their disks and their store: a start is, in every bit, where a run
that nothing ever happened to was."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.disk import compiled
from tests.helpers.object_store import S3, LostAnswer, url

PROJECT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_mixture_with_router_bias(tmp_path: Path, rng: random.Random, s3: S3) -> None:
    library = compiled(tmp_path)
    if library is None or importlib.util.find_spec("megatron") is None:
        pytest.skip("there is no C compiler for the disk that fails, or no megatron-core")

    def lose(request: object) -> None:
        if rng.random() < 0.03:
            raise LostAnswer

    s3.fault, s3.after = lambda request: "503 Slow Down" if rng.random() < 0.05 else None, lose
    words = [
        str(tmp_path / "run"),
        "--rounds=15",
        "--seconds=120",
        f"--seed={rng.randrange(1 << 32)}",
        f"--mirror={url('mixture')}",
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.crash.mixture_weather", *words],
        cwd=PROJECT, env={**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=290, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
