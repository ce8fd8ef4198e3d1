"""What accelerate's own functions save of an FSDP run, model and optimizer in folders of their own, read as one and loaded by torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import StateDictType

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from tests.helpers.catalog_values import tensor_of
from tests.helpers.dcp_by_torch import Run, differences, load, new_run

accelerate = pytest.importorskip("accelerate")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[tuple[Run, Path]]:
    """A run, and the ``checkpoint-40`` that a ``Trainer`` makes of it."""
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer

    run, folder = new_run(groups=2), tmp_path / "checkpoint-40"
    accelerate.PartialState(cpu=True)  # its logger wants one
    plugin = SimpleNamespace(
        fsdp_version=2, state_dict_type=StateDictType.SHARDED_STATE_DICT, state_dict_config=SimpleNamespace()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_fsdp_model(plugin, None, run.model, str(folder))
        save_fsdp_optimizer(plugin, None, run.optimizer, run.model, str(folder))
    yield run, folder
    accelerate.PartialState._reset_state()


def test_both_folders_are_one_checkpoint(checkpoint: tuple[Run, Path], tmp_path: Path) -> None:
    run, folder = checkpoint
    assert sorted(path.name for path in folder.iterdir()) == ["optimizer_0", "pytorch_model_fsdp_0"]
    for path in (folder, folder / "pytorch_model_fsdp_0"):
        source = open_checkpoint(path, ReadOptions())
        assert (source.optimizer, source.state.iteration) == ("dcp", 40)
        states = get_optimizer_state_dict(run.model, run.optimizer)["state"]
        for name in states:
            assert torch.equal(tensor_of(source, name, "exp_avg_sq"), states[name]["exp_avg_sq"])
    assert convert(folder, tmp_path / "out", ConvertOptions(to="dcp")).lossless
    fresh = new_run(seed=5, groups=2)
    wanted, found = (
        {"model": get_model_state_dict(r.model), "optimizer": get_optimizer_state_dict(r.model, r.optimizer)}
        for r in (run, fresh)
    )
    assert not differences(load(found, tmp_path / "out"), wanted)
