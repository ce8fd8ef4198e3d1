"""``resume-check`` over TRL's own GRPOTrainer: by itself it does not resume exactly amid what it generated, and with ``attach`` it does."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mcore_rlhf.manager.prove.check import CheckOptions, CheckOutcome, ResumeCheck
from mcore_rlhf.manager.prove.command import Template

PROJECT = Path(__file__).parents[2]
_RUN = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module('tests.trainers.grpo_checked', run_name='__main__')"


def checked(trainers: Path, job: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> CheckOutcome:
    found = sorted(trainers.glob("trl-[0-9]*"))
    if not found:
        pytest.skip(f"{trainers}: has no trl-1.16.0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PROJECT), str(found[-1])]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-c", _RUN, str(trainers / "site-packages"), job, "{dir}", "{steps}", "{metrics}"]
    return ResumeCheck(Template(command), folder, CheckOptions(1, 2, timeout=120)).run()


@pytest.mark.slow
@pytest.mark.parametrize("job", ["alone", "attached"])
def test_what_the_check_says_of_grpo(trainers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str) -> None:
    outcome = checked(
        trainers, job, tmp_path / "check", monkeypatch
    )  # generated is for four updates: the kill is amid them
    assert outcome.control is not None
    assert outcome.control.caught
    assert outcome.notes == []
    if job == "attached":
        assert outcome.verdict == "exact", outcome.first
        return
    assert outcome.verdict == "different"
    assert outcome.first is not None
    kill = outcome.interrupted[0].kill
    assert kill is not None
    assert outcome.first.key.startswith(f"step {kill.resumes_from + 1}/")
