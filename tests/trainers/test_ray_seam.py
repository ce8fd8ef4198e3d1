"""Ray Train's own ``TorchTrainer`` with our commit: two workers, killed, damaged, gone on with, and told of a node that goes."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.manager.runs import listed_steps
from tests.helpers.damage import flip_a_bit
from tests.trainers.lab import PROJECT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Runs:
    """Runs in folders of their own, each with a cluster of its own."""

    timeout = 200

    def __init__(self, trainers: Path, folder: Path) -> None:
        path = os.pathsep.join(map(str, [PROJECT, trainers / "needs"]))
        self.environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        self.folder = folder

    def __call__(self, job: str, name: str) -> tuple[int, list[list[Any]], str]:
        """The exit status, what each worker saw, and what was printed."""
        root = self.folder / name
        root.mkdir(exist_ok=True)
        files = [root / f"{job}-{rank}.json" for rank in range(2)]
        for file in files:
            file.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.trainers.ray_seam", job, str(root), str(root / f"{job}.json")],
            env=self.environment, cwd=PROJECT, capture_output=True, text=True, timeout=self.timeout, check=False,
        )  # fmt: skip
        return (
            done.returncode,
            [json.loads(file.read_text()) for file in files if file.is_file()],
            done.stdout + done.stderr,
        )

    def losses(self, job: str, name: str) -> tuple[list[list[Any]], list[list[str]]]:
        """The losses of each worker of a run that ended well, and what else it noted."""
        status, found, printed = self(job, name)
        assert status == 0, printed[-5000:]
        assert len(found) == (1 if job == "one" else 2)
        return [[one for one in seen if isinstance(one, list)] for seen in found], [
            [one for one in seen if isinstance(one, str)] for seen in found
        ]

    def steps(self, name: str) -> dict[str, str]:
        """The states of the steps in a run's folder, by name."""
        return {step.path.name: step.state for step in listed_steps(self.folder / name / "run")}


