"""TRL's GRPOTrainer goes on from what we write: the same completions, rewards and losses as without an interruption.

It draws its completions from torch's generator: of another layout it has other states, and says so; with those of
the run put back by hand, the rest is what it was."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rlhf.core.facts import Fate
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from tests.trainers.lab import PROJECT, Lab

RELEASE, RANDOM = "trl-1.16.0", "rng_state.pth"


def run(lab: Lab, folder: Path, *resume: Path, **otherwise: object) -> list[list[float]]:
    """What each step saw, with other arguments."""
    own = lab.packages / RELEASE
    if not own.is_dir():
        pytest.fail(f"{own}: missing; make test-trainers puts it there")
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, [PROJECT, own, lab.packages / "needs"])))
    env["OTHERWISE"] = json.dumps(otherwise)
    command = [sys.executable, "-m", "tests.trainers.trl_job", str(folder), *map(str, resume)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_grpo_goes_on_after_megatron(trainers: Path, tmp_path: Path) -> None:
    lab = Lab(trainers, tmp_path)
    whole = run(lab, tmp_path / "run")
    saved = tmp_path / "run" / "checkpoint-2"
    assert len(whole) == 4
    same, _ = lab.convert(saved, "transformers", "same")
    assert run(lab, tmp_path / "again", same / "checkpoint-2") == whole[2:]
    there, _ = lab.convert(saved, "megatron", "megatron", tp=2)
    back, job = lab.convert(there, "transformers", "back", like=str(saved))
    told = [text for one in job.jobs.values() for fate, text in one.report.lines if fate in (Fate.DERIVED, Fate.LOST)]
    assert any("rng" in text for text in told), told
    shutil.copy(saved / RANDOM, back / "checkpoint-2")
    assert run(lab, tmp_path / "by Megatron", back / "checkpoint-2") == whole[2:]


ANEW: dict[str, tuple[Thing, dict[str, object]]] = {
    "samples for four updates": (Thing.DATA, {"num_iterations": 4}),
    "samples for two updates": (Thing.DATA, {"num_iterations": 2}),
    "a reference that is synced": (Thing.AVERAGE, {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 1}),
    "a reference that stays": (Thing.AVERAGE, {"beta": 0.5}),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ANEW)
def test_will_resume_says_what_trl_holds_and_does_not_save(name: str, trainers: Path, tmp_path: Path) -> None:
    """The arguments that the step itself keeps say it; TRL goes on otherwise, and says nothing."""
    (thing, otherwise), lab = ANEW[name], Lab(trainers, tmp_path)
    whole, saved = run(lab, tmp_path / "run", **otherwise), tmp_path / "run" / "checkpoint-2"
    again = run(lab, tmp_path / "again", saved, **otherwise)
    told = forecast(saved, loader_named("trl")[0], Settings(), None).roles[""]
    is_anew = any(one.thing is thing and one.row.outcome is Outcome.ANEW for one in told)
    assert is_anew == (again != whole[2:]) == (name in ("samples for four updates", "a reference that is synced"))
