"""``steps``, ``prune``, ``interval`` and ``adopt``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mcore_rlhf.manager.run import retention, steps
from tests.helpers.damage import flip_a_bit
from tests.unit.manager.roots import make_step

from .conftest import Cli


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 10 to 50; 30 is damaged, 40 the best."""
    for number, reward in ((10, 0.5), (20, 0.1), (30, 9.0), (40, 0.9), (50, 0.2)):
        make_step(tmp_path / "run", number, roles=("actor", "critic"), metrics={"reward": reward})
    (tmp_path / "run" / "global_step_30" / "actor" / "weights.bin").unlink()
    return tmp_path / "run"


def test_steps_as_json_has_the_promised_fields(cli: Cli, root: Path) -> None:
    outcome = cli("steps", root, "--json")
    assert outcome.code == 0
    assert [step["step"] for step in outcome.json] == [10, 20, 30, 40, 50]
    assert [step["state"] for step in outcome.json] == ["committed"] * 2 + ["damaged"] + ["committed"] * 2
    first = outcome.json[0]
    assert {name: first[name] for name in ("step", "path", "state", "roles", "time")} == {
        "step": 10,
        "path": str(root / "global_step_10"),
        "state": "committed",
        "roles": ["actor", "critic"],
        "time": "2026-01-02T03:04:05Z",
    }
    assert first["bytes"] == steps.size_of(root / "global_step_10")


def test_steps_for_people(cli: Cli, root: Path) -> None:
    outcome = cli("steps", root)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert "5 steps, 4 committed" in outcome.stdout
    assert "30 damaged" in outcome.words()
    assert "weights.bin: is missing" in outcome.stdout


def test_steps_says_by_its_exit_code_whether_any_is_committed(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "global_step_1").mkdir()
    outcome = cli("steps", tmp_path, "--json")
    assert (outcome.code, outcome.json[0]["state"]) == (1, "partial")
    (tmp_path / "global_step_1").rmdir()
    assert cli("steps", tmp_path, "--json").json == []
    assert cli("steps", tmp_path).code == 1


@pytest.mark.parametrize("command", [["steps"], ["prune", "--keep-last", 1], ["interval", "--root"]])
def test_a_root_that_does_not_exist_is_a_usage_error(cli: Cli, tmp_path: Path, command: list[object]) -> None:
    outcome = cli(*command, tmp_path / "nowhere")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "nowhere: no such folder" in outcome.stderr
    (tmp_path / "file").write_text("x")
    assert cli(*command, tmp_path / "file").code == 2


@pytest.mark.parametrize("command", [["steps"], ["prune", "--keep-last", 1]])
def test_a_step_in_place_of_the_root_is_pointed_out(cli: Cli, root: Path, command: list[object]) -> None:
    outcome = cli(*command, root / "global_step_10")
    assert outcome.code == 2
    assert "is one step, but the root of a run is wanted" in outcome.stderr


def test_quarantine_and_release(cli: Cli, root: Path) -> None:
    outcome = cli("steps", root, "--quarantine", 50, "--reason", "reward collapsed")
    assert outcome.code == 0
    assert "quarantined: reward collapsed" in outcome.stdout
    newest = steps.newest(root)
    assert newest is not None
    assert newest.step == 40
    outcome = cli("steps", root, "--release", 50, "--quarantine", 40, "--json")
    assert [step["quarantined"] for step in outcome.json][-2:] == ["no reason given", ""]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--quarantine", 60], "there is no step 60"),
        (["--release", 60], "there is no step 60"),
        (["--reason", "x"], "Give --quarantine STEP as well"),
        (["--release", 50, "--quarantine", 50], "contradict each other"),
        (["--quarantine", "fifty"], "--quarantine"),
    ],
)
def test_mistakes_about_quarantine(cli: Cli, root: Path, options: list[object], message: str) -> None:
    outcome = cli("steps", root, *options)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert message in outcome.stderr
    assert not list(root.rglob("quarantined.json"))


def test_prune_dry_run_deletes_nothing(cli: Cli, root: Path) -> None:
    before = sorted(root.rglob("*"))
    outcome = cli("prune", root, "--keep-last", 1, "--keep-best", "reward", "--dry-run", "--json")
    assert outcome.code == 0
    facts = outcome.json
    assert [gone["step"] for gone in facts["deleted"]] == [10, 20]
    assert (facts["dry_run"], facts["kept"], facts["failed"]) == (True, [30, 40, 50], [])
    assert facts["bytes"] == 2 * steps.size_of(root / "global_step_10")
    assert sorted(root.rglob("*")) == before
    assert "would delete 2 steps" in cli("prune", root, "--keep-last", 2, "--dry-run").stdout


