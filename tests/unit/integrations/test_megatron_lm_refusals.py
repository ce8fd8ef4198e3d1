"""What the drop-in for Megatron-LM's scripts refuses, when, and in what words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.errors import LayoutMismatch, NotACheckpoint, StorageError, Unsupported
from tests.unit.integrations.fake_engine import script
from tests.unit.integrations.fake_megatron import FakeMegatron, script_args
from tests.unit.integrations.fake_script import installed_on, load, save


def test_another_model_is_refused_by_megatrons_own_comparison(megatron: FakeMegatron, tmp_path: Path) -> None:
    installed_on(megatron, tmp_path / "run")
    save(megatron, 1, script())
    megatron.args = script_args(load=str(tmp_path / "run"), tensor_model_parallel_size=2)
    load(megatron, script())  # another layout is not another model
    megatron.args = script_args(load=str(tmp_path / "run"), num_attention_heads=4)
    with pytest.raises(AssertionError, match="num_attention_heads"):
        load(megatron, script())
    narrow = script()
    narrow.model = [torch.nn.Linear(3, 2)]
    narrow.optimizer = torch.optim.Adam(narrow.model[0].parameters())
    with pytest.raises(LayoutMismatch, match="weight"):
        load(megatron, narrow)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ckpt_format": "torch_dist"}, "Give --ckpt-format torch"),
        ({"non_persistent_ckpt_type": "global"}, "non-persistent"),
        ({"non_persistent_save_interval": 5}, "non-persistent"),
        ({"load_main_params_from_ckpt": True}, "load-main-params"),
    ],
)
def test_what_cannot_be_done_is_refused_before_a_model_is_built(
    megatron: FakeMegatron, tmp_path: Path, given: dict[str, Any], words: str
) -> None:
    installed_on(megatron, tmp_path / "run")
    megatron.args = script_args(save=str(tmp_path / "run"), **given)
    with pytest.raises(Unsupported, match=words):
        megatron.module("training").setup_model_and_optimizer(lambda: None, None)
    assert ("megatron sets up",) not in megatron.calls
    with pytest.raises(Unsupported, match=words):
        save(megatron, 1, script())
    assert not (tmp_path / "run").exists()


def test_the_folder_is_tried_before_training(megatron: FakeMegatron, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    installed_on(megatron, tmp_path / "file" / "run")
    one = script()
    with pytest.raises(StorageError):
        megatron.module("training").setup_model_and_optimizer(lambda: (one.model, one.optimizer, one.scheduler), None)
    megatron.args.skip_train = True
    megatron.module("training").setup_model_and_optimizer(lambda: (one.model, one.optimizer, one.scheduler), None)


def test_modelopt_and_non_persistent_saves_are_refused(megatron: FakeMegatron, tmp_path: Path) -> None:
    installed_on(megatron, tmp_path / "run")
    with pytest.raises(Unsupported, match="non-persistent"):
        save(megatron, 1, script(), non_persistent_ckpt=True)
    megatron.checkpointing.has_nvidia_modelopt = True
    megatron.checkpointing.save_modelopt_state = lambda model, state: None
    save(megatron, 1, script())
    megatron.checkpointing.save_modelopt_state = lambda model, state: state.update(modelopt_state=1)
    with pytest.raises(Unsupported, match="ModelOpt"):
        save(megatron, 2, script())


def test_a_missing_checkpoint(megatron: FakeMegatron, tmp_path: Path) -> None:
    installed_on(megatron, tmp_path / "run")
    megatron.args = script_args(load=str(tmp_path / "run"), exit_on_missing_checkpoint=True)
    with pytest.raises(NotACheckpoint, match="exit-on-missing-checkpoint"):
        load(megatron, script())
    megatron.args = script_args(load=str(tmp_path / "run"), pretrained_checkpoint=str(tmp_path / "none"))
    with pytest.raises(NotACheckpoint, match="pretrained-checkpoint"):
        load(megatron, script())
    megatron.args = script_args(load=None)
    assert load(megatron, script()) == (0, 0)
