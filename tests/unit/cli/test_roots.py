"""Roots whose newest step is not sound, and steps of other trainers: nothing of them is passed over without a word."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.adopt import adopt
from tests.helpers.damage import flip_a_bit
from tests.helpers.independent_reader import differences, read
from tests.unit.manager.roots import make_step

from .conftest import GOLDENS, Cli


def _genuine(folder: Path) -> Path:
    """One role and a sampler's state, as RLinf's GRPO leaves them: no manifest."""
    shutil.copytree(GOLDENS / "tp1_bf16_do", folder / "actor")
    (folder / "data").mkdir()
    torch.save({"_snapshot": {"_snapshot_step": 7}, "epoch": 1}, folder / "data" / "data.pt")
    return folder


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RLinf's step 2."""
    return _genuine(tmp_path_factory.mktemp("rlinf") / "global_step_2")


@pytest.fixture
def root(step: Path, tmp_path: Path) -> Path:
    """Step 2 is committed, and so is step 9, newer."""
    adopt(Path(shutil.copytree(step, tmp_path / "run" / "global_step_2")))
    make_step(tmp_path / "run", 9)
    return tmp_path / "run"


def _cut(newest: Path) -> None:
    (newest / "actor" / "weights.bin").unlink()


def _half_manifest(newest: Path) -> None:
    (newest / steps.MANIFEST).write_text('{"format": "mcore_rlhf", "vers')


DAMAGE: dict[str, Callable[[Path], object]] = {"a file is missing": _cut, "half a manifest": _half_manifest}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_verify_of_a_root_is_about_its_newest_step(cli: Cli, root: Path, damage: Callable[[Path], object]) -> None:
    damage(root / "global_step_9")
    outcome = cli("verify", root, "--json")
    assert (outcome.code, outcome.json["intact"]) == (1, False)
    assert outcome.json["path"] == str(root / "global_step_2")
    assert "global_step_9" in outcome.json["problems"][0]["message"]
    assert outcome.json["chosen"]["passed_over"][0]["state"] == "damaged"
    said = cli("verify", root)
    assert said.code == 1
    assert "global_step_2: step 2, intact" in said.stdout
    assert "global_step_9: is damaged" in said.stdout
    assert cli("verify", root, "--role", "actor").code == 1
    assert cli("verify", root, "--step", 2).code == 0


def test_others_say_on_which_step_they_work(cli: Cli, root: Path, tmp_path: Path) -> None:
    _cut(root / "global_step_9")
    for command in (["inspect", root], ["inspect", root, "--role", "actor"], ["inspect", root, "--tensors", "norm"]):
        outcome = cli(*command, "--json")
        assert outcome.code == 0
        chosen = outcome.json["chosen"]
        assert (chosen["step"], chosen["why"], chosen["path"]) == (2, "newest committed", str(root / "global_step_2"))
        assert [(over["step"], over["state"]) for over in chosen["passed_over"]] == [(9, "damaged")]
        assert "weights.bin" in chosen["passed_over"][0]["why"]
        assert "global_step_2 is taken" in cli(*command).stdout
    both = cli("diff", root, root / "global_step_2", "--json")
    assert (both.code, both.json["a"]["chosen"]["step"], both.json["b"]["chosen"]) == (0, 2, None)
    assert "global_step_9 is damaged" in cli("diff", root, root / "global_step_2").stdout
    assert cli("inspect", root / "global_step_2", "--json").json["chosen"] is None


