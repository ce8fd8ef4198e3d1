"""One file less of what transformers' Trainer writes together: its own loader begins something anew, or stops, and no folder is intact."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mcore_rlhf.errors import CheckpointError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.manager.run.adopt import adopt
from mcore_rlhf.verify.checkpoint import verify
from tests.trainers import hf_runs

pytest.importorskip("transformers")

GENUINE = Path(__file__).parents[1] / "goldens" / "transformers" / "checkpoint-2"
TOGETHER = ("optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


@pytest.fixture
def step(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "checkpoint-2"
    shutil.copytree(GENUINE, folder)
    return folder


@pytest.mark.parametrize("folder", [False, True], ids=["gone", "folder"])
@pytest.mark.parametrize("name", TOGETHER)
def test_a_step_with_a_file_less_is_not_intact(step: Path, name: str, folder: bool) -> None:
    """A folder under its name is none: transformers looks for files."""
    assert verify(step, ReadOptions()).intact
    (step / name).unlink()
    if folder:
        (step / name).mkdir()
    said = {"optimizer.pt": "the optimizer"}.get(name, name)
    assert f"{said} is missing" in verify(step, ReadOptions()).problems.describe()
    with pytest.raises(CheckpointError):
        adopt(step)


def test_a_step_of_the_model_alone_is_whole(step: Path) -> None:
    """``save_only_model`` leaves the counters, and none of the others."""
    for name in TOGETHER[:3]:
        (step / name).unlink()
    assert verify(step, ReadOptions()).intact


def test_random_states_of_the_first_of_several_ranks_are_not_all(step: Path) -> None:
    (step / "rng_state.pth").rename(step / "rng_state_0.pth")
    assert "rng_state_1.pth is missing" in verify(step, ReadOptions()).problems.describe()
    shutil.copyfile(step / "rng_state_0.pth", step / "rng_state_1.pth")
    assert verify(step, ReadOptions()).intact


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt"])
def test_its_own_loader_goes_on_otherwise(step: Path, name: str, tmp_path: Path) -> None:
    """Without a word: of the two it loads none where one is missing."""
    whole = hf_runs.train(hf_runs.model(7, tie_word_embeddings=True), tmp_path / "whole", step)
    (step / name).unlink()
    assert hf_runs.train(hf_runs.model(7, tie_word_embeddings=True), tmp_path / "less", step) != whole
