"""Worlds of real DeepSpeed on the CPU: each is started once and runs a list of cases."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).parents[2]
_TIMEOUT = 280.0
Case = dict[str, Any]


def require_deepspeed() -> None:
    """Skip where DeepSpeed is not installed; it is not imported here, since that changes the process."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")


@dataclass
class DeepSpeedLab:
    """Runs cases, and keeps what each rank saw.

    Args:
        root: Folder of all cases' folders.
        seen: By case, one result per rank.
    """

    root: Path
    seen: dict[str, list[Case]] = field(default_factory=dict)

    def run(self, world: int, cases: dict[str, Case]) -> None:
        """Start a world, and run cases one after the other."""
        number = len(list(self.root.glob("job-*.json")))
        job = self.root / f"job-{number}.json"
        store = self.root / f"store-{number}"
        job.write_text(json.dumps({"store": str(store), "root": str(self.root), "cases": cases, "number": number}))
        logs = [self.root / f"log-{number}-{rank}.txt" for rank in range(world)]
        ranks = [_start(job, rank, world, log) for rank, log in enumerate(logs)]
        _wait(ranks, logs)
        results = [json.loads((self.root / f"results-{number}-{rank}.json").read_text()) for rank in range(world)]
        for name in cases:
            self.seen[name] = [result.get(name, {"error": "an earlier case failed"}) for result in results]

    def of(self, name: str) -> list[Case]:
        """What each rank saw of a case; its error is the test's."""
        for rank, result in enumerate(self.seen[name]):
            if "error" in result:
                pytest.fail(f"{name}, rank {rank}: {result['error']}")
        return self.seen[name]

    def role(self, name: str) -> Path:
        """The role's folder that the manager saved."""
        return self.root / name / "ours" / "global_step_2" / "actor"


def _start(job: Path, rank: int, world: int, log: Path) -> subprocess.Popen[bytes]:
    env = {
        **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(PROJECT), *filter(None, sys.path)]),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.reference.deepspeed_worker", str(job)]
    with log.open("wb") as out:
        return subprocess.Popen(command, cwd=PROJECT, env=env, stdout=out, stderr=subprocess.STDOUT)


def _wait(ranks: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    """Until all have ended; where one fails, the others would wait for it."""
    end = time.monotonic() + _TIMEOUT
    try:
        while any(rank.poll() is None for rank in ranks):
            failed = [number for number, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
            if failed or time.monotonic() > end:
                number = failed[0] if failed else 0
                pytest.fail(f"rank {number} failed or did not end:\n{logs[number].read_text()[-3000:]}")
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    failed = [number for number, rank in enumerate(ranks) if rank.returncode]
    if failed:
        pytest.fail(f"rank {failed[0]} failed:\n{logs[failed[0]].read_text()[-3000:]}")
