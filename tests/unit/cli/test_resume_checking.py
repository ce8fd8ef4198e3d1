"""``resume-check`` on the command line: what it refuses, prints, and compares."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch

from mcore_rlhf.storage.manifest import FileEntry, Manifest, crc_of_file

from .conftest import Cli

TRAIN = ["--", "train", "--out={dir}", "{steps}"]


def make_run(output: Path, value: float, metrics: str = '{"step":4,"loss":1.0}\n{"step":5,"loss":0.5}\n') -> Path:
    """A finished run: step 5 with one tensor, and metrics beside it."""
    folder = output / "checkpoints" / "global_step_5"
    (folder / "actor").mkdir(parents=True)
    torch.save({"optimizer": {"exp_avg": torch.tensor([1.0, value])}}, folder / "actor" / "state.pt")
    entry = FileEntry((folder / "actor/state.pt").stat().st_size, crc_of_file(folder / "actor/state.pt"))
    (folder / "manifest.json").write_text(
        Manifest({"actor/state.pt": entry}, step=5, transaction=output.name).to_json()
    )
    output.with_name(f"{output.name}.metrics.jsonl").write_text(metrics)
    return output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no command was given"),
        (["--", "train", "--out={dir}"], "the command has no {steps}"),
        (
            ["--kill-after", "lunch", *TRAIN],
            "--kill-after: expected one of step-commit, during-save, random, found 'lunch'",
        ),
        (["--demo", "--algorithm", "dpo"], "--algorithm: expected one of grpo, ppo, found 'dpo'"),
        (
            ["--profile", "bf16", *TRAIN],
            "--profile: expected one of exact, fp32-reduction, bf16-reduction, loose, found 'bf16'",
        ),
        (["--control", "C", *TRAIN], "it goes with --compare"),
        (["--compare", "A", "B", *TRAIN], "leave the command away"),
        (["--compare", "A", "B", "--print-commands"], "exclude one another"),
        (["--compare", "A", "B"], "no folder global_step_N"),
        (["--steps", "0", *TRAIN], "--steps"),
        (["--", "no-such-program", "{dir}", "{steps}"], "no-such-program: there is no such program"),
    ],
)
def test_what_is_refused(cli: Cli, options: list[str], message: str) -> None:
    outcome = cli("resume-check", *options)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert message in outcome.stderr


def test_a_failing_command_is_shown_with_its_log(cli: Cli, tmp_path: Path) -> None:
    words = ["/bin/sh", "-c", "echo out of memory; exit 7", "{dir}", "{steps}"]
    outcome = cli("resume-check", "--dir", tmp_path / "check", "--json", "--", *words)
    assert outcome.code == 2
    assert outcome.json["error"]["exit_code"] == 2
    assert "run A failed: exit code 7" in outcome.stderr
    assert "out of memory" in outcome.stderr
    assert (tmp_path / "check" / "A.log").read_text() == "out of memory\n"


def test_comparing_equal_runs(cli: Cli, tmp_path: Path) -> None:
    a, b, c = (make_run(tmp_path / name, value) for name, value in (("A", 2.0), ("B", 2.0), ("C", 2.5)))
    outcome = cli("resume-check", "--compare", a, b, "--json")
    assert (outcome.code, outcome.json["verdict"], outcome.json["control"]) == (0, "no control", None)
    (run,) = outcome.json["runs"]
    assert (run["states"]["differing"], run["metrics"]["equal_lines"]) == (0, 2)
    with_control = cli("resume-check", "--compare", a, b, "--control", c)
    assert with_control.code == 0
    assert "EXACT" in with_control.stdout
    assert "caught" in with_control.stdout


def test_comparing_different_runs_names_what_differs(cli: Cli, tmp_path: Path) -> None:
    a = make_run(tmp_path / "A", 2.0)
    b = make_run(tmp_path / "B", 2.5, '{"step":4,"loss":1.0}\n{"step":5,"loss":0.75}\n')
    outcome = cli("resume-check", "--compare", a, b)
    assert outcome.code == 1
    assert "DIFFERENT: the resumed run is not the uninterrupted one" in outcome.words()
    assert "actor/state.pt: optimizer/exp_avg 1 of 2 elements; first: [1] is 2.0 and 2.5" in outcome.words()
    assert "step 5/loss 0.5 and 0.75" in outcome.words()
    assert cli("resume-check", "--compare", a, b, "--ignore", "metrics:loss", "--ignore", "actor/state.pt").code == 1
    assert cli("resume-check", "--compare", a, b, "--ignore", "metrics:loss", "--ignore", "actor/*:*").code == 0


def test_a_profile_says_what_it_let_pass_and_how_far_the_worst_was_off(cli: Cli, tmp_path: Path) -> None:
    a, c = make_run(tmp_path / "A", 2.0), make_run(tmp_path / "C", -2.0)
    b = make_run(tmp_path / "B", 2.0625, '{"step":4,"loss":1.0}\n{"step":5,"loss":0.5001}\n')
    outcome = cli("resume-check", "--compare", a, b, "--control", c, "--profile", "bf16-reduction")
    assert outcome.code == 0
    assert "values equal within different" in outcome.words()
    assert "WITHIN: the resumed run is the uninterrupted one as far as the profile asks" in outcome.words()
    worst = "actor/state.pt: optimizer/exp_avg, off by 0.0625, allowed 0.125"
    assert f"profile bf16-reduction: the value that takes most of what it allows is {worst}" in outcome.words()
    facts = cli("resume-check", "--compare", a, b, "--control", c, "--profile", "bf16-reduction", "--json").json
    assert (facts["verdict"], facts["passed"], facts["profile"]["name"]) == ("within", True, "bf16-reduction")
    assert facts["worst"] == {"where": "actor/state.pt", "key": "optimizer/exp_avg", "off": 0.0625, "allowed": 0.125}
    assert (facts["runs"][0]["states"]["within"], facts["runs"][0]["metrics"]["within"]) == (1, 1)
    exact = cli("resume-check", "--compare", a, b, "--control", c, "--json")
    assert (exact.code, exact.json["first_difference"]["key"]) == (1, "step 5/loss")


def test_a_control_that_is_equal_makes_the_check_blind(cli: Cli, tmp_path: Path) -> None:
    a, b, c = (make_run(tmp_path / name, 2.0) for name in "ABC")
    outcome = cli("resume-check", "--compare", a, b, "--control", c)
    assert outcome.code == 1
    assert "BLIND: everything is equal, but so is the broken control" in outcome.words()
    assert "NOT CAUGHT" in outcome.stdout


def test_the_commands_for_several_nodes_are_printed(cli: Cli, tmp_path: Path) -> None:
    outcome = cli("resume-check", "--print-commands", "--dir", tmp_path / "a b", "--steps", 3, "--more", 2, *TRAIN)
    assert outcome.code == 0
    commands = [shlex.split(line) for line in outcome.stdout.splitlines() if line and not line.startswith("#")]
    folder = tmp_path / "a b"
    a, b, c = (str(folder / name) for name in "ABC")
    assert commands == [
        ["train", f"--out={a}", "5"],
        ["train", f"--out={b}", "5"],
        ["mcore-rlhf", "resume-check", "--make-control", b, c],
        ["train", f"--out={b}", "5"],
        ["train", f"--out={c}", "5"],
        ["mcore-rlhf", "resume-check", "--compare", a, b, "--control", c, "--steps", "3", "--more", "2"],
    ]
    assert not folder.exists()


def test_the_control_can_be_made_by_hand(cli: Cli, tmp_path: Path) -> None:
    b, c = make_run(tmp_path / "B", 2.0), tmp_path / "C"
    outcome = cli("resume-check", "--make-control", b, c)
    assert outcome.code == 0
    assert "broken: actor/state.pt: optimizer/exp_avg" in outcome.stdout
    state = torch.load(c / "checkpoints/global_step_5/actor/state.pt", weights_only=True)
    assert state["optimizer"]["exp_avg"].tolist() == [1 + 2**-23, 2 + 2**-22]
    assert (tmp_path / "C.metrics.jsonl").read_bytes() == (tmp_path / "B.metrics.jsonl").read_bytes()
    assert cli("resume-check", "--make-control", b, c).code == 2  # it exists