def test_prune_deletes_what_it_said(cli: Cli, root: Path) -> None:
    (root / ".global_step_60.partial-1-ab").mkdir()
    (root / ".global_step_60.lock-1-ab").write_text(os.uname().nodename)
    outcome = cli("prune", root, "--keep-last", 1, "--keep-best", "reward:min:1", "--include-damaged")
    assert outcome.code == 0
    assert "deleted 3 steps" in outcome.stdout
    assert "kept: 20, 50" in outcome.stdout
    assert "it was left half-written" in outcome.stdout
    assert sorted(os.listdir(root)) == ["global_step_20", "global_step_50"]


def test_prune_by_size(cli: Cli, root: Path) -> None:
    outcome = cli("prune", root, "--max-size", "8kB", "--json")
    assert [gone["step"] for gone in outcome.json["deleted"]] == [10, 20]
    assert "more than 8.0 kB in all" in outcome.json["deleted"][0]["reason"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "nothing says what to keep"),
        (["--keep-last", 0], "--keep-last"),
        (["--keep-best", "rewrad"], "no committed step has the metric 'rewrad'; known: reward; did you mean 'reward'?"),
        (["--keep-best", "reward:most"], "Its forms are METRIC, METRIC:min and METRIC:max:3."),
        (["--keep-best", ""], "expected METRIC"),
        (["--max-size", "much"], "--max-size: should be a size"),
        (["--max-size", "0"], "--max-size: should be greater than 0, found '0'"),
    ],
)
def test_mistakes_about_what_to_keep(cli: Cli, root: Path, options: list[object], message: str) -> None:
    before = sorted(root.rglob("*"))
    outcome = cli("prune", root, *options)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert message in outcome.stderr
    assert sorted(root.rglob("*")) == before


def test_a_step_that_cannot_be_deleted_is_reported(cli: Cli, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "delete", lambda folder, naming: folder.name != "global_step_10")
    outcome = cli("prune", root, "--keep-last", 2)
    assert outcome.code == 1
    assert "not deleted: 10" in outcome.stdout


def _spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)


def test_nothing_is_pruned_before_the_newest_step_is_verified(cli: Cli, root: Path) -> None:
    _spoil(root / "global_step_50" / "critic" / "weights.bin")
    before = sorted(root.rglob("*"))
    outcome = cli("prune", root, "--keep-last", 1)
    assert (outcome.code, outcome.stdout) == (1, "")
    assert "global_step_50: the newest step that stays is damaged; nothing was deleted" in outcome.stderr
    assert "critic/weights.bin: is damaged: CRC-32" in outcome.stderr
    assert f"mcore-rlhf steps {root} --quarantine 50" in outcome.stderr
    assert sorted(root.rglob("*")) == before
    assert cli("prune", root, "--keep-last", 1, "--dry-run").code == 0
    assert cli("steps", root, "--quarantine", 50, "--reason", "damaged").code == 0
    outcome = cli("prune", root, "--keep-last", 1, "--json")
    assert (outcome.code, outcome.json["kept"]) == (0, [30, 40, 50])


def test_prune_can_be_told_not_to_verify(cli: Cli, root: Path) -> None:
    _spoil(root / "global_step_50" / "critic" / "weights.bin")
    outcome = cli("prune", root, "--keep-last", 1, "--no-verify")
    assert outcome.code == 0
    assert "verifying" not in outcome.stderr
    assert "kept: 30, 50" in outcome.stdout


def test_nothing_is_read_where_nothing_goes(cli: Cli, root: Path) -> None:
    _spoil(root / "global_step_50" / "critic" / "weights.bin")
    assert cli("prune", root, "--keep-last", 9).code == 0


def test_interval_says_what_the_disk_use_needs(cli: Cli) -> None:
    options = ["--step-seconds", 45, "--save-seconds", 60, "--mtbf-hours", 8]
    without, with_size = cli("interval", *options), cli("interval", *options, "--size", "1GB", "--steps", 1000)
    assert "Give --size, or --root, for the disk use." in without.stdout
    assert "overhead disk" not in without.words()
    assert "--size" not in with_size.stdout
    assert "overhead disk" in with_size.words()
    best = cli("interval", *options, "--size", "1GB", "--steps", 1000, "--json").json["best"]
    assert best["disk_nbytes"] == pytest.approx(1000 / best["every"] * 1e9, rel=0.05)


def test_interval_explains_itself(cli: Cli) -> None:
    options = ["--step-seconds", 45, "--save-seconds", 60, "--mtbf-hours", 8, "--size", "1.2TB", "--keep-last", 3]
    outcome = cli("interval", *options, "--every", 500)
    assert outcome.code == 0
    assert "save every 41 steps (30 min 45 s)" in outcome.stdout  # sqrt(2 · 60 · 28800) / 45 = 41.3
    assert "Young 1974: 30 min 59 s, 41 steps" in outcome.words()
    assert "3.27 TiB where 3 steps are kept" in outcome.stdout
    assert "500" in outcome.stdout
    facts = cli("interval", *options, "--json").json
    assert (facts["best"]["every"], facts["young"]["every"], facts["measured"]) == (41, 41, None)
    assert facts["failure_probability"] == pytest.approx(0.7904, abs=1e-4)
    assert facts["costs"]["step_nbytes"] == 1_200_000_000_000


