"""The optimizer in a folder of its own beside the model's, as NeMo-RL and accelerate save it: read with it, never invisible."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from mcore_rlhf.convert import ConvertOptions, convert, prepare
from mcore_rlhf.core.catalog import MASTER
from mcore_rlhf.errors import CheckpointError, Unsupported
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.catalog_values import tensor_of
from tests.helpers.dcp_by_torch import Run, differences, load, new_run, save

FOLDERS = {"nemo": ("weights", "optimizer"), "accelerate": ("pytorch_model_fsdp_0", "optimizer_0")}


def written(run: Run, folder: Path, trainer: str) -> tuple[Path, Path]:
    """What torch writes when these trainers call it; the model's folder, and the optimizer's."""
    model, optimizer = (folder / name for name in FOLDERS[trainer])
    states = get_optimizer_state_dict(run.model, run.optimizer)
    nested = {"optim": {"optim": states, "sched": run.scheduler.state_dict()}}
    save({"model": get_model_state_dict(run.model)}, model)
    save(nested if trainer == "nemo" else {"optimizer": states}, optimizer)
    return model, optimizer


@pytest.fixture(params=FOLDERS)
def trainer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run() -> Run:
    return new_run(groups=2)


@pytest.mark.parametrize("given", ["model", "above", "inside"])
def test_both_are_read_as_one(
    run: Run, tmp_path: Path, trainer: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = written(run, tmp_path / "checkpoint-40", trainer)
    monkeypatch.chdir(model)
    source = open_checkpoint({"model": model, "above": model.parent, "inside": Path()}[given], ReadOptions())
    assert source.states == (MASTER, "exp_avg", "exp_avg_sq")
    assert source.state.iteration == 40
    assert {optimizer.name, model.name} == {Path(file.path).parent.name for file in source.files}
    states = get_optimizer_state_dict(run.model, run.optimizer)["state"]
    for spec in source.model.params:
        if spec.trainable:
            wanted = states[spec.name]["exp_avg"]
            assert torch.equal(tensor_of(source, spec.name, "exp_avg"), wanted)
    assert [len(group.params) for group in source.state.groups] == [4, 3]
    assert any("the optimizer is from" in text for _, text in source.notes.lines)
    assert verify(model, ReadOptions(), Depth.DEEP).intact


def test_torch_loads_what_is_made_of_both(run: Run, tmp_path: Path) -> None:
    model, _ = written(run, tmp_path / "checkpoint-40", "accelerate")
    job = convert(model, tmp_path / "out", ConvertOptions(to="dcp", write=WriteOptions(dp=2)))
    assert job.lossless
    fresh = new_run(seed=5, groups=2)
    wanted, found = (
        {"model": get_model_state_dict(r.model), "optimizer": get_optimizer_state_dict(r.model, r.optimizer)}
        for r in (run, fresh)
    )
    assert differences(wanted, found)
    assert not differences(load(found, tmp_path / "out"), wanted)


def test_a_damaged_optimizer_is_found_and_does_not_hide_the_weights(run: Run, tmp_path: Path, trainer: str) -> None:
    model, optimizer = written(run, tmp_path / "run", trainer)
    (file,) = optimizer.glob("*.distcp")
    moment = get_optimizer_state_dict(run.model, run.optimizer)["state"]["embed.weight"]["exp_avg"]
    data = bytearray(file.read_bytes())
    data[data.index(moment.numpy().tobytes())] ^= 1
    file.write_bytes(data)
    assert not verify(model, ReadOptions()).intact
    (optimizer / ".metadata").unlink()
    with pytest.raises(CheckpointError):
        prepare(model, ConvertOptions(to="hf"))
    assert prepare(model, ConvertOptions(to="hf", write=WriteOptions(no_optimizer=True))).nbytes


def test_an_optimizer_that_is_not_understood_is_said(run: Run, tmp_path: Path, trainer: str) -> None:
    model, optimizer = written(run, tmp_path / "run", trainer)
    shutil.rmtree(optimizer)
    states = get_optimizer_state_dict(run.model, run.optimizer)
    for values in states["state"].values():
        values["exp_avg_sq"] = torch.ones(2)
    save({"optimizer": states}, optimizer)
    with pytest.raises(Unsupported, match="exp_avg_sq"):
        prepare(model, ConvertOptions(to="dcp"))
    job = prepare(model, ConvertOptions(to="hf"))
    assert any("not understood" in text for text in job.report.lost)


def test_a_model_alone(run: Run, tmp_path: Path, trainer: str) -> None:
    model, optimizer = written(run, tmp_path / "run", trainer)
    shutil.rmtree(optimizer)
    for path in (model, model.parent):
        assert open_checkpoint(path, ReadOptions()).optimizer is None


def test_the_same_key_in_both(run: Run, tmp_path: Path) -> None:
    model, optimizer = written(run, tmp_path / "run", "nemo")
    shutil.rmtree(optimizer)
    shutil.copytree(model, optimizer)
    source = open_checkpoint(model, ReadOptions(), partial=True)
    assert "has model." in source.unread
    assert source.optimizer is None
