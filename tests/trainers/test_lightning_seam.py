"""Lightning's own ``Trainer`` with our commit: killed, failed, damaged and gone on with, in one process and in two of DDP."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.manager.runs import listed_steps
from tests.helpers.damage import flip_a_bit
from tests.trainers.lab import PROJECT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
RELEASE = "lightning-2.6.6"
FOUR, SIX, TEN = "epoch=0-step=4.ckpt", "epoch=1-step=6.ckpt", "epoch=2-step=10.ckpt"


class Runs:
    """Runs in folders of their own; each is a process."""

    def __init__(self, trainers: Path, folder: Path) -> None:
        self.path = os.pathsep.join(map(str, [PROJECT, trainers / RELEASE, trainers / "needs"]))
        self.folder = folder

    def __call__(self, job: str, name: str, ranks: int = 1) -> tuple[int, list[dict[str, Any]], str]:
        """The exit status, what each rank saw, and what was printed."""
        result = self.folder / f"{name}-{job}.json"
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *start, "-m", "tests.trainers.lightning_seam", job, str(self.folder / name), str(result)],
            env={**os.environ, "PYTHONPATH": self.path, "OMP_NUM_THREADS": "1"},
            cwd=PROJECT, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        files = [result] if ranks == 1 else [result.with_name(f"{result.stem}-{rank}.json") for rank in range(ranks)]
        return done.returncode, [json.loads(file.read_text()) for file in files if file.is_file()], done.stderr

    def seen(self, job: str, name: str) -> list[Any]:
        """What a run saw that ended well."""
        status, found, printed = self(job, name)
        assert status == 0, printed[-3000:]
        steps: list[Any] = found[0]["seen"]
        return steps

    def steps(self, name: str) -> dict[str, str]:
        """The states of the steps in a run's folder, by name."""
        return {step.path.name: step.state for step in listed_steps(self.folder / name)}


@pytest.fixture
def runs(trainers: Path, tmp_path: Path) -> Runs:
    """Runs with Lightning's packages."""
    if not (trainers / RELEASE).is_dir():
        pytest.fail(f"{trainers / RELEASE}: missing; make test-trainers puts it there")
    return Runs(trainers, tmp_path)


def test_killed_and_gone_on_with(runs: Runs) -> None:
    alone = runs.seen("alone", "a")
    assert (runs.folder / "a" / SIX).is_file(), "Lightning's own is a file"
    status, _, printed = runs("resumed", "a")
    assert status == 1
    assert f"holds no committed step, but epoch=0-step=2.ckpt, {FOUR}" in printed, "a run does not begin anew beside it"
    assert runs.seen("whole", "b") == alone
    assert len(runs.steps("b")) == 5
    assert {*runs.steps("b").values()} == {"committed"}
    assert runs.seen("last", "b") == [], "last.ckpt is step 10"
    assert runs.seen("export", "b") == []
    found = {path.name for path in (runs.folder / "b").glob("*step=10.ckpt")}
    assert found == {TEN, f"export-{TEN[8:]}"}, "what was loaded stays"
    assert len(runs.steps("b")) == 5, "each step once"
    assert runs("killed", "c")[0] == -9
    assert runs.steps("c") == {"epoch=0-step=2.ckpt": "committed", FOUR: "committed"}
    assert runs.seen("resumed", "c") == alone[4:]
    assert not [path for path in (runs.folder / "c").iterdir() if ".partial-" in path.name or ".lock-" in path.name]
    assert runs.seen("2", "c") == alone[2:], "a step that is named"
    kept = {step.path.name: bool(step.quarantined) for step in listed_steps(runs.folder / "c")}
    assert not any(kept.values()), "all newer ones were saved again"
    assert len([*(runs.folder / "c").glob("*.ckpt")]) == 5, "each once"


