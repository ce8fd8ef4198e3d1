"""By-products of a step: made of what was committed, deleted with it, and never a reason to stop training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore_rlhf import CheckpointManager, ManagerOptions, TorchEngine, WriteOptions
from mcore_rlhf.errors import CheckpointError, UsageError
from mcore_rlhf.manager.run.options import Event, Export
from mcore_rlhf.manager.run.retention import KeepLast, Retention, delete, exports_of
from tests.helpers.conversions import GOLDENS

GOLDEN = GOLDENS / "tp2pp2dp2_bf16_do"


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A step whose actor real megatron-core wrote."""
    folder = tmp_path / "checkpoints" / "global_step_2"
    folder.mkdir(parents=True)
    shutil.copytree(GOLDEN, folder / "actor")
    return folder


def test_a_hugging_face_folder_is_made_of_a_role(step: Path) -> None:
    made = Export("hf", write=WriteOptions(no_optimizer=True, dtype="float16")).run(step)
    assert made == exports_of(step) / "hf"
    weights = load_file(made / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    assert json.loads((made / "config.json").read_text())["model_type"] == "llama"
    assert not (made / "optimizer").exists()


def test_it_is_made_anew_and_goes_with_its_step(step: Path) -> None:
    export = Export("hf")
    first = export.run(step)
    assert export.run(step) == first
    delete(step)
    assert not exports_of(step).exists()


@pytest.mark.parametrize(("every", "wanted"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3])])
def test_steps_that_are_wanted(every: int, wanted: list[int]) -> None:
    assert [step for step in range(1, 5) if Export("hf", every).wants(step)] == wanted


def test_what_cannot_be_is_refused_at_once() -> None:
    with pytest.raises(CheckpointError, match="gguf"):
        Export("gguf")
    with pytest.raises(UsageError, match="every"):
        Export("hf", 0)


def test_an_export_that_fails_is_told_and_the_step_stays(tmp_path: Path) -> None:
    """A plain module's names are in no table of Megatron's: training goes on all the same."""
    heard: list[Event] = []
    keep = Retention((KeepLast(1),))
    options = ManagerOptions(exports=(Export("megatron"),), keep=keep, on_event=heard.append, catch_signals=False)
    with CheckpointManager(tmp_path, {"actor": TorchEngine(torch.nn.Linear(2, 2))}, options=options) as manager:
        manager.save(1)
        manager.wait()
        manager.save(2, blocking=True)
    assert (tmp_path / "global_step_2" / "manifest.json").is_file()
    assert [event.step for event in heard if event.kind == "failed" and "export to megatron" in event.text] == [1, 2]
    assert not (tmp_path / "global_step_1").exists()  # old steps go all the same
