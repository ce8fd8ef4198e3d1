"""``steps`` and ``prune`` of roots whose steps a trainer writes: what a seam committed goes by the rules, all else stays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_rlhf.manager.trainer_steps import StepOptions, TrainerSteps

from .conftest import Cli

Write = Callable[[Path], None]


def transformers(folder: Path) -> None:
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": []}))
    (folder / "optimizer.pt").write_bytes(b"states")


def accelerate(folder: Path) -> None:
    (folder / "random_states_0.pkl").write_bytes(b"states")


def torchtitan(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"states")
    (folder / "__0_0.distcp").write_bytes(b"states")


def bridge(folder: Path) -> None:
    (folder / "run_config.yaml").write_text("{}")


ROOTS = {
    "transformers": (transformers, "checkpoint-{}"), "accelerate": (accelerate, "checkpoint_{}"), "torchtitan": (torchtitan, "step-{}"),
    "megatron-bridge": (bridge, "iter_000000{}"),
}  # fmt: skip


@pytest.fixture(params=ROOTS)
def trainer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(tmp_path: Path, trainer: str) -> Path:
    """Four steps that the seam committed, 2 being the best."""
    with TrainerSteps(tmp_path / "run", trainer, StepOptions(fsync=False)) as steps:
        for number in range(1, 5):
            steps.save(number, ROOTS[trainer][0], metrics={"reward": float(number == 2)})
    return tmp_path / "run"


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def named(trainer: str, *numbers: int) -> list[str]:
    return [ROOTS[trainer][1].format(number) for number in numbers]


def test_rules_count_and_delete_what_a_seam_committed(cli: Cli, root: Path, trainer: str) -> None:
    tried = cli("prune", root, "--keep-last", 2, "--dry-run", "--json").json
    assert ([gone["step"] for gone in tried["deleted"]], tried["kept"], tried["foreign"]) == ([1, 2], [3, 4], [])
    assert folders(root) == named(trainer, 1, 2, 3, 4)
    done = cli("prune", root, "--keep-last", 1, "--keep-best", "reward")
    assert (done.code, "deleted 2 steps" in done.stdout, "kept: 2, 4" in done.stdout) == (0, True, True)
    assert folders(root) == named(trainer, 2, 4)
    assert cli("steps", root).code == 0
    assert cli("prune", root, "--keep-best", "loss").code == 2


def test_quarantine_takes_a_step_out_of_the_rules(cli: Cli, root: Path, trainer: str) -> None:
    (one,) = [
        step for step in cli("steps", root, "--quarantine", 4, "--reason", "bad", "--json").json if step["quarantined"]
    ]
    assert (one["step"], one["quarantined"]) == (4, "bad")
    assert cli("prune", root, "--keep-last", 1).code == 0
    assert folders(root) == named(trainer, 3, 4)
    assert not any(step["quarantined"] for step in cli("steps", root, "--release", 4, "--json").json)
    refused = cli("steps", root, "--quarantine", 9)
    assert (refused.code, "there is no step 9" in refused.stderr) == (2, True)


def test_nothing_goes_while_the_newest_is_damaged(cli: Cli, root: Path, trainer: str) -> None:
    file = next(
        path
        for path in (root / named(trainer, 4)[0]).iterdir()
        if "mcore" not in path.name and path.name != "manifest.json"
    )
    file.write_bytes(bytes(len(file.read_bytes())))
    refused = cli("prune", root, "--keep-last", 1)
    assert (refused.code, "nothing was deleted" in refused.stderr) == (1, True)
    assert folders(root) == named(trainer, 1, 2, 3, 4)


def test_steps_of_the_trainers_own_are_never_deleted(cli: Cli, root: Path, trainer: str) -> None:
    """Without a manifest, nobody knows that they are whole, and nobody asked us to look after them."""
    write, name = ROOTS[trainer]
    for number in (0, 5):
        (root / name.format(number)).mkdir()
        write(root / name.format(number))
    done = cli("prune", root, "--keep-last", 1, "--include-damaged")
    assert folders(root) == named(trainer, 0, 4, 5)
    assert "without a manifest, so that no rule counts or deletes them: 0, 5; mcore-rlhf adopt" in done.stdout


def test_what_the_tracker_names_stays(cli: Cli, tmp_path: Path) -> None:
    with TrainerSteps(tmp_path / "run", "megatron-bridge", StepOptions(fsync=False)) as steps:
        for number in range(1, 4):
            steps.save(number, bridge)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("1")
    assert cli("prune", tmp_path / "run", "--keep-last", 1).code == 0
    assert folders(tmp_path / "run") == ["iter_0000001", "iter_0000003"]


def ray_train(folder: Path) -> None:
    (folder / ".metadata.json").write_text("{}")
    (folder / "worker-0.pt").write_bytes(b"states")


@pytest.fixture
def twice(tmp_path: Path) -> Path:
    """Steps 2 to 8 of Ray Train's, of which 4 and 6 lie in two folders, one of each damaged."""
    root = tmp_path / "ray"
    names = (
        "checkpoint_step_2",
        "checkpoint_step_4",
        "checkpoint_step_4-02",
        "checkpoint_step_6",
        "checkpoint_step_6-02",
        "checkpoint_step_8",
    )
    with TrainerSteps(root, "ray-train", StepOptions(fsync=False)) as steps:
        for name in names:
            steps.save(int(name[16]), ray_train, name=name)
    for name in ("checkpoint_step_4", "checkpoint_step_6-02"):
        (root / name / "worker-0.pt").write_bytes(b"")
    return root


