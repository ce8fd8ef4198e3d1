"""What a trainer's step says twice must agree, or it is said: by ``verify``, by ``convert`` and by ``will-resume``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.manager.subject import find
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Settings
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.damage import edited

GOLDENS = Path(__file__).parents[2] / "goldens"
RUNS = GOLDENS / "trainers"


def in_json(**changed: int) -> Callable[[Path], None]:
    """The change of a file of JSON."""

    def change(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))

    return change


def in_torch(where: Callable[[Any], None]) -> Callable[[Path], None]:
    """The change of a file of ``torch.save``."""

    def change(path: Path) -> None:
        with edited(path) as tree:
            where(tree)

    return change


CHANGES: dict[str, tuple[str, Path, str, Callable[[Path], object], str]] = {
    "nemo-rl": (
        "nemo-rl", RUNS / "nm_v1", "step_3/training_info.json", in_json(total_steps=4),
        "total_steps is 4, and the folder is step_3",
    ),
    "nemo-rl's epoch": (
        "nemo-rl", RUNS / "nm_v1", "step_3/training_info.json", in_json(current_epoch=0, current_step=2),
        "current_step is 2 of the first epoch, and total_steps is 3",
    ),
    "nemo-rl's steps of one epoch": (
        "nemo-rl", RUNS / "nm_v1", "step_3/training_info.json", in_json(current_step=10**30),
        "current_step is no number of steps, and the folder is step_3",
    ),
    "nemo-rl's samples": (
        "nemo-rl", RUNS / "nm_v1", "step_3/training_info.json", in_json(consumed_samples=2), "consumed_samples is 2, and total_steps is 3",
    ),
    "another rank's random states": (
        "accelerate", RUNS / "ac_ds2", "step_3/random_states_0.pkl", lambda path: shutil.copy(path.with_name("random_states_1.pkl"), path),
        "random_states_0.pkl: was written as random_states_1.pkl, and lies in the place of another file",
    ),
    "roll's tracker": (
        "roll", RUNS / "roll", "checkpoint-3/latest_checkpointed_iteration.txt", lambda path: path.write_bytes(b"\0"),
        "latest_checkpointed_iteration.txt names no iteration: ROLL finds no weights",
    ),
    "nemo-rl's data": (
        "nemo-rl", RUNS / "nm_v1", "step_3/train_dataloader.pt", in_torch(lambda tree: tree.update(_num_yielded=9)), "_num_yielded is 9",
    ),
    "skyrl": (
        "skyrl", RUNS / "skyrl_fsdp2", "global_step_3/trainer_state.pt", in_torch(lambda tree: tree.update(global_step=4)),
        "global_step is 4, and the folder is global_step_3",
    ),
    "rank files": (
        "skyrl", RUNS / "skyrl_fsdp2", "global_step_3/policy/fsdp_config.json", in_json(world_size=3),
        "world_size is 3, and the files are of 2",
    ),
    "areal": (
        "areal", GOLDENS / "areal" / "trial", "recover_info/step_info.json", in_json(epoch_step=1), "and global_step is 2",
    ),
    "openrlhf": (
        "openrlhf", RUNS / "or_z2", "_actor/global_step3/mp_rank_00_model_states.pt", in_torch(lambda tree: tree.update(global_step=4)),
        "its client state has global_step 4, and the folder is global_step3",
    ),
    "openrlhf's stage": (
        "openrlhf", RUNS / "or_z2", "_actor/global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        in_torch(lambda tree: tree["optimizer_state_dict"].update(zero_stage=1)), "is of ZeRO stage 1, but",
    ),
}  # fmt: skip


def said_by_verify(root: Path) -> str:
    try:
        step = find(root, ReadOptions())
        verdicts = [verify(step.models[role], step.reading(role), Depth.QUICK) for role in step.models]
        wrong = [
            text for one in verdicts for text in (*one.contradicts, *(found.message for found in one.problems.found))
        ]
        return "\n".join(map(str, wrong))
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("case", CHANGES)
def test_what_is_said_twice_and_otherwise_is_named(tmp_path: Path, case: str) -> None:
    trainer, golden, file, change, text = CHANGES[case]
    root, (loader, _) = tmp_path / "run", loader_named(trainer)
    shutil.copytree(golden, root)
    before = forecast(root, loader, Settings())
    assert not before.contradicts
    assert text not in said_by_verify(root)
    change(root / file)
    found = forecast(root, loader, Settings())
    said = [*found.contradicts, *found.notes, *(one.why for of in found.roles.values() for one in of)]
    assert any(text in one for one in said), said
    assert not found.resumes
    if "data" not in case:  # which the step's files are looked into for, and no model's
        assert text in said_by_verify(root)


def test_an_asynchronous_run_of_nemo_rl_counts_its_steps_in_one_field(tmp_path: Path) -> None:
    """``async_grpo_train`` leaves ``total_steps`` as the run before it had it: 0 in a new one."""
    root = tmp_path / "run"
    shutil.copytree(RUNS / "nm_v1", root)
    in_json(total_steps=0)(root / "step_3" / "training_info.json")
    assert not forecast(root, loader_named("nemo-rl")[0], Settings()).contradicts
    assert "total_steps" not in said_by_verify(root)


def test_counters_by_which_a_trainer_goes_name_a_step_that_is_there(tmp_path: Path) -> None:
    """torchtitan's own counter is the number in its folder's name."""
    root = tmp_path / "checkpoint"
    shutil.copytree(GOLDENS / "torchtitan" / "checkpoint", root)
    (step,) = (one for one in root.iterdir() if one.name.startswith("step-"))
    number = int(step.name.removeprefix("step-"))
    assert not forecast(root, loader_named("torchtitan")[0], Settings()).contradicts
    step.rename(root / f"step-{number + 1}")
    found = forecast(root, loader_named("torchtitan")[0], Settings())
    (text,) = found.contradicts
    assert text == (
        f"train_state.step is {number}, and the folder's name says step {number + 1}: the trainer goes on at the first"
    )
    assert not found.resumes
    assert text in said_by_verify(root)
