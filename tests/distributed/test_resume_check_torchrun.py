"""``resume-check`` with torchrun, whose workers live in sessions of their own: they are all killed, in the middle of a save."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mcore_rlhf.manager.prove.check import CheckOptions, ResumeCheck
from mcore_rlhf.manager.prove.command import Template
from mcore_rlhf.manager.prove.facts import write_by_rank

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TRAINER = [
    "-m",
    "tests.distributed.toy_trainer",
    "--dir",
    "{dir}",
    "--steps",
    "{steps}",
    "--metrics",
    "{metrics}",
    "--each-rank",
]


@pytest.mark.slow
def test_a_run_of_two_ranks_resumes_exactly_after_a_kill_during_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # for tests.…, wherever pytest was started
    options = CheckOptions(2, 4, "during-save", timeout=120)
    outcome = ResumeCheck(Template([*TORCHRUN, *TRAINER]), tmp_path / "check", options).run()
    (run,) = outcome.interrupted
    assert outcome.verdict == "exact", outcome
    assert run.kill is not None
    assert run.kill.processes == 3
    assert run.kill.partial is not None
    assert run.kill.partial.step == run.kill.resumes_from + 1
    assert run.kill.partial.files
    assert run.comparison.metrics is not None
    assert run.comparison.metrics.lines >= 6
    assert {rank: metrics.tally.equal for rank, metrics in run.comparison.ranks.items()} == {0: True, 1: True}
    written = [json.loads(path.read_text()) for path in write_by_rank(outcome, tmp_path / "check")]
    assert [(one["rank"], one["runs"][0]["equal"], one["runs"][0]["first_difference"]) for one in written] == [
        (0, True, None),
        (1, True, None),
    ]
