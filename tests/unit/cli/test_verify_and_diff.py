from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.damage import flip_a_bit

from .conftest import Cli


@pytest.mark.parametrize(("option", "depth"), [([], "full"), (["--quick"], "quick"), (["--deep"], "deep")])
def test_a_genuine_checkpoint_is_intact(cli: Cli, tp2pp2: Path, option: list[str], depth: str) -> None:
    outcome = cli("verify", tp2pp2, "--json", *option)
    facts = outcome.json
    assert (outcome.code, facts["intact"], facts["depth"], facts["problems"]) == (0, True, depth, [])
    assert (facts["bytes"] > 1_000_000) == (depth != "quick")
    assert any("replicas" in text for text in facts["checked"]) == (depth == "deep")
    assert any("replicas" in text for text in facts["unchecked"]) == (depth == "full")
    assert facts["checkpoint"]["parallel"]["tp"] == 2


def test_a_flipped_bit_is_named_by_file_and_record(cli: Cli, damaged: Path) -> None:
    outcome = cli("verify", damaged)
    assert outcome.code == 1
    assert "damaged: 1 problem" in outcome.words()
    assert "Corrupt: iter_0000002/mp_rank_00/distrib_optim.pt: data/" in outcome.words()
    (problem,) = cli("verify", damaged, "--json").json["problems"]
    assert problem["kind"] == "Corrupt"
    assert "CRC-32" in problem["message"]
    assert problem["advice"]


def test_what_cannot_be_opened_is_damaged_and_not_an_error(cli: Cli, tp1: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tp1, copy)
    file = copy / "iter_0000002" / "mp_rank_00" / "model_optim_rng.pt"
    file.chmod(0o644)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)
    outcome = cli("verify", copy, "--json")
    assert outcome.code == 1
    assert (outcome.json["intact"], outcome.json["checkpoint"]) == (False, None)
    assert "model_optim_rng.pt" in outcome.json["problems"][0]["message"]
    assert "could not be opened" in cli("verify", copy).stdout


def test_quick_finds_what_the_manifest_knows(cli: Cli, tp1: Path, tmp_path: Path) -> None:
    cli("convert", tp1, tmp_path / "out", "--tp", 2, "--no-fsync")
    assert cli("verify", tmp_path / "out", "--quick").code == 0
    flip_a_bit(tmp_path / "out" / "iter_0000002" / "mp_rank_01" / "distrib_optim.pt")
    assert cli("verify", tmp_path / "out", "--quick").code == 0  # sizes only
    assert cli("verify", tmp_path / "out").code == 1
    (tmp_path / "out" / "iter_0000002" / "mp_rank_01" / "distrib_optim.pt").unlink()
    outcome = cli("verify", tmp_path / "out", "--quick", "--json")
    assert (outcome.code, outcome.json["problems"][0]["kind"]) == (1, "Incomplete")


def test_quick_and_deep_contradict_each_other(cli: Cli, tp1: Path) -> None:
    outcome = cli("verify", tp1, "--quick", "--deep")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "contradict" in outcome.stderr


def test_layouts_are_equal_when_the_model_is(cli: Cli, tp2pp2: Path, tmp_path: Path) -> None:
    cli("convert", tp2pp2, tmp_path / "out", "--tp", 1, "--pp", 4, "--no-fsync")
    outcome = cli("diff", tp2pp2, tmp_path / "out")
    assert outcome.code == 0
    assert "equal: 108 tensors" in outcome.stdout
    assert "compared bit for bit" in outcome.stdout
    assert "the first 144 were compared" in outcome.stdout


def test_differences_are_counted_measured_and_bounded(cli: Cli, tp1: Path, tp2pp2: Path) -> None:
    facts = cli("diff", tp1, tp2pp2, "--json").json
    assert facts["equal"] is False
    first = facts["differences"][0]
    assert first["name"] == "embedding.word_embeddings.weight (param)"
    assert 0 < first["differing"] <= 144 * 64
    assert 0 < first["max_abs"] < 1
    outcome = cli("diff", tp1, tp2pp2)
    assert outcome.code == 1
    assert f"different: {len(facts['differences'])} differences" in outcome.stdout
    assert f"… and {len(facts['differences']) - 20} more" in outcome.stdout


def test_a_tolerance_and_a_choice_of_states(cli: Cli, tp1: Path, tp2pp2: Path) -> None:
    within = cli("diff", tp1, tp2pp2, "--atol", 1, "--states", "param,exp_avg", "--json")
    assert (within.code, within.json["equal"], within.json["tensors"]) == (0, True, 54)
    assert (within.json["atol"], within.json["states"]) == (1.0, ["param", "exp_avg"])
    assert "within atol 1, rtol 0" in cli("diff", tp1, tp2pp2, "--atol", 1, "--states", "param").stdout


def test_an_unknown_state_is_refused_with_the_known_ones(cli: Cli, tp1: Path) -> None:
    outcome = cli("diff", tp1, tp1, "--states", "param,exp_agv")
    assert outcome.code == 2
    assert "exp_agv; they have param, master, exp_avg, exp_avg_sq" in outcome.stderr
