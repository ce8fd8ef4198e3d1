"""``resume-check`` as a whole: a right trainer passes; a wrong one, a blind check, and a command that fails do not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mcore_rlhf.errors import NotACheckpoint, StorageError, UsageError
from mcore_rlhf.manager.prove import command as processes
from mcore_rlhf.manager.prove.check import CheckOptions, CheckOutcome, ResumeCheck
from mcore_rlhf.manager.prove.command import Template
from mcore_rlhf.manager.prove.facts import facts_of
from mcore_rlhf.manager.prove.profiles import profile_named
from tests.distributed import toy_trainer
from tests.distributed.forked import starter

pytestmark = pytest.mark.usefixtures("forked")
PLACES = ["--dir", "{dir}", "--steps", "{steps}"]
METRICS = ["--metrics", "{metrics}"]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are the toy trainer's options."""
    monkeypatch.setattr(processes, "_start", starter(toy_trainer.main))


def checked(folder: Path, *words: str, options: CheckOptions | None = None) -> CheckOutcome:
    return ResumeCheck(Template([*PLACES, *METRICS, *words]), folder / "check", options or CheckOptions(3, 2)).run()


def test_an_exact_trainer_passes(tmp_path: Path) -> None:
    said: list[str] = []
    outcome = ResumeCheck(Template([*PLACES, *METRICS]), tmp_path / "check", CheckOptions(3, 2), said.append).run()
    (run,) = outcome.interrupted
    assert (outcome.verdict, outcome.notes) == ("exact", [])
    assert run.kill is not None
    assert run.kill.resumes_from >= 3
    assert run.comparison.states.files == 5
    assert run.comparison.states.tally.compared > 100
    assert run.comparison.metrics is not None
    assert run.comparison.metrics.equal == run.comparison.metrics.lines >= 5
    assert outcome.control is not None
    assert outcome.control.broken is not None
    assert "exp_avg" in outcome.control.broken.key
    assert any("killed 1 processes" in line for line in said)
    assert {path.name for path in (tmp_path / "check").glob("*.log")} == {
        "A.log",
        "B-killed.log",
        "B-resumed.log",
        "C.log",
    }


@pytest.mark.parametrize(
    ("fault", "metric", "state"),
    [
        ("forgets-rng", "loss", "rng/rng_state.pt: ranks/0/torch"),
        ("moves-cursor", "prompts", "data/data.pt: state"),
        ("drops-kl", "kl_coef", "rlhf/rlhf_state.json: "),
        ("forgets-optimizer", "loss", "actor/state.pt: optimizer/state/0/step"),
    ],
)
def test_a_trainer_that_loses_something_is_caught_and_it_is_named(
    tmp_path: Path, fault: str, metric: str, state: str
) -> None:
    outcome = checked(tmp_path, "--fault", fault, options=CheckOptions(3, 5))
    (run,) = outcome.interrupted
    assert (outcome.verdict, outcome.passed, outcome.notes) == ("different", False, [])
    assert run.comparison.metrics is not None
    named = [finding.key for finding in run.comparison.metrics.tally.findings]
    assert run.kill is not None
    assert any(key.endswith(f"/{metric}") for key in named), named
    assert min(int(key.split("/")[0].split()[1]) for key in named) > run.kill.resumes_from
    places = [f"{finding.where}: {finding.key}" for finding in run.comparison.states.tally.findings]
    assert any(place.startswith(state) for place in places), places


def test_a_trainer_that_begins_anew_makes_the_check_blind(tmp_path: Path) -> None:
    outcome = checked(tmp_path, "--fault", "ignores-checkpoint")
    assert outcome.equal  # it is deterministic: without the control, this would pass
    assert (outcome.verdict, outcome.passed) == ("blind", False)
    assert "run B went back to step 1" in outcome.notes[0]
    assert "the check is blind" in outcome.notes[-1]


NOISY = ["--noise", "1e-3"]
BF16 = CheckOptions(3, 3, profile=profile_named("bf16-reduction"))


def test_a_profile_lets_noise_pass_and_says_how_far_the_worst_was(tmp_path: Path) -> None:
    outcome = checked(tmp_path, *NOISY, options=BF16)
    assert (outcome.verdict, outcome.notes) == ("within", [])
    assert outcome.worst is not None
    assert 0 < outcome.worst.off <= outcome.worst.allowed
    assert sum(tally.within for tally in outcome.interrupted[0].comparison.tallies) > 3
    assert outcome.control is not None
    assert outcome.control.broken is not None
    assert "the sign of each of" in str(outcome.control.broken)
    facts = facts_of(outcome)
    assert facts["profile"]["name"] == "bf16-reduction"  # type: ignore[index]
    assert facts["worst"]["off"] == outcome.worst.off  # type: ignore[index]


