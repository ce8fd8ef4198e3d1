"""Which step a checkpoint is of: what its files say, and where they say none, or always 0, what the folders above are called."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mcore_rlhf.convert import convert
from mcore_rlhf.families.options import ConvertOptions, ReadOptions
from mcore_rlhf.families.run_folders import counted_above, named_step
from mcore_rlhf.formats.registry import open_checkpoint
from tests.helpers.damage import edited

GOLDENS = Path(__file__).parents[2] / "goldens"
PLAIN = GOLDENS / "megatron_dist" / "plain_tp2" / "iter_0000002"


def uncounted(folder: Path, iteration: int | None) -> Path:
    """A torch_dist folder of megatron-core's own whose ``common.pt`` says another iteration, or none."""
    shutil.copytree(PLAIN, folder)
    with edited(folder / "common.pt") as common:
        del common["iteration"]
        if iteration is not None:
            common["iteration"] = iteration
    return folder


def test_a_dist_ckpt_of_verls_is_of_the_step_that_it_lies_in(tmp_path: Path) -> None:
    folder = uncounted(tmp_path / "global_step_3" / "actor" / "dist_ckpt", None)
    assert open_checkpoint(folder.parent, ReadOptions()).state.iteration == 3
    convert(folder.parent, tmp_path / "megatron", ConvertOptions(to="megatron"))
    assert (tmp_path / "megatron" / "iter_0000003").is_dir()


def test_an_iteration_that_is_always_0_is_that_of_the_step(tmp_path: Path) -> None:
    step = tmp_path / "step_3"
    uncounted(step / "policy" / "weights" / "iter_0000000", 0)
    (step / "policy" / "weights" / "latest_checkpointed_iteration.txt").write_text("0")
    weights = step / "policy" / "weights"
    assert open_checkpoint(weights, ReadOptions()).state.iteration == 0, "anybody's folder may be called step_3"
    (step / "training_info.json").write_text(json.dumps({"total_steps": 3}))
    source = open_checkpoint(weights, ReadOptions())
    assert source.state.iteration == 3
    assert any("step's folder" in text for _, text in source.notes.lines)


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("global_step_7/actor/optimizer/dist_ckpt", 7), ("step_7/policy/weights/model", 7), ("checkpoint-7/pytorch_model_fsdp_0", 7),
        ("step-7", 7), ("iter_0000002", 2), ("step_7/a/b/c/d", None), ("actor", None),
    ],
)  # fmt: skip
def test_the_nearest_folder_that_says_a_step_counts(path: str, step: int | None, tmp_path: Path) -> None:
    (tmp_path / path).mkdir(parents=True)
    assert named_step(tmp_path / path) == step
    assert counted_above(tmp_path / path) is None


def test_a_folder_that_is_given_from_inside_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step_7" / "policy").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "step_7" / "policy")
    assert named_step(Path()) == 7
