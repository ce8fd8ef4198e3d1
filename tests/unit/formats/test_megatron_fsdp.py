"""Checkpoints of Megatron-FSDP: against the tensors as torch's own DCP reads them, and what real folders become."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import Job, convert
from mcore_rlhf.core.catalog import MASTER
from mcore_rlhf.core.facts import Fate, Item, Kind
from mcore_rlhf.errors import CheckpointError, Unsupported
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.registry import detect, open_checkpoint
from mcore_rlhf.storage.dcp.writer import Distcp, ObjectItem, dcp_metadata, saved
from mcore_rlhf.storage.stored import Namespace
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.catalog_values import tensor_of
from tests.helpers.conversions import options
from tests.helpers.damage import flip_a_bit
from tests.helpers.dist_reader import read_tensors
from tests.reference.merge import bits_equal

GOLDENS = Path(__file__).parents[2] / "goldens" / "megatron_fsdp"
NAMES = ["dp2_bf16", "ep2_bf16", "tp2dp2_bf16"]


def opened(path: Path) -> Source:
    return open_checkpoint(path, ReadOptions())


def converted(source: Path, target: Path, to: str, **write: Any) -> Job:
    return convert(source, target, replace(options(**write), to=to))


def expected(root: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Every tensor by (parameter, state): the names without wrappers, gate and up as one."""
    found: dict[tuple[str, str], torch.Tensor] = {}
    tensors = read_tensors(root)
    for key in sorted(tensors, reverse=True):  # gate (w) before up (v)
        part, _, name = key.replace("optimizer.state.", "optimizer.").partition(".module.")
        name, state = (name, MASTER) if part == "model" else (name.rpartition(".")[0], name.rpartition(".")[2])
        if part in ("model", "optimizer"):
            name, halved = name.removesuffix("_w").removesuffix("_v"), name[-2:] in ("_w", "_v")
            at = name.replace("module.", ""), state
            found[at] = torch.cat([found[at], tensors[key]]) if halved and at in found else tensors[key]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_state_of_every_parameter_is_there(name: str) -> None:
    source, theirs = opened(GOLDENS / name), expected(GOLDENS / name)
    assert (source.format, source.optimizer, source.states) == (
        "megatron-dist", "distributed", ("master", "exp_avg", "exp_avg_sq")
    )  # fmt: skip
    assert {(found.param, found.state) for found in source.catalog} == set(theirs)
    for (param, state), tensor in theirs.items():
        assert bits_equal(tensor_of(source, param, state), tensor), (param, state)
    assert {spec.dtype.name for spec in source.model.params} == {"bfloat16"}
    assert [group.fields["wd_mult"] for group in source.state.groups] == [1.0, 0.0]
    assert source.state.iteration == source.state.groups[0].fields["step"] == 2
    assert source.state.scheduler is not None
    assert verify(GOLDENS / name, ReadOptions(), Depth.DEEP).intact


@pytest.mark.parametrize("to", ["megatron", "megatron-dist"])
@pytest.mark.parametrize("name", NAMES)
def test_it_becomes_a_checkpoint_that_needs_no_fsdp(name: str, to: str, tmp_path: Path) -> None:
    job = converted(GOLDENS / name, tmp_path / "out", to)
    assert job.lossless, job.account.lost
    assert job.account.entries[Item(Kind.ARGUMENT, "use_megatron_fsdp")].fate is Fate.DERIVED
    target, theirs = opened(tmp_path / "out"), expected(GOLDENS / name)
    for (param, state), tensor in theirs.items():
        assert bits_equal(tensor_of(target, param, state), tensor), (param, state)
        if state == MASTER:
            assert bits_equal(tensor_of(target, param, "param"), tensor.bfloat16()), param
    assert target.parallel == opened(GOLDENS / name).parallel
    assert verify(tmp_path / "out", ReadOptions(), Depth.DEEP).intact


def test_the_weights_alone_are_rounded(tmp_path: Path) -> None:
    converted(GOLDENS / "dp2_bf16", tmp_path / "out", "megatron", no_optimizer=True)
    target = opened(tmp_path / "out")
    assert target.states == ()
    for (param, state), tensor in expected(GOLDENS / "dp2_bf16").items():
        if state == MASTER:
            assert bits_equal(tensor_of(target, param, "param"), tensor.bfloat16()), param


def test_a_damaged_file_is_found(tmp_path: Path) -> None:
    shutil.copytree(GOLDENS / "dp2_bf16", tmp_path / "root")
    file = tmp_path / "root" / "iter_0000002" / "__1_0.distcp"
    flip_a_bit(file)
    assert not verify(tmp_path / "root", ReadOptions(), Depth.DEEP).intact
    with pytest.raises(CheckpointError):
        converted(tmp_path / "root", tmp_path / "out", "megatron")


def test_a_path_without_an_item_is_damage(tmp_path: Path) -> None:
    """A bit that flipped in ``.metadata``, which has no checksum."""
    shutil.copytree(GOLDENS / "tp2dp2_bf16", tmp_path / "root")
    file = tmp_path / "root" / "iter_0000002" / ".metadata"
    data, key = bytearray(file.read_bytes()), b"decoder.layers.1.pre_mlp_layernorm.weight.lr_mult"
    data[data.index(key, data.index(key) + 1)] ^= 4  # the second is that of the paths
    file.write_bytes(data)
    assert (
        "layers.1.pre_mlp_layernorm.weight.lr_mult, and no such item"
        in verify(tmp_path / "root", ReadOptions()).problems.describe()
    )


@pytest.mark.parametrize(
    ("stages", "more", "said"),
    [
        (2, {}, "Megatron-FSDP with several pipeline stages"),
        (
            1,
            {("optimizer", "state", "module.x", "Q_L", "rows"): 1},
            r"1 items of .* not known, such as optimizer\.state\.module\.x",
        ),
        (1, {("model0", "module.x"): 1}, "several pipeline stages or model chunks"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    stages: int, more: dict[tuple[str, ...], object], said: str, tmp_path: Path
) -> None:
    """Made by hand from the code: every stage counts its layers from 0."""
    folder = tmp_path / "iter_0000006"
    folder.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    args, rng = Namespace({"pipeline_model_parallel_size": stages}), ("rng_state", "(0, 0)", 0)
    values: dict[tuple[str | int, ...], object] = {("args",): args, rng: {}, **more}
    paths = {".".join(map(str, path)): path for path in values}
    items = [ObjectItem(name, saved(value, name)) for name, value in zip(paths, values.values(), strict=True)]
    Distcp(items).create(folder / "__0_0.distcp").finish({})
    (folder / ".metadata").write_bytes(dcp_metadata({}, {"__0_0.distcp": items}, paths))
    assert detect(tmp_path).name == "megatron-dist"
    with pytest.raises(Unsupported, match=said):
        opened(tmp_path)
