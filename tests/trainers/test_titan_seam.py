"""torchtitan's own checkpoint manager with our commit: killed, damaged and gone on with, on two ranks.

Its ``Trainer`` imports triton, so its containers and manager are driven by a loop that does what ``Trainer.train`` does with them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rlhf.manager.runs import listed_steps
from tests.helpers.damage import flip_a_bit

PROJECT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def titan(trainers: Path, job: str, folder: Path) -> tuple[subprocess.CompletedProcess[str], list[list[list[float]]]]:
    found = trainers / "torchtitan-0.3.0"
    if not found.is_dir():
        pytest.skip(f"{trainers}: has no torchtitan-0.3.0")
    path = os.pathsep.join(map(str, [PROJECT, found, trainers / "needs"]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "tests.trainers.titan_seam", job, str(folder)],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    seen = [Path(f"{folder}-{job}-{rank}.json") for rank in range(2)]
    return done, [json.loads(file.read_text()) for file in seen if file.is_file()]


def steps(folder: Path) -> dict[int, str]:
    return {step.step: step.state for step in listed_steps(folder / "checkpoint")}


def test_killed_and_damaged_and_gone_on_with(trainers: Path, tmp_path: Path) -> None:
    done, alone = titan(trainers, "alone", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    assert titan(trainers, "whole", tmp_path / "b")[1] == alone
    assert steps(tmp_path / "b") == {6: "committed", 7: "committed"}
    assert titan(trainers, "killed", tmp_path / "c")[0].returncode != 0
    assert {number: state for number, state in steps(tmp_path / "c").items() if state == "committed"} == {
        2: "committed"
    }
    done, resumed = titan(trainers, "resumed-and-signalled", tmp_path / "c")
    assert (done.returncode, resumed) == (0, [seen[2:3] for seen in alone]), done.stderr
    done, resumed = titan(trainers, "resumed", tmp_path / "c")
    assert resumed == [seen[3:] for seen in alone], done.stderr
    part = next((tmp_path / "c" / "checkpoint" / "step-7").glob("*.distcp"))
    flip_a_bit(part)
    done, resumed = titan(trainers, "resumed", tmp_path / "c")
    assert resumed == [seen[6:] for seen in alone], done.stderr
    assert "step-7 is not resumed from: damaged:" in done.stderr
    assert titan(trainers, "resumed-alone", tmp_path / "c")[0].returncode == 0  # it reads what we committed


def test_a_run_whose_last_save_failed_does_not_end_well(trainers: Path, tmp_path: Path) -> None:
    """It goes on after every failed save, and says in the end what is lost."""
    done, seen = titan(trainers, "fails", tmp_path / "a")
    assert (done.returncode, seen) == (1, []), done.stderr
    assert "step 7 was not saved, nor any after it: what was trained since the newest step is lost" in done.stderr
    assert steps(tmp_path / "a") == {4: "committed"}