def test_a_step_in_two_folders_is_one(cli: Cli, twice: Path) -> None:
    listed = cli("steps", twice, "--json").json
    assert [(step["step"], Path(step["path"]).name, step["state"]) for step in listed] == [
        (2, "checkpoint_step_2", "committed"), (4, "checkpoint_step_4-02", "committed"), (6, "checkpoint_step_6", "committed"),
        (8, "checkpoint_step_8", "committed"),
    ]  # fmt: skip
    pruned = cli("prune", twice, "--keep-last", "3", "--include-damaged", "--json").json
    assert {Path(gone["path"]).name for gone in pruned["deleted"]} == {
        "checkpoint_step_2",
        "checkpoint_step_4",
        "checkpoint_step_6-02",
    }
    assert (pruned["kept"], pruned["failed"]) == ([4, 6, 8], [])


def test_quarantine_takes_every_folder_of_a_step(cli: Cli, twice: Path) -> None:
    cli("steps", twice, "--quarantine", "6")
    assert {path.parent.name for path in twice.glob("*/quarantined.json")} == {
        "checkpoint_step_6",
        "checkpoint_step_6-02",
    }
    cli("steps", twice, "--release", "6")
    assert not [*twice.glob("*/quarantined.json")]


def test_a_step_in_no_format_that_is_known_is_held_against_its_manifest(cli: Cli, twice: Path) -> None:
    step = str(twice / "checkpoint_step_8")
    said = cli("verify", twice).stdout
    assert f"{step}: in no format that is known\nintact" in said
    assert "checked  the CRC-32 of every file in the manifest" in said
    (twice / "checkpoint_step_8" / "worker-0.pt").write_bytes(b"sTates")
    assert cli("verify", step, "--quick").code == 0
    found = cli("verify", step)
    assert found.code == 1
    assert "worker-0.pt: is damaged: CRC-32" in found.stdout


GOLDENS = Path(__file__).parents[2] / "goldens"
TRACKERS = {
    "openrlhf": (GOLDENS / "trainers" / "or_z2", "_actor/latest"),
    "verl": (GOLDENS / "verl" / "fsdp2_ws3", "latest_checkpointed_iteration.txt"),
}


@pytest.mark.parametrize("said", [b"", bytes(5), b"x", b"global_step99"])
@pytest.mark.parametrize("trainer", TRACKERS)
def test_a_tracker_that_names_no_step_is_damage(cli: Cli, tmp_path: Path, trainer: str, said: bytes) -> None:
    """Both begin anew at one that is empty, without a word."""
    golden, tracker = TRACKERS[trainer]
    root = tmp_path / "run"
    shutil.copytree(golden, root if trainer == "openrlhf" else root / "global_step_3" / "actor")
    if trainer == "verl":
        (root / tracker).write_text("3")
    assert cli("verify", root).code == 0
    (root / tracker).write_bytes(said)
    found = cli("verify", root, "--json")
    assert (found.code, found.json["intact"], len(found.json["problems"])) == (1, False, 1)
    assert f"{tracker}: names no step that is there (3)" in found.json["problems"][0]["message"]


def test_a_step_without_what_its_trainer_needs_is_incomplete(cli: Cli, tmp_path: Path) -> None:
    step = tmp_path / "run" / "step_3"
    shutil.copytree(GOLDENS / "trainers" / "nm_v1" / "step_3", step)
    assert cli("verify", step).code == 0
    (step / "training_info.json").unlink()
    found = cli("verify", step, "--json")
    assert (found.code, [one["kind"] for one in found.json["problems"]]) == (1, ["Incomplete"])
    assert "NeMo-RL does not go on from the step" in found.json["problems"][0]["message"]


def test_of_a_step_without_its_place_in_the_data_that_is_said(cli: Cli, tmp_path: Path) -> None:
    """It is whole, as far as models go; NeMo-RL stops where it opens that file, others begin their data again."""
    step = tmp_path / "run" / "step_3"
    shutil.copytree(GOLDENS / "trainers" / "nm_v1" / "step_3", step)
    assert cli("verify", step, "--json").json["missing"] == []
    (step / "train_dataloader.pt").unlink()
    found = cli("verify", step, "--json").json
    assert (found["intact"], found["missing"]) == (
        True,
        ["train_dataloader.pt: without it NeMo-RL stops, as it opens it"],
    )
    assert "missing  train_dataloader.pt" in cli("verify", step).stdout
