"""Into runs whose steps are iterations beside each other: what is published, joined and refused, and what a manifest there vouches for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.errors import CheckpointError, StorageError, UsageError
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import StepJob, convert_step
from mcore_rlhf.manager.run.adopt import adopt
from mcore_rlhf.manager.runs import listed_steps
from mcore_rlhf.manager.subject import find
from mcore_rlhf.verify.checkpoint import verify
from tests.unit.manager.test_further_trainers import GOLDENS, slime

TORCH = GOLDENS / "megatron" / "tp2pp2dp2_bf16_do"
RUNS, TRACKER = GOLDENS / "trainers", "latest_checkpointed_iteration.txt"


def into(source: Path, root: Path, to: str, role: str | None = None, **write: Any) -> StepJob:
    options = ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(**write))
    return convert_step(find(source, ReadOptions(role=role)), root, options)


def files(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def test_a_step_joins_the_run_that_is_there(tmp_path: Path) -> None:
    root = tmp_path / "run"
    into(TORCH, root, "megatron-lm", tp=2)
    assert (root / TRACKER).read_text() == "2"
    job = into(RUNS / "or_z2", root, "megatron-lm", reference_config=str(RUNS / "config.json"))
    assert (root / TRACKER).read_text() == "3"
    assert [(step.step, step.state) for step in listed_steps(root)] == [(2, "committed"), (3, "committed")]
    assert "the model of the role critic: Megatron-LM has models of the roles actor" in job.account.lost
    assert {name for name in files(root) if "/" not in name} == {TRACKER}
    with pytest.raises(CheckpointError, match="exists"):
        into(TORCH, root, "megatron-lm", tp=2)
    into(TORCH, tmp_path / "older", "megatron-lm", tp=2)
    (tmp_path / "older" / TRACKER).write_text("7")
    into(RUNS / "or_z2", tmp_path / "older", "megatron-lm", reference_config=str(RUNS / "config.json"))
    assert (tmp_path / "older" / TRACKER).read_text() == "7"  # an older step than the run's newest is not gone back to


def test_a_critic_has_a_folder_of_its_own(tmp_path: Path) -> None:
    into(RUNS / "or_z2", tmp_path / "run", "slime", role="critic", reference_config=str(RUNS / "config.json"))
    assert (tmp_path / "run" / TRACKER).read_text() == "2"
    assert open_checkpoint(tmp_path / "run", ReadOptions()).state.iteration == 2


def test_prompts_go_along_to_slime_alone(tmp_path: Path) -> None:
    own = slime(tmp_path / "own")
    into(own, tmp_path / "slime", "slime", tp=1, pp=1)
    name = "rollout/global_dataset_state_dict_2.pt"
    assert (tmp_path / "slime" / name).read_bytes() == (own / name).read_bytes()
    job = into(own, tmp_path / "openrlhf", "openrlhf", vocab_size=132)
    assert [step.step for step in listed_steps(tmp_path / "openrlhf")] == [3]
    assert any("global_dataset_state_dict_2.pt" in text for text in job.jobs["actor"].account.lost)


def test_prompts_go_with_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, seen = slime(tmp_path / "own"), []

    def fail(*_: object) -> None:
        seen.append(files(tmp_path / "slime"))
        raise StorageError("the disk is full")

    monkeypatch.setattr("mcore_rlhf.manager.convert_step.publish", fail)
    with pytest.raises(StorageError):
        into(own, tmp_path / "slime", "slime", tp=1, pp=1)
    assert [any("rollout/" in name for name in there) for there in seen] == [True]
    assert not any("rollout/" in name for name in files(tmp_path / "slime"))


def test_prompts_of_another_run_are_not_written_over(tmp_path: Path) -> None:
    own, other = slime(tmp_path / "own"), tmp_path / "slime" / "rollout" / "global_dataset_state_dict_2.pt"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"somebody's")
    with pytest.raises(UsageError, match="is there, and is another one"):
        into(own, tmp_path / "slime", "slime", tp=1, pp=1)
    assert files(tmp_path / "slime") == {"rollout/global_dataset_state_dict_2.pt"}
    assert other.read_bytes() == b"somebody's"


def test_a_file_that_names_another_iteration_is_in_the_way(tmp_path: Path) -> None:
    shutil.copytree(RUNS / "bridge", tmp_path / "run")
    with pytest.raises(
        UsageError, match=r"latest_train_state\.pt: names a step to Megatron-Bridge, whatever its tracker names"
    ):
        into(TORCH, tmp_path / "run", "megatron-bridge", tp=2)
    assert files(tmp_path / "run") == files(RUNS / "bridge")


@pytest.mark.parametrize("by", ["adopted", "converted"])
def test_the_manifest_of_an_iteration_vouches_where_the_root_is_named(tmp_path: Path, by: str) -> None:
    """``metadata.json`` has no checksum of its own."""
    root = tmp_path / "run"
    if by == "adopted":
        shutil.copytree(RUNS / "bridge", root)
        adopt(root / "iter_0000004")
    else:
        into(RUNS / "bridge", root, "megatron-bridge", pp=2)
    assert verify(root, ReadOptions()).intact
    assert verify(root, ReadOptions()).manifest
    config = root / "iter_0000004" / "metadata.json"
    config.write_bytes(config.read_bytes().replace(b": ", b":\t", 1))  # the same to who reads it
    assert not verify(root, ReadOptions()).intact
    with pytest.raises(CheckpointError, match=r"metadata\.json"):
        into(root, tmp_path / "out", "megatron-lm", tp=1)
    assert not (tmp_path / "out").exists()
