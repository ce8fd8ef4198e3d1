"""``will-resume`` as it is typed: exit codes, what it prints, and the same word behind a conversion."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mcore_rlhf.manager.will_resume import loader_named
from mcore_rlhf.trainers.resuming import Held, Seen, Settings, Thing
from tests.helpers.damage import edited
from tests.helpers.object_store import S3, url
from tests.unit.cli.conftest import Cli
from tests.unit.formats.test_bridge_run import bridged as bridge_run
from tests.unit.formats.test_bridge_run import counted

GOLDENS = Path(__file__).parents[2] / "goldens"
TRAINER = GOLDENS / "transformers" / "checkpoint-2"


def test_exit_codes(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(TRAINER, folder)
    whole = cli("will-resume", folder, "--trainer", "TRL@1.0", "--json")
    assert (whole.code, whole.json["resumes"], whole.json["stops"]) == (0, True, False)
    assert any("of 1.0 there are none" in note for note in whole.json["notes"])
    (tmp_path / "grpo.yaml").write_text("defaults: base.yaml\n")
    composed = cli("will-resume", folder, "--trainer", "trl", "--config", tmp_path / "grpo.yaml", "--json")
    assert [note for note in composed.json["notes"] if note.startswith("grpo.yaml takes further values")]
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


@pytest.mark.parametrize(
    ("golden", "trainer"),
    [("transformers/checkpoint-2", "trl"), ("trainers/or_z2", "openrlhf"), ("torchtitan", "torchtitan")],
)
def test_above_a_run_it_says_where_it_is(cli: Cli, tmp_path: Path, golden: str, trainer: str) -> None:
    run = tmp_path / "outputs" / "grpo"
    shutil.copytree(GOLDENS / golden, run / "checkpoint-2" if trainer == "trl" else run)
    (tmp_path / "outputs" / "a").mkdir()
    for command in ("will-resume", "steps"):
        found = cli(command, tmp_path / "outputs", *(("--trainer", trainer) if command == "will-resume" else ()))
        assert found.code == 2
        assert found.stderr.endswith(f"\nIs {run} meant?\n")


def test_a_conversion_says_what_its_trainer_would_restore(cli: Cli, tmp_path: Path) -> None:
    """The data of another trainer's run do not become verl's; what waits beside for the way back is not what verl sees."""
    done = cli("convert", TRAINER, tmp_path / "verl", "--to", "verl", "--no-fsync", "--json").json
    (outcomes,) = done["resumes"].values()
    assert outcomes["started anew"] == ["data"]
    assert {"weights", "optimizer", "scheduler", "RNG"} <= {*outcomes["restored"]}
    assert "refused" not in outcomes
    assert (done["for"], done["stops"]) == ("verl", [])
    again = cli("will-resume", tmp_path / "verl", "--trainer", "verl", "--json").json
    assert {one["thing"] for one in again["roles"]["actor"] if one["outcome"] == "started anew"} == {"data"}


@pytest.mark.parametrize(
    ("golden", "trainer", "why"),
    [
        ("deepspeed_muon/z2_bf16_dp2", "rlinf", "RLinf stops when it loads this:\n  weights, optimizer, param groups"),
        (
            "transformers/adapter",
            "accelerate",
            "accelerate stops when it loads this:\n  weights: neither model.safetensors nor",
        ),
    ],
)
def test_what_stops_its_trainer_is_said_first(cli: Cli, tmp_path: Path, golden: str, trainer: str, why: str) -> None:
    """The tensors are right, and are written; a script hears of it by ``--strict``."""
    words = ("convert", GOLDENS / golden, "--to", trainer, "--no-fsync")
    told = cli(words[0], words[1], tmp_path / "a", *words[2:])
    assert told.code == 0
    assert told.stdout.startswith(f"converted, but {why}"), told.stdout
    strict = cli(words[0], words[1], tmp_path / "b", *words[2:], "--strict", "--json")
    assert (strict.code, len(strict.json["stops"])) == (1, 1)
    assert (tmp_path / "b").is_dir()


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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "not there"),
        ("--train.enable_ema", "started anew"),
        ("--train.ema_beta 0.9 --train.enable_ema=false", None),
    ],
)
def test_an_average_of_weights_is_in_no_checkpoint_of_openrlhf(
    cli: Cli, tmp_path: Path, given: str, said: str | None
) -> None:
    (tmp_path / "arguments.txt").write_text(f"--actor.model_name_or_path model {given}\n")
    found = cli(
        "will-resume",
        GOLDENS / "trainers" / "or_z2",
        "--trainer",
        "openrlhf",
        "--config",
        tmp_path / "arguments.txt",
        "--json",
    )
    assert found.code == (said == "started anew")
    roles = {
        role: [one["outcome"] for one in things if one["thing"] == "EMA"]
        for role, things in found.json["roles"].items()
    }
    assert roles == {"actor": [said] if said else [], "critic": []}


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


def test_a_step_is_taken_as_the_loader_takes_it(cli: Cli, tmp_path: Path) -> None:
    """NeMo-RL takes the highest number, and stops where its counters are gone; RLinf stops at what it takes for a number."""

    def asked(root: Path, trainer: str) -> tuple[int, bool, str]:
        found = cli("will-resume", root, "--trainer", trainer, "--json")
        return found.code, found.json["stops"], found.json["step"] and Path(found.json["step"]).name

    nemo, rlinf = tmp_path / "nemo", tmp_path / "rlinf"
    shutil.copytree(GOLDENS / "trainers" / "nm_v1", nemo)
    shutil.copytree(nemo / "step_3", nemo / "step_5", ignore=shutil.ignore_patterns("training_info.json"))
    assert asked(nemo, "nemo-rl") == (1, True, "step_5")
    shutil.copytree(next((GOLDENS / "trainers" / "rl_fsdp2").rglob("global_step_*")).parent, rlinf)
    assert asked(rlinf, "rlinf")[0] == 0
    (rlinf / "global_step_9.bak").mkdir()
    assert asked(rlinf, "rlinf") == (1, True, None)


@pytest.mark.parametrize(("ranks", "outcome"), [(None, "restored"), (2, "restored"), (1, "refused"), (3, "refused")])
def test_torchtitans_place_in_the_data_is_of_as_many_ranks(ranks: int | None, outcome: str) -> None:
    """Its own loader asserts that they are, or asks for a rank's value that is not there."""
    keys = {"dataloader.dp_rank_0", "dataloader.dp_rank_1", "dataloader.world_size"}
    held = Held(values=frozenset({"train_state", "dataloader"}), optimizer=True, scheduler=True)
    seen = Seen("", frozenset({".metadata"}), frozenset(), {}, held, Settings(), ranks, 3, lambda name: frozenset(keys))
    found = {one.thing: one.row.outcome.value for one in loader_named("torchtitan")[0].prospects(seen)}
    assert found[Thing.DATA] == outcome


