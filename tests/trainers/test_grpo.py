"""TRL's own GRPOTrainer, killed in the middle of a save, goes on with the losses of the run that was not, though TRL alone would not.

What it needs besides comes last in the path, or this repository's own packages would be hidden by it; and from a folder of the one name
whose modules dill does not pickle by their content.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rlhf.manager.runs import listed_steps
from tests.trainers.hf_runs import Seen

PROJECT = Path(__file__).parents[2]
_RUN = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module('tests.trainers.grpo_run', run_name='__main__')"


def grpo(trainers: Path, job: str, folder: Path) -> subprocess.CompletedProcess[str]:
    found = sorted(trainers.glob("trl-[0-9]*"))
    if not found:
        pytest.skip(f"{trainers}: has no trl-1.16.0")
    path = os.pathsep.join([str(PROJECT), str(found[-1])])
    command = [sys.executable, "-c", _RUN, str(trainers / "site-packages"), job, str(folder)]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def seen(done: subprocess.CompletedProcess[str]) -> Seen:
    assert done.returncode == 0, done.stderr
    return [tuple(step) for step in json.loads(done.stdout.splitlines()[-1])]


@pytest.mark.slow
def test_killed_and_gone_on_with(trainers: Path, tmp_path: Path) -> None:
    alone = seen(grpo(trainers, "alone", tmp_path / "alone"))
    killed = grpo(trainers, "killed", tmp_path / "killed")
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.joinpath("killed").glob("checkpoint-*")] == ["checkpoint-3"]
    shutil.copytree(tmp_path / "killed", tmp_path / "by-trl")
    assert seen(grpo(trainers, "resumed", tmp_path / "killed")) == alone[3:]
    assert {step.step: step.state for step in listed_steps(tmp_path / "killed")} == dict.fromkeys(
        (3, 6, 8), "committed"
    )
    # Our files do not disturb TRL, which generates anew in the middle of what was generated: the reason for them.
    assert seen(grpo(trainers, "resumed-alone", tmp_path / "by-trl")) != alone[3:]
