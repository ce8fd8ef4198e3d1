"""A LoRA in rank files, without its base, as verl saves it with ``save_lora_only``: held against what torch gathered of the same run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.core.catalog import MASTER
from mcore_rlhf.errors import Corrupt, Unsupported, UsageError
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.verify.checkpoint import verify
from tests.helpers.catalog_values import tensor_of

GOLDEN = Path(__file__).parents[2] / "goldens" / "verl" / "fsdp1_lora_ws2"
TRUTH = torch.load(GOLDEN / "expected.pt", weights_only=False)
META = "lora_train_meta.json"


def made(source: Path, target: Path, to: str = "fsdp-ranks", **write: Any) -> Job:
    return convert(source, target, ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(**write)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The golden, without what torch gathered."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "global_step_2" / "actor", ignore=lambda *_: ["expected.pt"]))


def check(folder: Path) -> None:
    source = open_checkpoint(folder, ReadOptions())
    for name, states in TRUTH["state"].items():
        assert torch.equal(tensor_of(source, name, MASTER), TRUTH["model"][name]), name
        for state in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(tensor_of(source, name, state), states[state]), name
    assert source.state.groups[0].fields["step"] == 2


def test_each_matrix_is_a_flat_parameter_of_its_own(run: Path, tmp_path: Path) -> None:
    """Its numbers are those that have states, among those of a base that is not there; for other ranks they stay."""
    check(run)
    first = torch.load(run / "optim_world_size_2_rank_0.pt", weights_only=False)
    job = made(run, tmp_path / "three", dp=3)
    assert job.lossless
    check(tmp_path / "three")
    found = torch.load(tmp_path / "three" / "optim_world_size_3_rank_2.pt", weights_only=False)
    assert found["param_groups"] == first["param_groups"]
    assert found["state"].keys() == first["state"].keys() < {*first["param_groups"][0]["params"]}
    made(run, tmp_path / "there", "universal")
    made(tmp_path / "there", tmp_path / "back", like=str(run))  # of one rank, and the run is of two
    check(tmp_path / "back")
    for name in ("model", "optim"):
        file = f"{name}_world_size_2_rank_1.pt"
        one, other = (torch.load(at / file, weights_only=False) for at in (run, tmp_path / "back"))
        assert [*one] == [*other]
    assert one["param_groups"] == other["param_groups"]
    assert {n: [*of] for n, of in one["state"].items()} == {n: [*of] for n, of in other["state"].items()}
    with pytest.raises(
        Unsupported, match="which numbers the adapter's 8 tensors have is not known here\n--like FOLDER"
    ):
        made(tmp_path / "there", tmp_path / "nowhere", dp=2)
    assert not (tmp_path / "nowhere").exists()


def test_what_verl_says_of_it_goes_along(run: Path, tmp_path: Path) -> None:
    """Without the file verl's own merger gives the adapter an alpha of 0; SFT writes 0 where it does not know it."""
    made(run, tmp_path / "one", dp=1)
    assert json.loads((tmp_path / "one" / META).read_text()) == json.loads((run / META).read_text())
    made(run, tmp_path / "peft", "peft")
    said = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["target_modules"]) == (2, 6, ["down_proj", "q_proj"])
    (run / META).write_text('{"r": 2, "lora_alpha": 0, "task_type": "CAUSAL_LM"}')
    with pytest.raises(UsageError, match="does not say lora_alpha"):
        made(run, tmp_path / "unsaid", "peft")
    (run / "lora_adapter").mkdir()  # as 0.7 has it
    (run / "lora_adapter" / "adapter_config.json").write_text(json.dumps(said))
    made(run, tmp_path / "older", "peft")
    assert json.loads((tmp_path / "older" / "adapter_config.json").read_text())["lora_alpha"] == 6


@pytest.mark.parametrize("text", ["{", "[]", '{"lora_alpha": "6"}', '{"lora_alpha": true, "r": [1]}'])
def test_a_file_that_says_nothing_is_not_believed(run: Path, tmp_path: Path, text: str) -> None:
    (run / META).write_text(text)
    with pytest.raises(
        Corrupt if text == "{" else UsageError, match=META if text == "{" else "does not say lora_alpha"
    ):
        made(run, tmp_path / "peft", "peft")
    assert verify(run, ReadOptions()).intact == (text != "{")


def test_more_states_than_matrices_are_not_guessed(run: Path) -> None:
    for rank in range(2):
        file = run / f"optim_world_size_2_rank_{rank}.pt"
        tree = torch.load(file, weights_only=False)
        tree["state"][0] = next(iter(tree["state"].values()))
        torch.save(tree, file)
    with pytest.raises(Unsupported, match="which parameters they are"):
        open_checkpoint(run, ReadOptions())