def test_what_deepspeed_loses_inside_a_trainers_step(cli: Cli, tmp_path: Path) -> None:
    """Another number of ranks, and a key of a rank's file: it was said of both that DeepSpeed has its own."""
    step = Path(shutil.copytree(GOLDENS / "trainers" / "ac_ds2" / "step_3", tmp_path / "step_3"))

    def refused(*words: object) -> set[str]:
        found = cli("will-resume", step, "--trainer", "accelerate", "--json", *words).json
        return {one["thing"] for one in found["roles"][""] if one["outcome"] == "refused"}

    assert refused() == set()
    assert refused("--world-size", 3) == {"optimizer", "param groups", "loss scaler"}
    (file,) = step.rglob("*rank_1*optim_states.pt")
    with edited(file) as state:
        del state["optimizer_state_dict"]["ds_version"]
    assert "optimizer" in refused()


def bridged(tmp_path: Path) -> Path:
    """A run as Megatron-Bridge leaves one, with its counters and its own tracker."""
    root = counted(bridge_run("tp2pp2dp2_fully_reshardable", tmp_path / "run"))
    shutil.copy(root / "iter_0000002" / "train_state.pt", root / "latest_train_state.pt")
    return root


def outcomes_of(cli: Cli, root: Path, *words: object) -> dict[str, str]:
    found = cli("will-resume", root, "--trainer", "megatron-bridge", "--json", *words).json
    return {one["thing"]: one["outcome"] for role in found["roles"].values() for one in role}


def test_megatron_bridge(cli: Cli, tmp_path: Path) -> None:
    """Rows that were read in its code; its own tracker is looked at first."""
    root = bridged(tmp_path)
    step = root / "iter_0000002"
    assert {*outcomes_of(cli, root).values()} == {"restored", "not there"}
    assert cli("will-resume", root, "--trainer", "megatron-bridge").code == 0
    (root / "latest_checkpointed_iteration.txt").write_text("1")
    assert "latest_train_state.pt" in cli("will-resume", root, "--trainer", "bridge").stdout
    config = tmp_path / "config.yaml"
    config.write_text("checkpoint: {load_optim: false}\nmodel: {tensor_model_parallel_size: 4}\n")
    found = outcomes_of(cli, root, "--config", config)
    assert (found["weights"], found["optimizer"], found["RNG"]) == ("restored", "started anew", "started anew")
    (step / "train_state.pt").unlink()
    assert outcomes_of(cli, root) | {"counters": "started anew", "data": "started anew"} == outcomes_of(cli, root)
    (step / "run_config.yaml").unlink()
    assert outcomes_of(cli, root)["weights"] == "refused"
    (root / "latest_train_state.pt").write_bytes(b"")
    found_now = cli("will-resume", root, "--trainer", "megatron-bridge", "--json")
    assert (found_now.code, found_now.json["stops"], found_now.json["step"]) == (1, True, None)


def _rank_files(folder: Path, golden: str) -> Path:
    """A step of verl's with rank files of a golden."""
    shutil.copytree(GOLDENS / "verl" / golden, folder / "global_step_6" / "actor")
    return folder / "global_step_6"


@pytest.mark.parametrize(
    ("golden", "ranks", "outcome"),
    [
        ("fsdp1_orig_ws2", [], "restored"),  # a rank has no piece of some parameters
        ("fsdp2_ws3", [0, 1, 2], "restored"),  # as frozen ones are saved
        ("fsdp2_ws3", [1], "started anew"),
    ],
)
def test_parameters_without_a_state_in_all_rank_files_are_frozen_ones(
    cli: Cli, tmp_path: Path, golden: str, ranks: list[int], outcome: str
) -> None:
    step = _rank_files(tmp_path, golden)
    for rank in ranks:
        path = step / "actor" / f"optim_world_size_3_rank_{rank}.pt"
        tree = torch.load(path, weights_only=False)
        for number in (1, 2):
            del tree["state"][number]
        torch.save(tree, path)
    found = cli("will-resume", step, "--trainer", "verl", "--json").json["roles"]["actor"]
    (optimizer,) = (one for one in found if one["thing"] == "optimizer")
    assert optimizer["outcome"] == outcome
    assert ("optim_world_size_3_rank_1.pt" in optimizer["why"]) == (outcome != "restored")