def test_noise_is_different_where_no_profile_was_asked_for(tmp_path: Path) -> None:
    outcome = checked(tmp_path, *NOISY)
    assert outcome.verdict == "different"
    assert "training is not repeatable" in outcome.notes[0]


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("skips-step", "step {next}"),
        ("moves-cursor", "/prompts"),
        ("forgets-optimizer", "optimizer/state/0/step"),
    ],
)
def test_a_profile_still_sees_what_noise_cannot_be(tmp_path: Path, fault: str, named: str) -> None:
    outcome = checked(tmp_path, *NOISY, "--fault", fault, options=BF16)
    assert outcome.verdict == "different"
    (run,) = outcome.interrupted
    assert run.kill is not None
    found = [f"{one.where}: {one.key}" for tally in run.comparison.tallies for one in tally.findings]
    after = run.kill.resumes_from + 1
    steps = (after, after + 1)  # what the first would have logged, the run that was killed may have
    assert any(named.format(next=step) in place for step in steps for place in found), (run.kill, found)


AGAIN = ["--again", "{again}"]


def test_what_was_loaded_is_saved_again_before_the_first_update(tmp_path: Path) -> None:
    outcome = checked(tmp_path, *AGAIN)
    assert outcome.verdict == "exact"
    assert outcome.again is not None
    assert outcome.again.states.tally.compared > 100
    assert outcome.again.step == outcome.interrupted[0].kill.resumes_from  # type: ignore[union-attr]


def test_what_is_lost_in_loading_is_named_before_any_update(tmp_path: Path) -> None:
    outcome = checked(tmp_path, *AGAIN, "--fault", "forgets-on-load")
    assert outcome.verdict == "different"
    assert outcome.again is not None
    assert outcome.first == outcome.again.states.tally.findings[0]
    assert "optimizer" in outcome.first.key


def test_a_command_that_does_not_save_again_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"told by \{again\} to load step \d, to save it again and to end, and did not save"
    ):
        checked(tmp_path, *AGAIN, "--fault", "saves-nothing-again")


def test_training_that_is_not_repeatable_is_told_from_a_wrong_resume(tmp_path: Path) -> None:
    outcome = checked(tmp_path, "--fault", "unseeded")
    assert outcome.verdict == "different"
    assert "another run than A already at step" in outcome.notes[0]
    assert "training is not repeatable" in outcome.notes[0]


def test_without_metrics_the_states_alone_decide(tmp_path: Path) -> None:
    outcome = ResumeCheck(Template([*PLACES, "--fault", "drops-kl"]), tmp_path / "check", CheckOptions(2, 2)).run()
    assert outcome.verdict == "different"
    assert outcome.interrupted[0].comparison.metrics is None


def test_random_moments_are_drawn_from_the_seed_for_several_runs(tmp_path: Path, seed: int) -> None:
    outcome = checked(tmp_path, options=CheckOptions(1, 6, "random", runs=2, seed=seed))
    assert outcome.verdict == "exact", (seed, outcome)
    assert [run.comparison.name for run in outcome.interrupted] == ["B", "B2"]


def test_a_command_that_fails_is_shown(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run B failed: exit code 1\nIt printed:") as caught:
        checked(tmp_path, "--fault", "fails-on-resume")
    assert "cannot read my own checkpoint" in str(caught.value)
    assert str(tmp_path / "check" / "B-resumed.log") in str(caught.value)


def test_a_run_that_saves_too_seldom_is_pointed_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"committed the steps 2, 4: none from 3 to 3"):
        checked(tmp_path, "--save-interval", "2", options=CheckOptions(3, 1))
    shutil.rmtree(tmp_path / "check")
    with pytest.raises(NotACheckpoint, match="run A has not committed step 5; committed: 2, 4"):
        checked(tmp_path, "--save-interval", "2")


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "check").mkdir()
    (tmp_path / "check" / "thesis.tex").touch()
    with pytest.raises(StorageError, match="is not empty"):
        checked(tmp_path)
    assert [path.name for path in (tmp_path / "check").iterdir()] == ["thesis.tex"]
