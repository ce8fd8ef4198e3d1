"""``will-resume`` as it is typed: exit codes, what it prints, and the same word behind a conversion."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.helpers.object_store import S3, url
from tests.unit.cli.conftest import Cli

GOLDENS = Path(__file__).parents[2] / "goldens"
TRAINER = GOLDENS / "transformers" / "checkpoint-2"


def test_exit_codes(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(TRAINER, folder)
    whole = cli("will-resume", folder, "--trainer", "TRL@1.0", "--json")
    assert (whole.code, whole.json["resumes"], whole.json["stops"]) == (0, True, False)
    assert any("of 1.0 there are none" in note for note in whole.json["notes"])
    (folder / "optimizer.pt").unlink()
    lost = cli("will-resume", folder, "--trainer", "transformers", "--json")
    assert lost.code == 1
    outcomes = {one["thing"]: one["outcome"] for one in lost.json["roles"][""]}
    assert (outcomes["optimizer"], outcomes["scheduler"], outcomes["weights"]) == (
        "started anew",
        "ignored",
        "restored",
    )
    (folder / "model.safetensors").unlink()
    stopped = cli("will-resume", folder, "--trainer", "transformers", "--json")
    assert (stopped.code, stopped.json["stops"]) == (1, True)
    for words in (
        ["verl"],
        ["trnsl"],
        ["trl@@"],
        ["trl", "--config", tmp_path / "nothing.yaml"],
        ["trl", "--world-size", "0"],
    ):
        assert cli("will-resume", folder, "--trainer", *words).code == 2


def test_a_step_in_a_store_is_called_as_it_was_given(cli: Cli, s3: S3) -> None:
    s3.upload(TRAINER, "run/checkpoint-2")
    there = url("run/checkpoint-2")
    assert cli("will-resume", there, "--trainer", "transformers", "--json").json["path"] == there
    assert cli("will-resume", there, "--trainer", "transformers").stdout.startswith(f"{there}: ")


def test_of_a_root_it_takes_the_step_that_the_trainer_takes(cli: Cli, tmp_path: Path) -> None:
    for number in (2, 10):
        shutil.copytree(TRAINER, tmp_path / f"checkpoint-{number}")
    (tmp_path / "checkpoint-10" / "trainer_state.json").unlink()  # the highest number is taken, whatever is in it
    found = cli("will-resume", tmp_path, "--trainer", "transformers", "--json").json
    assert (Path(found["step"]).name, found["stops"]) == ("checkpoint-10", True)
    assert cli("will-resume", tmp_path / "checkpoint-2", "--trainer", "transformers").code == 0


def test_a_conversion_says_what_its_trainer_would_restore(cli: Cli, tmp_path: Path) -> None:
    """The data of another trainer's run do not become verl's; what waits beside for the way back is not what verl sees."""
    done = cli("convert", TRAINER, tmp_path / "verl", "--to", "verl", "--no-fsync", "--json").json
    (outcomes,) = done["resumes"].values()
    assert outcomes["started anew"] == ["data"]
    assert {"weights", "optimizer", "scheduler", "RNG"} <= {*outcomes["restored"]}
    assert "refused" not in outcomes
    again = cli("will-resume", tmp_path / "verl", "--trainer", "verl", "--json").json
    assert {one["thing"] for one in again["roles"]["actor"] if one["outcome"] == "started anew"} == {"data"}


@pytest.mark.parametrize(
    ("golden", "pattern", "trainer", "thing"),
    [
        ("trainers/ac_ds2", "*/*/*rank_1*optim_states.pt", "accelerate", "optimizer"),
        ("trainers/or_z2", "_critic/*/*rank_1*optim_states.pt", "openrlhf", "optimizer"),
        ("trainers/rl_fsdp2", "**/actor/dcp_checkpoint/__1_0.distcp", "rlinf", "weights"),
        ("trainers/nm_v1", "*/policy/weights/__1_0.distcp", "nemo-rl", "weights"),
        ("torchtitan/checkpoint", "*/__1_0.distcp", "torchtitan", "weights"),
        ("deepspeed/z3_bf16_frozen_dp2", "step3/zero_pp_rank_1_mp_rank_00_model_states.pt", "deepspeed", "weights"),
        ("megatron/tp2pp2dp2_bf16_do", "*/mp_rank_01_001/distrib_optim.pt", "megatron-lm", "optimizer"),
    ],
)
def test_a_file_of_one_rank_that_is_gone_is_named(
    cli: Cli, tmp_path: Path, golden: str, pattern: str, trainer: str, thing: str
) -> None:
    shutil.copytree(GOLDENS / golden, tmp_path / "run")
    root = next((path.parent for path in (tmp_path / "run").rglob("global_step_*")), tmp_path / "run")
    assert cli("will-resume", root, "--trainer", trainer).code == 0
    (gone,) = (tmp_path / "run").glob(pattern)
    gone.unlink()
    found = cli("will-resume", root, "--trainer", trainer, "--json")
    assert (found.code, found.json["stops"]) == (1, True)
    refused = [one for role in found.json["roles"].values() for one in role if one["outcome"] == "refused"]
    assert thing in [one["thing"] for one in refused]
    assert any(gone.name in one["why"] for one in refused)


def test_a_policy_on_megatron_without_its_tracker_begins_anew(cli: Cli, tmp_path: Path) -> None:
    """NeMo-RL's: Megatron-Bridge takes the model that training began with, and says a line in the log."""
    source, root = GOLDENS / "megatron_dist" / "tp2pp2dp2_fully_reshardable", tmp_path / "run"
    cli("convert", source, root, "--to", "nemo-rl", "--tp", "2", "--pp", "1", "--dp", "1", "--no-fsync")
    weights = root / "step_2" / "policy" / "weights"
    assert [child.name for child in sorted(weights.iterdir())] == ["iter_0000000", "latest_checkpointed_iteration.txt"]
    assert (weights / "latest_checkpointed_iteration.txt").read_text() == "0"
    assert cli("diff", source, root / "step_2", "--states", "param,master,exp_avg,exp_avg_sq").code == 0
    assert cli("inspect", root / "step_2", "--role", "actor", "--json").json["iteration"] == 2

    def outcomes() -> dict[str, str]:
        found = cli("will-resume", root, "--trainer", "nemo-rl", "--json").json["roles"]["actor"]
        return {one["thing"]: one["outcome"] for one in found}

    assert outcomes() | {"weights": "restored", "optimizer": "restored", "RNG": "ignored"} == outcomes()
    (weights / "latest_checkpointed_iteration.txt").unlink()
    assert (
        outcomes() | {"weights": "started anew", "optimizer": "started anew", "scheduler": "started anew"} == outcomes()
    )


def test_what_no_reader_can_open_is_not_said_to_resume(cli: Cli, tmp_path: Path) -> None:
    """Rows may know no name of the file that is damaged; then nobody says that all is well."""
    shutil.copytree(TRAINER, tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / "config.json").write_text("{")
    found = cli("will-resume", tmp_path / "checkpoint-2", "--trainer", "transformers", "--json")
    assert (found.code, found.json["doubtful"], found.json["resumes"]) == (1, [""], False)