@pytest.mark.parametrize("role", [(), ("--role", "actor")], ids=["step", "model"])
def test_conversions_never_take_an_older_step_unasked(
    cli: Cli, root: Path, tmp_path: Path, role: tuple[str, ...]
) -> None:
    _cut(root / "global_step_9")
    for command in (["plan", root], ["convert", root, tmp_path / "out"]):
        outcome = cli(*command, *role)
        assert outcome.code == 1
        assert "global_step_9 is damaged" in outcome.stderr
        assert "--newest-intact" in outcome.stderr
    assert not (tmp_path / "out").exists()
    for number, option in enumerate((["--step", 2], ["--newest-intact"])):
        outcome = cli("convert", root, tmp_path / f"out{number}", *role, *option, "--json")
        assert outcome.code == 0, outcome.stderr
        chosen = outcome.json["chosen"]
        assert (chosen["step"], chosen["why"]) == (2, "named" if number == 0 else "newest intact")
        assert cli("plan", root, *role, *option).code == 0
    (tmp_path / "job.yaml").write_text("newest_intact: true\n")
    assert cli("plan", root, *role, "--config", tmp_path / "job.yaml").code == 0


def test_newest_intact_reads_every_byte(cli: Cli, root: Path) -> None:
    flip_a_bit(root / "global_step_9" / "actor" / "weights.bin")
    outcome = cli("plan", root, "--newest-intact", "--json", "--progress", "json")
    assert outcome.code == 0, outcome.stderr
    told = [json.loads(line) for line in outcome.stderr.splitlines() if line.startswith("{")]
    assert {line["stage"]: bool(line["total"]) for line in told if "step" in line["stage"]} == {
        "checking step 9": True, "checking step 2": True,
    }  # fmt: skip
    (over,) = outcome.json["chosen"]["passed_over"]
    assert (outcome.json["chosen"]["step"], over["step"]) == (2, 9)
    assert "CRC-32" in over["why"]


def test_steps_in_quarantine_and_empty_ones_are_told_and_no_damage(cli: Cli, root: Path) -> None:
    _cut(root / "global_step_9")
    steps.quarantine(root / "global_step_9", "diverged")
    (root / "global_step_11").mkdir()
    outcome = cli("verify", root, "--json")
    assert outcome.code == 0
    assert [over["why"] for over in outcome.json["chosen"]["passed_over"]] == [
        "has no manifest.json and is empty", "diverged",
    ]  # fmt: skip
    assert cli("plan", root).code == 0
    assert "in quarantine: diverged" in cli("plan", root).stdout


def test_a_newer_step_of_another_trainer_must_be_decided_on(cli: Cli, step: Path, root: Path) -> None:
    shutil.rmtree(root / "global_step_9")
    shutil.copytree(step, root / "global_step_9")
    outcome = cli("plan", root)
    assert outcome.code == 2
    assert "global_step_9 is foreign" in outcome.stderr
    assert cli("verify", root).code == 0
    assert "global_step_9 is foreign" in cli("verify", root).stdout


def test_a_newer_step_of_a_newer_release_is_not_called_damaged(cli: Cli, root: Path) -> None:
    manifest = root / "global_step_9" / steps.MANIFEST
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 99'))
    for command in (["verify", root], ["plan", root]):
        outcome = cli(*command)
        assert (outcome.code, "Use that release" in outcome.stderr) == (2, True), outcome.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ROOT", "--newest-intact", "--step", 2], "contradict each other"),
        (["ROOT/global_step_2", "--newest-intact"], "not the root of a run"),
        (["ROOT/global_step_2/actor", "--newest-intact"], "not the root of a run"),
    ],
)
def test_mistakes(cli: Cli, root: Path, words: list[object], said: str) -> None:
    outcome = cli("plan", *(str(word).replace("ROOT", str(root)) for word in words))
    assert (outcome.code, said in outcome.stderr) == (2, True), outcome.stderr


def test_in_a_root_of_others_their_tracker_decides(cli: Cli, step: Path, tmp_path: Path) -> None:
    root = tmp_path / "verl"
    for number in (2, 3):
        shutil.copytree(step, root / f"global_step_{number}")
    outcome = cli("inspect", root)
    assert outcome.code == 2
    assert "global_step_3 is foreign" in outcome.stderr
    (root / "latest_checkpointed_iteration.txt").write_text("2")
    chosen = cli("inspect", root, "--json").json["chosen"]
    assert (chosen["step"], chosen["why"], len(chosen["passed_over"])) == (2, "tracker", 1)
    assert cli("convert", root, tmp_path / "out").code == 2  # a newer one is there
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    assert cli("plan", root, "--json").json["chosen"]["passed_over"] == []