def test_killed_in_slurms_own_save_and_requeued(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning takes the digits of what is left aside for the number of a save that is there."""
    alone = runs.seen("whole", "a")
    for name in ("NTASKS", "JOB_ID", "JOB_NAME", "LOCALID", "NODEID", "PROCID"):
        monkeypatch.setenv(f"SLURM_{name}", "1" if name in ("NTASKS", "JOB_ID") else "0")
    assert runs("signalled", "b")[0] == -9
    assert any(".hpc_ckpt_1.ckpt.partial" in path.name for path in (runs.folder / "b").iterdir())
    assert runs.seen("requeued", "b") == alone[4:]
    assert not [path for path in (runs.folder / "b").iterdir() if "hpc_ckpt_" in path.name]
    assert set(runs.steps("b").values()) == {"committed"}


def test_a_damaged_step_is_passed_over_or_refused(runs: Runs) -> None:
    alone = runs.seen("whole", "a")
    for name in (SIX, "epoch=1-step=8.ckpt", TEN):
        flip_a_bit(runs.folder / "a" / name / "lightning.ckpt")
    status, _, printed = runs("10", "a")
    assert status == 1
    assert "lightning.ckpt: is damaged: CRC-32" in printed
    assert f"{FOUR}" in printed, "those that are whole are named"
    assert runs.seen("resumed", "a") == alone[4:]
    said = (runs.folder / "a" / "events.jsonl").read_text()
    assert f"{TEN} is not resumed from: damaged: " in said
    assert f"{SIX} is not resumed from: damaged: " in said
    found = runs.steps("a")
    assert sorted(step.step for step in listed_steps(runs.folder / "a")) == [2, 4, 6, 8, 10]
    assert not {SIX, TEN} & found.keys(), "Lightning counted on, and the damaged ones went for the new"
    assert {*found.values()} == {"committed"}
    assert runs.seen("resumed", "a") == []


def test_what_lightning_deletes_and_what_fails(runs: Runs) -> None:
    alone = runs.seen("top", "a")
    assert runs.steps("a") == {TEN: "committed"}, "save_top_k is 1"
    status, found, printed = runs("failed", "b")
    assert status == 0, printed[-3000:]
    assert found[0]["seen"] == alone
    assert any("No space left on device" in line for line in found[0]["said"])
    said = (runs.folder / "b" / "events.jsonl").read_text()
    assert f"{FOUR} is not deleted: no newer step is committed" in said, "the save of its successor failed"
    assert TEN in runs.steps("b")
    runs.seen("best", "c")
    best = min((seen for seen in alone if seen[0] % 2 == 0), key=lambda seen: seen[1])[0]
    assert sorted(step.step for step in listed_steps(runs.folder / "c")) == sorted({best, 10})


def test_the_page(runs: Runs) -> None:
    page = (PROJECT / "docs" / "how-to" / "commit-your-trainers-checkpoints.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(# fit\.py.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for steps in ("60", "120"):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script.replace("max_steps=60", f"max_steps={steps}")],
            env={**os.environ, "PYTHONPATH": runs.path}, cwd=runs.folder, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    assert [step.step for step in listed_steps(runs.folder / "runs" / "lightning")] == [100, 110, 120]


def test_two_ranks(runs: Runs) -> None:
    status, alone, printed = runs("alone", "a", 2)
    assert status == 0, printed[-3000:]
    assert [found["seen"] for found in runs("whole", "b", 2)[1]] == [found["seen"] for found in alone]
    flip_a_bit(runs.folder / "b" / TEN / "lightning.ckpt")
    flip_a_bit(runs.folder / "b" / "epoch=1-step=8.ckpt" / "lightning.ckpt")
    status, found, printed = runs("resumed", "b", 2)
    assert status == 0, printed[-3000:]
    assert [one["seen"] for one in found] == [one["seen"][6:] for one in alone]
    flip_a_bit(runs.folder / "b" / SIX / "lightning.ckpt")
    status, _, printed = runs("6", "b", 2)
    assert status == 1
    assert "failed on rank 0" in printed, "rank 1 is told, and does not wait"
