"""Which steps of a run are whole, seen from outside: those of trainers that write no manifest among them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mcore_rlhf.errors import NotACheckpoint, UsageError
from mcore_rlhf.manager.prove import places
from mcore_rlhf.manager.prove.check import CheckOptions, compare_outputs
from mcore_rlhf.manager.prove.control import make_control
from mcore_rlhf.manager.prove.killing import Watch
from mcore_rlhf.manager.prove.profiles import profile_named
from tests.unit.manager.roots import make_step


def checkpoint(root: Path, step: int, weight: float = 1.0, *, finished: bool = True) -> Path:
    """A step as transformers' Trainer writes it, without a manifest."""
    folder = root / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file({"w": torch.tensor([2.0, weight])}, folder / "model.safetensors")
    torch.save(
        {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.tensor([1.0, 2.0])}}}, folder / "optimizer.pt"
    )
    torch.save({"cpu": torch.arange(3)}, folder / "rng_state.pth")
    (folder / "training_args.bin").write_bytes(str(root).encode())
    if finished:
        state = {"global_step": step, "best_model_checkpoint": str(folder), "log_history": []}
        (folder / "trainer_state.json").write_text(str(state).replace("'", '"'))
    return folder


def test_a_trainers_step_is_whole_once_the_file_is_there_without_which_it_passes_over_it(tmp_path: Path) -> None:
    root = tmp_path / "A" / "out"
    checkpoint(root, 2)
    checkpoint(root, 10, finished=False)
    assert places.roots(tmp_path / "A") == [root]
    assert places.committed(root) == [2]
    assert Watch(tmp_path / "A").committed() == [2]
    assert places.step_in(root, 2).name == "checkpoint-2"
    with pytest.raises(NotACheckpoint, match="run A has not committed step 10; committed: 2"):
        places.require_committed(root, 10, "run A")


def test_where_a_trainer_has_a_tracker_that_decides(tmp_path: Path) -> None:
    for step in (1, 2):
        folder = tmp_path / f"iter_{step:07d}" / "mp_rank_00"
        folder.mkdir(parents=True)
        torch.save({"model": {}}, folder / "model_optim_rng.pt")
    assert places.committed(tmp_path) == []
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1\n")
    assert places.committed(tmp_path) == [1]


def test_the_actor_of_openrlhf_is_a_run_whose_tracker_is_deepspeeds(tmp_path: Path) -> None:
    for step in (1, 2):
        folder = tmp_path / "_actor" / f"global_step{step}"
        folder.mkdir(parents=True)
        torch.save({"module": {"w": torch.ones(2)}}, folder / "mp_rank_00_model_states.pt")
        (folder / "metric.json").write_text("{}")
    (tmp_path / "_actor" / "latest").write_text("global_step1")
    assert places.root_of(tmp_path) == tmp_path / "_actor"
    assert places.committed(tmp_path / "_actor") == [1]
    (tmp_path / "_critic" / "global_step1").mkdir(parents=True)
    with pytest.raises(UsageError, match="2 folders hold steps: _actor, _critic"):
        places.root_of(tmp_path)


def test_our_own_steps_are_never_whole_without_their_manifest(tmp_path: Path) -> None:
    make_step(tmp_path, 1)
    step = make_step(tmp_path, 2)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2\n")
    assert places.committed(tmp_path) == [1, 2]
    (step / "manifest.json").unlink()
    assert places.committed(tmp_path) == [1]


def test_our_own_steps_hide_exports_that_are_called_like_a_trainers(tmp_path: Path) -> None:
    make_step(tmp_path / "run", 1)
    checkpoint(tmp_path / "exported", 1)
    assert places.root_of(tmp_path) == tmp_path / "run"
    (tmp_path / "watched").mkdir()
    watch = Watch(tmp_path / "watched")
    checkpoint(tmp_path / "watched" / "initial", 0)
    assert watch.committed() == [0]
    make_step(tmp_path / "watched" / "run", 3)
    assert watch.committed() == [3]
    (tmp_path / "watched").rename(tmp_path.parent / f"{tmp_path.name}-watched")
    checkpoint(tmp_path / "other", 1)
    with pytest.raises(UsageError, match="2 folders hold steps: exported, other"):
        places.root_of(_without(tmp_path, "run"))


def _without(folder: Path, name: str) -> Path:
    (folder / name).rename(folder.parent / f"{folder.name}-{name}")
    return folder


def test_a_trainers_files_are_compared_by_their_values(tmp_path: Path) -> None:
    for run, weight in (("A", 1.0), ("B", 1.0), ("C", 1.001)):
        checkpoint(tmp_path / run / "out", 5, weight)
    options = CheckOptions(3, 2)
    same = compare_outputs(tmp_path / "A", tmp_path / "B", 5, options)
    assert same.equal
    assert same.states.files == 5
    other = compare_outputs(tmp_path / "A", tmp_path / "C", 5, options).states.tally
    (finding,) = other.findings
    assert (finding.where, finding.key) == ("model.safetensors", "w")
    assert "1 of 2 elements; first: [1] is 1.0 and 1.001" in finding.detail
    within = CheckOptions(3, 2, profile=profile_named("bf16-reduction"))
    assert compare_outputs(tmp_path / "A", tmp_path / "C", 5, within).equal


def test_the_control_of_a_trainers_step_is_broken_in_its_optimizer(tmp_path: Path) -> None:
    checkpoint(tmp_path / "B", 3)
    checkpoint(tmp_path / "B", 4)
    broken = make_control(tmp_path / "B", tmp_path / "C", 3)
    assert str(broken) == "optimizer.pt: state/0/exp_avg, the lowest bit of each of 2 float32 elements"
    assert [path.name for path in (tmp_path / "C").iterdir()] == ["checkpoint-3"]
    state = torch.load(tmp_path / "C/checkpoint-3/optimizer.pt", weights_only=True)["state"][0]
    assert state["exp_avg"].tolist() == [1 + 2**-23, 2 + 2**-22]
    make_control(tmp_path / "B", tmp_path / "D", 3, coarse=True)
    state = torch.load(tmp_path / "D/checkpoint-3/optimizer.pt", weights_only=True)["state"][0]
    assert state["exp_avg"].tolist() == [-1.0, -2.0]
