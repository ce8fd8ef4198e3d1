"""Checkpoints of Megatron with torch's FSDP2 (``--ckpt-format torch_dcp``): against the tensors as torch's own DCP reads them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import Job, convert
from mcore_rlhf.core.catalog import MASTER, PARAM
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import Incomplete, Unsupported
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.megatron_dist import torch_dcp
from mcore_rlhf.formats.registry import detect, open_checkpoint
from mcore_rlhf.models.spec import ParamRule, Rules
from mcore_rlhf.storage.dcp.folder import DcpFolder
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.catalog_values import tensor_of
from tests.helpers.conversions import options
from tests.helpers.dist_reader import read_tensors
from tests.reference.merge import bits_equal

GOLDEN = Path(__file__).parents[2] / "goldens" / "megatron_torch_dcp" / "dp2_bf16"


def converted(source: Path, target: Path, to: str, **write: Any) -> Job:
    return convert(source, target, replace(options(**write), to=to))


def test_every_state_is_the_parameters(tmp_path: Path) -> None:
    """Moments by their numbers, masters by group: a parameter is its master, rounded, so that no two were taken for one another."""
    source = open_checkpoint(GOLDEN, ReadOptions())
    stored = read_tensors(GOLDEN)
    assert (source.format, source.optimizer, str(source.parallel)) == ("megatron-dist", "plain", "TP1×PP1×DP2")
    assert set(source.states) == {"master", "exp_avg", "exp_avg_sq"}
    group = [spec.name for spec in source.model.params if len(spec.global_shape) == 2]
    group += [spec.name for spec in source.model.params if len(spec.global_shape) == 1]
    for number, name in enumerate(group):
        parameter = tensor_of(source, name, PARAM)
        assert bits_equal(parameter, stored[f"model.{name}"])
        assert bits_equal(tensor_of(source, name, MASTER).to(torch.bfloat16), parameter)
        for state in ("exp_avg", "exp_avg_sq"):
            assert bits_equal(tensor_of(source, name, state), stored[f"optimizer.optimizer.state.{number}.{state}"])
    assert verify(GOLDEN, ReadOptions(), Depth.DEEP).intact


@pytest.mark.parametrize("to", ["megatron", "megatron-dist"])
def test_it_becomes_megatrons_other_formats_without_a_loss(to: str, tmp_path: Path) -> None:
    job = converted(GOLDEN, tmp_path / "out", to, tp=2)
    assert job.lossless, job.account.lost
    assert not job.account.unaccounted


def test_a_hugging_face_folder_has_hugging_faces_names(tmp_path: Path) -> None:
    job = converted(GOLDEN, tmp_path / "out", "hf", vocab_size=132)
    assert all(
        name.startswith(("model.layers.", "model.embed", "model.norm", "lm_head"))
        for name in read_safetensors(tmp_path / "out")
    )
    assert any("--with-optimizer keeps it" in text for text in job.account.lost)
    assert (tmp_path / "out" / "config.json").is_file()


def read_safetensors(folder: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


def test_a_renamed_folder_and_a_release_are_found(tmp_path: Path) -> None:
    shutil.copytree(next(GOLDEN.glob("iter_*")), tmp_path / "release")
    assert detect(tmp_path / "release").name == "megatron-dist"


def test_a_path_without_an_item_is_damage(tmp_path: Path) -> None:
    """A bit that flipped in ``.metadata``, which has no checksum."""
    shutil.copytree(GOLDEN, tmp_path / "root")
    file = tmp_path / "root" / "iter_0000002" / ".metadata"
    data, key = bytearray(file.read_bytes()), b"model.output_layer.weight"
    data[data.index(key) + 1] ^= 4
    file.write_bytes(data)
    assert "output_layer.weight" in (said := verify(tmp_path / "root", ReadOptions()).problems.describe())
    assert "Unforeseen" not in said


def test_items_that_nobody_knows_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = DcpFolder.open(next(GOLDEN.glob("iter_*")), GOLDEN, ())
    for path, what in (
        (("model", "a", "b"), "model"),
        (("optimizer", "hessian", 0), "optimizer"),
        (("model1", "x"), "model"),
    ):
        assert not torch_dcp._is_known(path, True), what
    assert all(torch_dcp._is_known(path, fqn in folder.tensors) for fqn, path in folder.planner_data.items())


@pytest.mark.parametrize(
    ("gone", "error", "words"),
    [
        (
            "optimizer.fp32_from_fp16_params.0.3",
            Incomplete,
            "fp32_from_fp16_params of decoder.layers.0.mlp.linear_fc1.weight is missing",
        ),
        (
            "model.decoder.final_layernorm.weight",
            Unsupported,
            "param group 1 has 5 parameters, and names and shapes make 4",
        ),
    ],
)
def test_an_optimizer_that_does_not_fit_is_told(
    gone: str, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = DcpFolder.open

    def without(*args: Any, **kwargs: Any) -> DcpFolder:
        folder = opening(*args, **kwargs)
        del folder.tensors[gone], folder.planner_data[gone]
        return folder

    monkeypatch.setattr(DcpFolder, "open", without)
    with pytest.raises(error, match=words):
        open_checkpoint(GOLDEN, ReadOptions())
    with pytest.raises(error, match="--no-optimizer"):
        open_checkpoint(GOLDEN, ReadOptions())
    if gone.startswith("model."):
        with pytest.raises(Incomplete, match=f"{gone.removeprefix('model.')} is missing"):
            open_checkpoint(GOLDEN, ReadOptions(optimizer=False))
    else:
        assert open_checkpoint(GOLDEN, ReadOptions(optimizer=False)).states == ()


def test_rules_say_which_parameters_were_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run that did not train its output layer, the last matrix of the first group."""
    opening, reading, head = DcpFolder.open, torch_dcp.item_value, "output_layer.weight"

    def without(*args: Any, **kwargs: Any) -> DcpFolder:
        folder = opening(*args, **kwargs)
        gone = ("optimizer.optimizer.state.9.", "optimizer.fp32_from_fp16_params.0.9")
        for held in (folder.planner_data, folder.tensors, folder.objects):
            for key in [key for key in held if key.startswith(gone)]:
                del held[key]
        return folder

    def shorter(dcp: DcpFolder, fqn: str) -> object:
        value = reading(dcp, fqn)
        return value[:-1] if isinstance(value, list) and fqn.endswith("param_groups.0.params") else value

    monkeypatch.setattr(DcpFolder, "open", without)
    monkeypatch.setattr(torch_dcp, "item_value", shorter)
    with pytest.raises(
        Unsupported, match=r"has 9 parameters, and names and shapes make 10.*\n.*'trainable: false' in --rules"
    ):
        open_checkpoint(GOLDEN, ReadOptions())
    source = open_checkpoint(GOLDEN, ReadOptions(rules=Rules((ParamRule(head, trainable=False),))))
    assert [spec.name for spec in source.model.params if not spec.trainable] == [head]
    assert all(
        bits_equal(tensor_of(source, spec.name, MASTER).to(torch.bfloat16), tensor_of(source, spec.name, PARAM))
        for spec in source.model.params
        if spec.trainable
    )


def test_the_arguments_say_no_fsdp_after(tmp_path: Path) -> None:
    job = converted(GOLDEN, tmp_path / "out", "megatron-dist")
    args = open_checkpoint(tmp_path / "out", ReadOptions()).state.args
    assert (args["use_torch_fsdp2"], args["ckpt_format"]) == (False, "torch_dist")
    assert not [said for said in job.account.entries.values() if said.fate is Fate.LOST]