def test_a_step_of_one_role_is_a_step(cli: Cli, step: Path, tmp_path: Path) -> None:
    """As RLinf and verl write GRPO: no manifest, an actor, and the sampler beside it."""
    outcome = cli("convert", step, tmp_path / "new", "--tp", 2, "--strict", "--verify", "--json")
    assert outcome.code == 0, outcome.stderr
    folder = tmp_path / "new" / "global_step_2"
    assert steps.is_committed(folder)
    assert not differences(read(step / "actor"), read(folder / "actor"))
    assert (folder / "data" / "data.pt").read_bytes() == (step / "data" / "data.pt").read_bytes()
    assert outcome.json["carried"] == ["data/data.pt"]
    assert cli("plan", step, "--json").json["carried"] == ["data/data.pt"]


def test_a_step_of_one_role_to_look_at(cli: Cli, step: Path, tmp_path: Path) -> None:
    facts = cli("inspect", step, "--json").json
    assert (facts["step"], list(facts["models"]), facts["others"]) == (2, ["actor"], ["data/data.pt"])
    assert cli("inspect", step, "--tensors", "norm", "--json").json["tensors"]
    assert cli("verify", step, "--json").json["models"]["actor"]["intact"]
    assert cli("convert", step, tmp_path / "alone", "--role", "actor").code == 0
    same = cli("diff", step, tmp_path / "alone", "--json")
    assert (same.code, "not compared: 1 file beside the model" in same.json["notes"][-1]) == (0, True)
    assert cli("diff", step, step, "--states", "param").code == 0


def test_a_step_of_verls_megatron_backend(cli: Cli, tmp_path: Path) -> None:
    """``actor/dist_ckpt`` beside ``actor/huggingface``, and ``data.pt`` beside the roles."""
    step = tmp_path / "run" / "global_step_2"
    shutil.copytree(GOLDENS.parent / "megatron_dist" / "plain_tp2" / "iter_0000002", step / "actor" / "dist_ckpt")
    (step / "actor" / "huggingface").mkdir()
    (step / "actor" / "huggingface" / "tokenizer_config.json").write_text("{}")
    torch.save({"_snapshot": {"_snapshot_step": 7}}, step / "data.pt")
    (listed,) = cli("steps", step.parent, "--json").json
    assert (listed["state"], listed["roles"]) == ("foreign", ["actor"])
    outcome = cli("convert", step, tmp_path / "new", "--tp", 1, "--json")
    assert outcome.code == 0, outcome.stderr
    assert outcome.json["carried"] == ["data.pt"]
    assert outcome.json["models"]["actor"]["source"]["format"] == "megatron-dist"
    assert cli("diff", step, tmp_path / "new", "--role", "actor", "--states", "param,exp_avg").code == 0
    step.rename(step.with_name("global_step_3"))
    lines = cli("plan", step.with_name("global_step_3"), "--json").json["report"]["step"]
    assert any("of iteration 2, and the step is 3" in line["text"] for line in lines)


def test_python_that_opens_one_model_of_a_step_says_what_is_beside_it(step: Path) -> None:
    from mcore_rlhf import ConvertOptions, open_checkpoint, prepare_conversion
    from mcore_rlhf.families.options import ReadOptions

    job = prepare_conversion(step, ConvertOptions())
    assert any("data/data.pt" in text for text in job.report.lost)
    assert not any("data" in text for text in open_checkpoint(step / "actor", ReadOptions()).notes.lost)
    assert not open_checkpoint(step, ReadOptions(role="actor")).notes.lost