@pytest.fixture(scope="module")
def runs(trainers: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs with Ray's packages."""
    return Runs(trainers, tmp_path_factory.mktemp("ray"))


@pytest.fixture(scope="module")
def alone(runs: Runs) -> list[list[Any]]:
    """The losses of a run with Ray's own upload."""
    return runs.losses("alone", "alone")[0]


def test_a_worker_is_killed_and_ray_goes_on(runs: Runs, alone: list[list[Any]]) -> None:
    losses, said = runs.losses("killed", "killed")
    assert losses == [seen[4:] for seen in alone], "Ray started the workers anew, twice"
    assert all("resumed checkpoint_step_4" in one for one in said)
    events = (runs.folder / "killed" / "run" / "events.jsonl").read_text()
    assert re.findall(r"Ray Train loads \S*/(\w+)", events) == ["checkpoint_step_2", "checkpoint_step_4"]
    committed = {f"checkpoint_step_{step}": "committed" for step in (2, 4, 6)}
    assert runs.steps("killed") == committed, "num_to_keep is 2, and Ray has not heard of step 4"
    folder = runs.folder / "killed" / "run" / "checkpoint_step_6"
    assert {path.name for path in folder.iterdir()} == {
        "worker-0.pt", "worker-1.pt", ".metadata.json", "mcore_rlhf.json",
    }  # fmt: skip
    assert not [path for path in folder.parent.iterdir() if ".partial-" in path.name]


def test_workers_are_killed_at_random(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each start one worker, and Ray starts them anew; ``SEAM_KILLS`` starts, 4 unless more are asked for."""
    kills = int(os.environ.get("SEAM_KILLS", "4"))
    for name, value in {"SEAM_KILLS": kills, "SEAM_LAST": 40 + 20 * kills, "SEED": random.randrange(1 << 30)}.items():
        print(name, value)
        monkeypatch.setitem(runs.environment, name, str(value))
    monkeypatch.setattr(runs, "timeout", 200 + 20 * kills)
    expected = dict(runs.losses("alone", "long")[0][0])
    status, _, said = runs("kills", "kills")
    assert status == 0, said[-5000:]
    starts = [
        [json.loads(line) for line in file.read_text().splitlines()] for file in runs.folder.glob("kills/told-*-0")
    ]
    assert len(starts) == kills + 1
    for seen in starts:
        losses = [one for one in seen if isinstance(one, list)]
        assert [step for step, _ in losses] == [*range(losses[0][0], losses[-1][0] + 1)] if losses else True
        assert all(expected[step] == loss for step, loss in losses)
    assert {*runs.steps("kills").values()} == {"committed"}


def test_a_save_that_fails_publishes_nothing(runs: Runs, alone: list[list[Any]]) -> None:
    losses, said = runs.losses("raised", "raised")
    assert losses == [seen[2:] for seen in alone]
    assert all("resumed checkpoint_step_2" in one for one in said), "and not what Ray itself was told at step 3"
    root = runs.folder / "raised" / "run"
    assert "step_4 failed on rank 1: writing" in (root / "events.jsonl").read_text()
    assert runs.steps("raised") == {f"checkpoint_step_{step}": "committed" for step in (2, 4, 6)}
    assert len([*root.glob("checkpoint_20*")]) == 3, "Ray's own are as ever: of seven it keeps six"
    assert not [path for path in root.iterdir() if ".partial-" in path.name]


def test_a_damaged_step_is_passed_over(runs: Runs, alone: list[list[Any]]) -> None:
    losses, said = runs.losses("call", "call")
    assert losses == alone
    assert all("StepOptions.keep: Ray takes no run further" in one[0] for one in said)
    assert all("StepOptions.on_error='continue'" in one[0] for one in said)
    root = runs.folder / "call" / "run"
    flip_a_bit(root / "checkpoint_step_6" / "worker-1.pt")
    shutil.copytree(root.parent, runs.folder / "one")
    losses, said = runs.losses("resumed", "call")
    assert losses == [seen[4:] for seen in alone]
    assert all("resumed checkpoint_step_4" in one for one in said)
    assert "checkpoint_step_6 is not resumed from: damaged" in (root / "events.jsonl").read_text()
    assert json.loads((runs.folder / "call" / "resumed.json").read_text())["latest"] == "checkpoint_step_6-02"
    assert runs.steps("call")["checkpoint_step_6-02"] == "committed"
    assert len(runs.losses("one", "one")[0][0]) == 2, "another number of workers goes on from step 4"
    assert runs.steps("one")["checkpoint_step_6-02"] == "committed"
    names = {path.name for path in (runs.folder / "one" / "run" / "checkpoint_step_6-02").iterdir()}
    assert names == {"worker-0.pt", "worker-1.pt", ".metadata.json", "mcore_rlhf.json"}, (
        "what was loaded was reported again"
    )


def test_one_worker_has_files_and_two_have_the_same(runs: Runs, alone: list[list[Any]]) -> None:
    assert runs.losses("rank0", "rank0")[0] == alone
    assert not (runs.folder / "rank0" / "run" / "checkpoint_step_6" / "worker-1.pt").exists()
    status, _, printed = runs("same", "same")
    assert status != 0
    assert "model.pt: is reported by worker 0 and by worker 1" in printed
    assert runs.steps("same") == {}


@pytest.mark.parametrize(
    ("job", "text"),
    [("async", "CheckpointUploadMode.ASYNC: the workers meet"), ("elsewhere", "is of a file system 'subtree'")],
)
def test_what_is_refused(runs: Runs, job: str, text: str) -> None:
    status, _, printed = runs(job, job)
    assert status != 0
    assert text in printed
    assert runs.steps(job) == {}


def test_a_node_is_about_to_go(runs: Runs, alone: list[list[Any]]) -> None:
    losses, said = runs.losses("preempted", "preempted")
    assert losses == alone
    for one in said:
        (reason,) = [text for text in one if "StepOptions" not in text]
        assert reason.startswith("the deadline is in ")
    assert runs.steps("preempted") == {"checkpoint_step_3": "committed"}, "once"


def test_the_page(runs: Runs) -> None:
    page = (PROJECT / "docs" / "how-to" / "commit-your-trainers-checkpoints.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(# ray_run\.py.*?)^```$", page, re.MULTILINE | re.DOTALL)
    folder = runs.folder / "page"
    folder.mkdir()
    for steps in (20, 40):
        (folder / "ray_run.py").write_text(script.replace('"steps": 60', f'"steps": {steps}'))
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "ray_run.py"], env=runs.environment, cwd=folder, capture_output=True, text=True,
            timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert [step.step for step in listed_steps(folder / "runs" / "mine")] == [10, 20, 30, 40]
    events = (folder / "runs" / "mine" / "events.jsonl").read_text()
    assert len(re.findall("Ray Train loads .*/checkpoint_step_20", events)) == 1
