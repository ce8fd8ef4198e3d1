"""What a format has no place for lies beside its files, in every format alike, and comes back."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mcore_rlhf.convert import ConvertOptions, Job, convert
from mcore_rlhf.core.catalog import FLOAT32
from mcore_rlhf.core.facts import Fate, same
from mcore_rlhf.errors import CheckpointError, Corrupt
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.sidecar import ARRAYS, STATE, Sidecar
from mcore_rlhf.families.source import ParamGroup, Source, TrainingState
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.torch_values import SmallTensor, TorchSize
from tests.helpers.plain_load import plain_load

GOLDENS = Path(__file__).parents[1] / "goldens"
MUON = GOLDENS / "deepspeed_muon" / "z2_bf16_dp2"
MEGATRON = GOLDENS / "megatron" / "tp1_bf16_do"


def converted(source: Path, target: Path, to: str, **write: Any) -> Job:
    return convert(source, target, ConvertOptions(to=to, workers=1, fsync=False, write=WriteOptions(**write)))


def opened(path: Path) -> Source:
    return open_checkpoint(path, ReadOptions())


def test_client_state_of_deepspeeds_comes_back_from_megatron(tmp_path: Path) -> None:
    """Megatron has no place for it: not for texts, tensors, tuples or numbers that no JSON has."""
    converted(MEGATRON, tmp_path / "ds", "deepspeed", zero_stage=2)
    file = tmp_path / "ds" / "global_step2" / "mp_rank_00_model_states.pt"
    client = {"epoch": 3, "ema": torch.arange(500.0), "pair": (1, float("inf")), "small": torch.tensor(2.5)}
    stored = {**plain_load(file), **client, "lr_scheduler": {"last_batch_iteration": 1, "mine": 7}}
    torch.save(stored, file)
    (tmp_path / "ds" / "mcore_rlhf.json").unlink()  # the old file's checksums
    job = converted(tmp_path / "ds", tmp_path / "meg", "megatron")
    lines = [text for fate, text in job.report.lines if fate is Fate.KEPT]
    assert any("ema, epoch, pair, small: waits in mcore_rlhf/state.json" in text for text in lines)
    assert job.account.unaccounted == ()
    beside = tmp_path / "meg" / "iter_0000002"
    assert torch.equal(next(iter(load_file(beside / ARRAYS).values())), client["ema"])
    converted(tmp_path / "meg", tmp_path / "tp2", "megatron", tp=2)  # another layout on the way
    back = converted(tmp_path / "tp2", tmp_path / "back", "deepspeed", zero_stage=2)
    assert any("as the step had them before it became Megatron's" in text for _, text in back.report.lines)
    found = plain_load(tmp_path / "back" / "global_step2" / "mp_rank_00_model_states.pt")
    assert [key for key in (*client, "lr_scheduler", "ds_config") if not same(found[key], stored[key])] == []


def test_what_waits_is_of_one_step(tmp_path: Path) -> None:
    converted(MEGATRON, tmp_path / "ds", "deepspeed", no_optimizer=True)
    converted(tmp_path / "ds", tmp_path / "meg", "megatron", no_optimizer=True)
    (tmp_path / "meg" / "mcore_rlhf.json").unlink()
    path = tmp_path / "meg" / "iter_0000002" / STATE
    content = json.loads(path.read_text())
    content["origin"]["iteration"] = 1
    path.write_text(json.dumps(content))
    job = converted(tmp_path / "meg", tmp_path / "back", "deepspeed", no_optimizer=True)
    assert any("is of another step than this one, and is not used" in text for _, text in job.report.lines)
    assert job.account.unaccounted == ()


def test_a_file_that_is_damaged_costs_only_what_is_in_it(tmp_path: Path) -> None:
    converted(MEGATRON, tmp_path / "ds", "deepspeed", no_optimizer=True)
    (tmp_path / "ds" / "mcore_rlhf.json").unlink()
    (tmp_path / "ds" / "global_step2" / STATE).write_text("{")
    source = opened(tmp_path / "ds")
    assert source.origin == {}
    assert any(fate is Fate.LOST and "state.json" in text for fate, text in source.notes.lines)


def test_there_and_back_is_nothing(tmp_path: Path) -> None:
    big = SmallTensor(bytes(range(240)) * 5, FLOAT32, (300,), (1,))
    state = TrainingState(
        3, False, {"a": (1, 2)}, (ParamGroup({"lr": 0.1, "betas": (0.9, 0.95)}, False, ("w",), ("step",)),), {"k": TorchSize([2])},
        None, {"rng": np.arange(624, dtype=np.int64), "big": big, "odd": np.arange(999, dtype=">i4")},
    )  # fmt: skip
    module = ModuleState("step3", ("w", "b"), ("b",), {"alias": "w"}, {"clip_grad": 1.0}, ({"x": 1}, {"x": 2}))
    made = Sidecar.of(state, module, (), {"iteration": 3}, states=("master",), optimizer="zero1")
    texts, lost = made.texts()
    assert (set(texts), lost) == ({STATE, ARRAYS}, [])
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    found = Sidecar.read(tmp_path)
    assert found is not None
    assert same(_plainly(found), _plainly(made))
    assert same(found.state.other, state.other)
    assert found.module == module
    (tmp_path / ARRAYS).unlink()
    with pytest.raises(Corrupt, match="is followed by"):
        Sidecar.read(tmp_path)


def _plainly(sidecar: Sidecar) -> dict[str, object]:
    """Its fields, and those of the state that it holds, whose arrays compare as a whole."""
    of = {"": sidecar, "state": sidecar.state}
    return {
        f"{where}.{item.name}": getattr(one, item.name)
        for where, one in of.items()
        for item in fields(one)
        if item.name != "state"
    }


def test_what_is_wrong_is_named_by_its_key_all_at_once(tmp_path: Path) -> None:
    """Keys of the file are of three parts, of whose names none is a key."""
    wrong = {"values": 3, "groups": [{"fields": {}, "expert": "no"}], "tag": 7, "module": {}, "laid_out": {}}
    (tmp_path / STATE).parent.mkdir()
    (tmp_path / STATE).write_text(json.dumps({"format": "mcore_rlhf.state", "version": 1, **wrong}))
    with pytest.raises(CheckpointError) as refused:
        Sidecar.read(tmp_path)
    said = str(refused.value)
    named = ("values: expected an object", "groups/0/expert: expected", "tag: expected a string")
    assert all(f"state.json: {text}" in said for text in named)
    assert "state.json: unknown fields: laid_out, module" in said


def test_nothing_to_say_is_not_said(tmp_path: Path) -> None:
    texts, _ = Sidecar(origin={"a": 1}).texts("step/")
    (text,) = texts.values()
    assert json.loads(text) == {"format": "mcore_rlhf.state", "version": 1, "origin": {"a": 1}}
    assert list(texts) == [f"step/{STATE}"]
    assert Sidecar.read(tmp_path) is None


def test_no_pickle_lies_in_a_folder_for_serving(tmp_path: Path) -> None:
    converted(MUON, tmp_path / "hf", "hf", with_optimizer=True)
    endings = {path.suffix for path in (tmp_path / "hf").rglob("*") if path.is_file()}
    assert endings == {".json", ".safetensors"}
    assert sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors")) == ["model.safetensors"]
