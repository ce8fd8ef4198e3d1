"""``will-resume`` for slime and miles says where their own code begins behind a step: with which rollout, and with which prompts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from tests.trainers.lab import PROJECT

GOLDEN = PROJECT / "tests" / "goldens" / "megatron_dist" / "tp2pp2dp2_fully_reshardable"
FOLDERS = {"slime": "slime-624b824", "miles": "miles-31f1ca9"}
STEP = 2


SETTINGS: list[dict[str, object]] = [
    {}, {"start_rollout_id": 3}, {"start_rollout_id": 2}, {"start_rollout_id": 0}, {"finetune": True},
    {"finetune": True, "start_rollout_id": 3}, {"rollout_global_dataset": False},
]  # fmt: skip


def seen(packages: Path, package: str, root: Path, orders: list[tuple[int, object]]) -> list[dict[str, int]]:
    """What the trainer's own code does; see :mod:`.slime_job`."""
    path = os.pathsep.join(map(str, [PROJECT, packages / FOLDERS[package]]))
    command = [sys.executable, "-m", "tests.trainers.slime_job", package, str(root), json.dumps(orders)]
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, int]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("package", FOLDERS)
def test_where_it_begins(package: str, trainers: Path, tmp_path: Path) -> None:
    if not (trainers / FOLDERS[package]).is_dir():
        pytest.skip(f"the repository of {package} is not there")
    root = Path(shutil.copytree(GOLDEN, tmp_path / "run"))
    loads: list[tuple[int, object]] = [(0 if one.get("finetune") else STEP, one) for one in SETTINGS]
    found = seen(trainers, package, root, [(1, "save"), (STEP, "save"), *loads])[2:]
    for given, live in zip(SETTINGS, found, strict=True):
        (prospects,) = forecast(root, loader_named(package)[0], Settings(given)).roles.values()
        told = {one.thing: one for one in prospects}
        assert (told[Thing.COUNTERS].row.outcome is Outcome.RESTORED) == (live["begin"] == STEP + 1), given
        assert (told[Thing.DATA].row.outcome is Outcome.RESTORED) == (live["offset"] == 3 * STEP), given
        if told[Thing.COUNTERS].row.outcome is Outcome.ANEW:
            assert f"begin at {live['begin']}" in told[Thing.COUNTERS].why
            assert f"dict_{live['begin'] - 1}.pt" in told[Thing.DATA].why
            assert live["offset"] == (3 if live["begin"] == 2 else 0)
    (root / "rollout" / f"global_dataset_state_dict_{STEP}.pt").unlink()
    (prospects,) = forecast(root, loader_named(package)[0], Settings()).roles.values()
    assert [one.row.outcome for one in prospects if one.thing is Thing.DATA] == [Outcome.ANEW]
    assert seen(trainers, package, root, [(STEP, {})]) == [{"begin": STEP + 1, "offset": 0}]
