"""Universal checkpoints on the command line: into a run, to a root of their own, inspected, verified and compared."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.damage import flip_a_bit

from .conftest import Cli, everything_below

GOLDENS = Path(__file__).parents[2] / "goldens" / "deepspeed"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A DeepSpeed run with one checkpoint of stage 2."""
    shutil.copytree(GOLDENS / "z2_bf16_ac_dp2" / "step3", tmp_path / "run" / "step3")
    (tmp_path / "run" / "latest").write_text("step3")
    return tmp_path / "run"


def test_into_the_run_itself_with_proof(cli: Cli, run: Path) -> None:
    done = cli("convert", run, run, "--to", "universal", "--no-fsync", "--verify", "--json")
    assert done.code == 0, done.stderr
    facts = done.json
    assert facts["proved"] is True
    assert facts["verify"]["path"] == str(run / "step3_uni")  # not the run, whose `latest` is the source
    assert facts["diff"]["equal"] is True
    assert (run / "latest_universal").read_text() == "step3_uni"
    assert "load_universal" in facts["load"]


def test_the_proof_looks_at_what_was_written(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_rlhf.cli import converting

    before = converting.verify_facts

    def broken(path: Path, *rest: object) -> object:
        flip_a_bit(path / "zero" / "critic.value_head.weight" / "exp_avg.pt")
        return before(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(converting, "verify_facts", broken)
    assert cli("convert", run, run, "--to", "universal", "--no-fsync", "--verify").code == 1


def test_inspect_verify_and_diff_know_it(cli: Cli, run: Path, tmp_path: Path) -> None:
    assert cli("convert", run, tmp_path / "new", "--to", "universal", "--no-fsync").code == 0
    found = cli("inspect", tmp_path / "new", "--json").json
    assert (found["format"], found["iteration"]) == ("universal", 3)
    assert cli("verify", tmp_path / "new", "--deep").code == 0
    assert cli("diff", run, tmp_path / "new").code == 0
    assert cli("diff", tmp_path / "new", GOLDENS / "z2_bf16_ac_dp2" / "step3_uni").code == 0
    flip_a_bit(tmp_path / "new" / "step3_uni" / "zero" / "critic.value_head.weight" / "exp_avg.pt")
    assert cli("verify", tmp_path / "new").code == 1


def test_back_to_native_at_another_stage(cli: Cli, run: Path, tmp_path: Path) -> None:
    """Native → universal → native of another stage and degree: nothing is lost on the way."""
    assert cli("convert", run, tmp_path / "uni", "--to", "universal", "--no-fsync").code == 0
    back = cli(
        "convert", tmp_path / "uni", tmp_path / "back", "--to", "deepspeed", "--zero-stage", 1, "--dp", 3, "--no-fsync"
    )
    assert back.code == 0, back.stderr
    assert cli("diff", run, tmp_path / "back").code == 0


def test_a_layout_is_refused_and_nothing_is_left(cli: Cli, run: Path) -> None:
    before = everything_below(run)
    outcome = cli("convert", run, run, "--to", "universal", "--dp", 4)
    assert (outcome.code, "--dp: means nothing with --to universal" in outcome.stderr) == (2, True)
    assert everything_below(run) == before
