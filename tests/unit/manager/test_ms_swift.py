"""A step that ms-swift saved: what its own arguments do not say is taken from the description beside them, where that is this model's."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mcore_rlhf.convert import convert
from mcore_rlhf.errors import Unsupported
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import convert_step
from mcore_rlhf.manager.runs import listed_steps
from mcore_rlhf.manager.subject import find
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from tests.helpers.catalog_values import tensor_of

GOLDEN, STEP = Path(__file__).parents[2] / "goldens" / "trainers" / "swift", "checkpoint-4"
UNSAID = "the stored args do not say the model's sizes"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "run"))


def described(root: Path, **fields: object) -> None:
    config = root / STEP / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))


def said(root: Path) -> list[str]:
    return [text for _, text in open_checkpoint(root / STEP, ReadOptions()).notes.lines if text.startswith(UNSAID)]


def test_it_is_a_run_whose_description_says_the_sizes(root: Path, tmp_path: Path) -> None:
    assert [step.step for step in listed_steps(root)] == [4]
    args = open_checkpoint(root / STEP, ReadOptions()).state.args
    assert [args[name] for name in ("num_layers", "num_query_groups", "vocab_size")] == [2, 2, 64]
    assert args["tuner_type"] == "full"
    convert(root / STEP, tmp_path / "hf", ConvertOptions(to="hf", fsync=False))
    given = WriteOptions(reference_config=str(root / STEP))
    (root / STEP / "args.json").unlink()  # as if nobody had left a description
    convert(root / STEP, tmp_path / "given", ConvertOptions(to="hf", fsync=False, write=given))
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (
        tmp_path / "given" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"num_hidden_layers": 3}, "layer"), ({"num_key_value_heads": 10**9}, ""),
        ({"model_type": "none", "architectures": ["None"]}, "none"),
        ({"hidden_act": "relu6"}, "relu6"),
    ],
    ids=["layers", "heads", "type", "activation"],
)  # fmt: skip
def test_a_description_of_another_model_is_not_taken(root: Path, fields: dict[str, object], why: str) -> None:
    described(root, **fields)
    (note,) = said(root)
    assert "is none that is taken" in note
    assert why in note
    assert "num_layers" not in open_checkpoint(root / STEP, ReadOptions()).state.args


def test_what_lies_beside_several_iterations_belongs_to_none(root: Path) -> None:
    shutil.copytree(root / STEP / "iter_0000004", root / STEP / "iter_0000008")
    found = open_checkpoint(root / STEP, ReadOptions())
    assert found.carried is None
    assert "num_layers" not in found.state.args


def test_there_and_back_on_other_ranks(root: Path, tmp_path: Path) -> None:
    for source, target, tp in ((root, tmp_path / "two", 2), (tmp_path / "two", tmp_path / "back", 1)):
        convert_step(
            find(source, ReadOptions()), target, ConvertOptions(to="ms-swift", fsync=False, write=WriteOptions(tp=tp))
        )
    first, back = open_checkpoint(root / STEP, ReadOptions()), open_checkpoint(tmp_path / "back" / STEP, ReadOptions())
    assert first.state.args["consumed_train_samples"] == back.state.args["consumed_train_samples"] == 16
    for name in first.catalog:
        assert tensor_of(first, name.param, name.state).equal(tensor_of(back, name.param, name.state)), name


def test_it_begins_anew_unless_told_otherwise() -> None:
    loader = loader_named("ms-swift")[0]
    for settings, outcome in (({}, Outcome.ANEW), ({"finetune": False}, Outcome.RESTORED)):
        (prospects,) = forecast(GOLDEN, loader, Settings(settings)).roles.values()
        assert {one.thing: one.row.outcome for one in prospects}[Thing.OPTIMIZER] is outcome


def test_an_adapter_in_torch_dist_is_told_from_a_model_with_gaps(root: Path) -> None:
    file = root / STEP / "iter_0000004" / ".metadata"
    found = pickle.loads(file.read_bytes())
    kept = {
        name: name.replace("weight", "lora_B.default.weight")
        for name in found.state_dict_metadata
        if name.endswith("linear_fc1.weight")
    }
    others = {name: name for name in found.state_dict_metadata if name.startswith("common_state")}
    names = kept | others
    found.state_dict_metadata = {names[name]: what for name, what in found.state_dict_metadata.items() if name in names}
    found.storage_data = {
        replace(index, fqn=names[index.fqn]): where for index, where in found.storage_data.items() if index.fqn in names
    }
    file.write_bytes(pickle.dumps(found))
    with pytest.raises(Unsupported, match=r"an adapter alone.*lora_B"):
        open_checkpoint(root / STEP, ReadOptions(optimizer=False))