def test_interval_says_why_it_is_at_a_limit(cli: Cli) -> None:
    often = cli("interval", "--step-seconds", 10, "--save-seconds", 95, "--stall-seconds", 0, "--mtbf-hours", 1)
    assert "save every 10 steps" in often.stdout
    assert "No shorter interval is possible" in often.stdout
    seldom = cli("interval", "--step-seconds", 1, "--save-seconds", 9, "--mtbf-hours", 1e6, "--steps", 50)
    assert "save every 50 steps" in seldom.stdout
    assert "That is the end of the run" in seldom.stdout
    hopeless = cli("interval", "--step-seconds", 1, "--save-seconds", 900, "--mtbf-hours", 1)
    assert "first approximations" in hopeless.stdout


def test_interval_measures_a_run_and_options_win(cli: Cli, tmp_path: Path) -> None:
    report = {"save_seconds": 60, "stall_seconds": 2, "step_seconds": 45}
    make_step(tmp_path, 10, report=report)
    measured = cli("interval", "--root", tmp_path, "--mtbf-hours", 8, "--json").json
    assert measured["costs"] | {"mtbf_seconds": 0} == {
        "step_seconds": 45, "save_seconds": 60, "mtbf_seconds": 0, "steps": 1000, "stall_seconds": 2, "restart_seconds": 0,
        "step_nbytes": 1000, "keep_last": None,
    }  # fmt: skip
    assert measured["measured"]["steps"] == 1
    other = cli("interval", "--root", tmp_path, "--mtbf-hours", 8, "--step-seconds", 10, "--size", "5MB", "--json").json
    assert (other["costs"]["step_seconds"], other["costs"]["step_nbytes"]) == (10, 5_000_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "missing: --step-seconds, --save-seconds, --mtbf-hours; --root measures the first two"),
        (["--step-seconds", 1, "--save-seconds", 1], "missing: --mtbf-hours"),
        (
            ["--step-seconds", -1, "--save-seconds", 1, "--mtbf-hours", 1],
            "--step-seconds: should be greater than 0, found -1",
        ),
        (["--step-seconds", 1, "--save-seconds", 1, "--mtbf-hours", 1, "--size", "big"], "--size: should be a size"),
    ],
)
def test_mistakes_about_costs(cli: Cli, options: list[object], message: str) -> None:
    outcome = cli("interval", *options)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert message in outcome.stderr


@pytest.fixture
def foreign(tmp_path: Path, tp1: Path) -> Path:
    """A step without a manifest."""
    shutil.copytree(tp1, tmp_path / "run" / "global_step_2" / "actor")
    return tmp_path / "run" / "global_step_2"


def test_adopt_commits_a_step(cli: Cli, foreign: Path) -> None:
    assert cli("steps", foreign.parent).code == 1
    outcome = cli("adopt", foreign)
    assert outcome.code == 0
    assert "adopted; 3 files" in outcome.stdout
    assert "actor megatron, TP1×PP1×DP1" in outcome.words()
    assert "missing data/data.pt: without it RLinf begins its data anew" in outcome.words()
    assert cli("steps", foreign.parent).code == 0
    again = cli("adopt", foreign)
    assert (again.code, "is committed already" in again.stdout) == (0, True)
    assert cli("adopt", foreign, "--json").json["adopted"] is False


def test_adopt_refuses_what_is_damaged(cli: Cli, foreign: Path) -> None:
    flip_a_bit(foreign / "actor" / "iter_0000002" / "mp_rank_00" / "distrib_optim.pt")
    outcome = cli("adopt", foreign, "--deep")
    assert (outcome.code, outcome.stdout) == (1, "")
    assert "distrib_optim.pt" in outcome.stderr
    assert not (foreign / "manifest.json").exists()


def test_adopt_wants_a_step(cli: Cli, tp1: Path, tmp_path: Path) -> None:
    assert "global_step_N" in cli("adopt", tp1).stderr
    assert cli("adopt", tp1).code == 2
    assert cli("adopt", tmp_path / "global_step_9").code == 2


@pytest.mark.parametrize("command", ["steps", "prune", "interval", "adopt"])
def test_help_has_an_example(cli: Cli, command: str) -> None:
    outcome = cli(command, "--help")
    assert outcome.code == 0
    assert f"Examples: mcore-rlhf {command}" in outcome.words()
