"""Writing torch_dist: against genuine checkpoints of the same run, read by torch's own DCP, and back to the legacy format."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rlhf.convert import Job, convert
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import LayoutMismatch, Unsupported, UsageError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.models.spec import ParamRule, Rules
from mcore_rlhf.storage.dcp.folder import DcpFolder
from tests.helpers.conversions import GOLDENS, NAMES, golden, options
from tests.helpers.damage import edited
from tests.helpers.dist_reader import DistReading, read_whole
from tests.helpers.independent_reader import differences, read

DIST = GOLDENS.parent / "megatron_dist"
FULLY, BUCKETS, LEGACY = (
    DIST / "tp2pp2dp2_fully_reshardable",
    DIST / "tp2pp2dp2_dp_reshardable",
    GOLDENS / "tp2pp2dp2_bf16_do",
)
OF_THE_RUN = ("args", "content_metadata")


genuine = cache(read_whole)
"""A golden as torch reads it, once."""


def converted(source: Path, target: Path, to: str = "megatron-dist", **write: Any) -> Job:
    return convert(source, target, replace(options(**write), to=to))


def same(a: Any, b: Any) -> bool:
    """Whether two nests of values are equal, arrays and tensors as a whole."""
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)


def assert_equal(ours: DistReading, theirs: DistReading) -> None:
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert [key for key in theirs.tensors if not same(ours.tensors[key], theirs.tensors[key])] == []
    assert ours.objects.keys() == theirs.objects.keys()
    assert [key for key in theirs.objects if not same(ours.objects[key], theirs.objects[key])] == []
    common = {key: value for key, value in theirs.common.items() if key not in OF_THE_RUN}
    assert same({key: value for key, value in ours.common.items() if key not in OF_THE_RUN}, common)


@pytest.mark.parametrize("source", [FULLY, BUCKETS, LEGACY], ids=["fully", "buckets", "legacy"])
def test_it_is_what_megatron_itself_wrote_of_the_same_run(source: Path, tmp_path: Path) -> None:
    """Key by key, random states and all, whichever of the run's three checkpoints it is made of."""
    job = converted(source, tmp_path / "target")
    assert job.lossless
    ours, expected = read_whole(tmp_path / "target"), genuine(FULLY)
    assert_equal(ours, expected)
    assert ours.common["content_metadata"] == expected.common["content_metadata"]
    args, theirs = vars(ours.common["args"]), vars(expected.common["args"])
    wrong = {key for key in theirs if args.get(key) != theirs[key]} - {"save", "dump"}
    assert wrong <= {"ckpt_fully_parallel_save"}, {key: (args.get(key), theirs[key]) for key in wrong}


@pytest.mark.parametrize("source", [FULLY, BUCKETS, LEGACY], ids=["fully", "buckets", "legacy"])
def test_its_flat_buckets_are_what_megatron_itself_wrote(source: Path, tmp_path: Path) -> None:
    """Key by key and to the last gap, with what each data-parallel group keeps beside them."""
    job = converted(source, tmp_path / "target", optimizer_sharding="dp_reshardable")
    assert job.lossless
    ours, expected = read_whole(tmp_path / "target"), genuine(BUCKETS)
    assert_equal(ours, expected)
    assert ours.common["content_metadata"] == expected.common["content_metadata"]
    assert vars(ours.common["args"])["dist_ckpt_optim_fully_reshardable"] is False
    said = [text for _, text in job.report.lines if "dp_reshardable" in text]
    assert ("fully_reshardable → dp_reshardable" in said[0]) == (source == FULLY)


def test_the_flat_buckets_of_experts_are_chained(tmp_path: Path) -> None:
    converted(DIST / "experts_ep2", tmp_path / "target", optimizer_sharding="dp_reshardable")
    ours, expected = read_whole(tmp_path / "target"), genuine(DIST / "experts_ep2")
    assert ours.tensors.keys() == expected.tensors.keys()
    experts = [
        key for key in expected.tensors if key.startswith("chained_1")
    ]  # the dense ones have gaps that were never filled
    assert len(experts) == 6
    assert [key for key in experts if not same(ours.tensors[key], expected.tensors[key])] == []
    assert [key for key in expected.objects if not same(ours.objects[key], expected.objects[key])] == []


@pytest.mark.parametrize(
    ("write", "error", "text"),
    [
        ({"optimizer": "plain"}, UsageError, "the target's optimizer is plain"),
        ({"no_optimizer": True}, UsageError, "the target's optimizer is None"),
        ({"tp": 1, "pp": 4, "dp": 512}, LayoutMismatch, r"512 ranks share it, and \d+ of them would hold no parameter"),
    ],
)
def test_flat_buckets_that_megatron_would_not_take(
    write: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=text):
        converted(LEGACY, tmp_path / "target", optimizer_sharding="dp_reshardable", **write)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("name", ["plain_tp2", "experts_ep2"])
def test_other_kinds_of_optimizer(name: str, tmp_path: Path) -> None:
    converted(DIST / name, tmp_path / "target")
    ours, expected = read_whole(tmp_path / "target"), genuine(DIST / name)
    if name == "plain_tp2":
        assert_equal(ours, expected)
        return
    experts = ours.tensors["optimizer.state.param.decoder.layers.mlp.experts.experts.linear_fc2.weight"]
    assert torch.equal(experts.bfloat16(), expected.tensors["decoder.layers.mlp.experts.experts.linear_fc2.weight"])
    shared = {"rng_state/shard_0.0_1.1"}  # as 0.17 and later look for it
    assert set(ours.objects) == {key for key in expected.objects if "dp_group_idx" not in key} | shared
    assert list(ours.common["optimizer"]) == [0, 1]
    assert ours.common["optimizer"][1]["param_state_sharding_type"] == "fully_reshardable"


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_again(name: str, tmp_path: Path) -> None:
    """legacy → torch_dist → legacy, with the independent reader: every tensor, the order of keys, what belongs to a rank."""
    converted(GOLDENS / name, tmp_path / "dist")
    converted(tmp_path / "dist", tmp_path / "back", to="megatron")
    before, after = golden(name), read(tmp_path / "back")
    assert differences(before, after) == []
    for old, new in zip(before.ranks, after.ranks, strict=True):
        assert [list(chunk) for chunk in new.chunks()] == [list(chunk) for chunk in old.chunks()]
        for key in ("rng_state", "opt_param_scheduler", "iteration", "checkpoint_version"):
            assert same(new.model[key], old.model[key]), key
        if old.distrib is not None:
            assert same(new.distrib, old.distrib)


def test_several_files_share_the_bytes_and_chunks_are_those_of_ranks(tmp_path: Path) -> None:
    job = converted(LEGACY, tmp_path / "target", tp=4, pp=1)
    folder = tmp_path / "target" / "iter_0000002"
    files = sorted(folder.glob("*.distcp"))
    assert len(files) >= 8
    assert max(path.stat().st_size for path in files) < 400_000
    opened = DcpFolder.open(folder, folder)
    fc1 = opened.tensors["decoder.layers.mlp.linear_fc1.weight"]
    assert fc1.global_shape == (4, 192, 64)
    assert {box.shape for box in fc1.boxes} == {(1, 24, 64)}
    assert len(opened.tensors["decoder.final_layernorm.weight"].boxes) == 1
    assert (folder.parent / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert b"/tmp" not in (folder / ".metadata").read_bytes()
    assert str(job.target.parallel) == "TP4×PP1×DP2"
    assert [key for key in opened.objects if key.startswith("rng_state")] == [
        f"rng_state/shard_0.{tp}_1.4" for tp in range(4)
    ]


def test_vocabulary_rows_follow_the_tensor_parallel_degree(tmp_path: Path) -> None:
    converted(FULLY, tmp_path / "target", tp=1)
    whole, old = read_whole(tmp_path / "target"), genuine(FULLY)
    key = "optimizer.state.exp_avg.output_layer.weight"
    assert whole.tensors[key].shape == (144, 64)
    assert torch.equal(whole.tensors[key], old.tensors[key][:144])
    assert whole.common["args"].padded_vocab_size == 144


def test_arguments_are_those_of_the_format(tmp_path: Path) -> None:
    converted(LEGACY, tmp_path / "dist", tp=1, pp=1)
    args = read_whole(tmp_path / "dist").common["args"]
    assert (args.ckpt_format, args.use_dist_ckpt, args.dist_ckpt_optim_fully_reshardable) == ("torch_dist", True, True)
    assert (args.tensor_model_parallel_size, args.data_parallel_size, args.rank) == (1, 8, 0)
    converted(tmp_path / "dist", tmp_path / "legacy", to="megatron")
    assert read(tmp_path / "legacy").args.ckpt_format == "torch"


def test_random_states(tmp_path: Path) -> None:
    source = DIST / "plain_tp2"
    old = genuine(source).objects
    for how in ("keep", "derive", "drop"):
        job = converted(source, tmp_path / how, rng=how)
        new = read_whole(tmp_path / how).objects
        for rank in ("0.0", "0.1"):
            key = f"rng_state/shard_{rank}_1.2"
            assert same(new[key], old[key]) == (how == "keep")
            assert set(new[key][0][0]["rng_tracker_states"]) == set(old[key][0][0]["rng_tracker_states"])
        fates = {"keep": Fate.KEPT, "derive": Fate.DERIVED, "drop": Fate.LOST}
        assert any(fate is fates[how] and "RNG states" in text for fate, text in job.report.lines)
    with pytest.raises(UsageError, match="--rng keep"):
        converted(source, tmp_path / "other", rng="keep", tp=1)


def test_experts_have_random_states_for_every_data_parallel_rank(tmp_path: Path) -> None:
    source = DIST / "experts_ep2"
    converted(source, tmp_path / "kept")
    old, new = read_whole(source).objects, read_whole(tmp_path / "kept").objects
    keys = {f"rng_state/shard_0.0.{rank}_1.1.2" for rank in range(2)}
    assert keys <= new.keys()
    assert all(same(old[key], new[key]) for key in keys)
    converted(source, tmp_path / "ep1", ep=1)
    merged = read_whole(tmp_path / "ep1")
    assert [key for key in merged.objects if key.startswith("rng_state")] == ["rng_state/shard_0.0_1.1"]
    assert [group["wd_mult"] for group in merged.common["optimizer"]["optimizer"]["param_groups"]] == [1.0, 0.0]


def test_another_kind_of_optimizer(tmp_path: Path) -> None:
    source = DIST / "plain_tp2"
    converted(source, tmp_path / "flat", optimizer="distributed")
    flat, old = read_whole(tmp_path / "flat"), genuine(source)
    name = "decoder.layers.mlp.linear_fc2.weight"
    assert same(flat.tensors[f"optimizer.state.param.{name}"], old.tensors[f"optimizer.state.fp32_param.{name}"])
    assert flat.common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert list(flat.common["optimizer"]) == ["optimizer", "param_state_sharding_type"]
    converted(tmp_path / "flat", tmp_path / "back", optimizer="plain")
    assert_equal(read_whole(tmp_path / "back"), old)


def test_without_the_optimizer(tmp_path: Path) -> None:
    job = converted(FULLY, tmp_path / "weights", no_optimizer=True)
    weights = read_whole(tmp_path / "weights")
    assert not any(key.startswith("optimizer") for key in weights.tensors)
    assert "optimizer" not in weights.common
    assert weights.common["args"].no_save_optim
    assert not job.lossless


def test_another_type_of_parameters(tmp_path: Path) -> None:
    converted(FULLY, tmp_path / "fp32", dtype="fp32")
    fp32, old = read_whole(tmp_path / "fp32"), genuine(FULLY)
    for name in ("decoder.layers.mlp.linear_fc2.weight", "output_layer.weight"):
        assert same(fp32.tensors[name], old.tensors[f"optimizer.state.param.{name}"])


def test_what_the_new_degrees_cannot_cut_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutMismatch, match="--tp 3"):
        converted(FULLY, tmp_path / "target", tp=3)
    assert not (tmp_path / "target").exists()


def test_a_release_has_no_iteration(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copytree(FULLY / "iter_0000002", source / "release")
    (source / "latest_checkpointed_iteration.txt").write_text("release")
    converted(source, tmp_path / "target")
    assert (tmp_path / "target" / "release" / ".metadata").is_file()
    assert (tmp_path / "target" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert open_checkpoint(tmp_path / "target", ReadOptions()).state.release


@pytest.fixture(scope="module")
def reshardable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture whose optimizer does not lie in buckets."""
    target = tmp_path_factory.mktemp("experts") / "target"
    converted(DIST / "experts_ep2", target)
    return target


MODULES = [
    ({"transformer_impl": "transformer_engine", "moe_grouped_gemm": True}, "linear_fc1.weight{e}"),
    ({"transformer_impl": "local", "moe_grouped_gemm": True}, "weight1"),
    ({"transformer_impl": "transformer_engine"}, "local_experts.{e}.linear_fc1.weight"),
]


@pytest.mark.parametrize(("values", "name"), MODULES, ids=["grouped", "packed", "sequential"])
def test_keys_do_not_depend_on_the_module_that_holds_the_experts(
    values: dict[str, object], name: str, reshardable: Path, tmp_path: Path
) -> None:
    """The same files, read as those of a model with another kind of experts: its own names, and the same keys again."""
    shutil.copytree(reshardable, tmp_path / "first")
    with edited(tmp_path / "first" / "iter_0000002" / "common.pt") as tree:
        vars(tree["args"]).update(values)
    (tmp_path / "first" / "mcore_rlhf.json").unlink()  # the old file's checksums
    converted(tmp_path / "first", tmp_path / "second", ep=4, dp=4)
    before, after = read_whole(tmp_path / "first"), read_whole(tmp_path / "second")
    assert before.tensors.keys() == after.tensors.keys()
    assert all(same(before.tensors[key], after.tensors[key]) for key in before.tensors)
    extra = {key for key in before.objects if "_extra_state" in key}
    assert extra == {key for key in after.objects if "_extra_state" in key}
    converted(tmp_path / "second", tmp_path / "legacy", to="megatron", ep=2, dp=2)
    rank = read(tmp_path / "legacy").ranks[1]
    held = rank.model["model"][
        "decoder.layers.1.mlp.experts." + name.format(e=1)
    ]  # expert 3 of 4, the second of its rank
    stored = before.tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"][1, 3]
    packed = held.view(2, 16, -1)[1].T if name == "weight1" else held
    assert torch.equal(packed, stored)


def test_fused_latent_projections_are_refused_by_name(tmp_path: Path) -> None:
    """Megatron looks for the two that they are made of, and would end with a missing key."""
    name = "decoder.layers.0.self_attention.linear_qkv_down_proj.weight"
    source = Path(shutil.copytree(GOLDENS / "tp2pp2dp2_bf16_nodo", tmp_path / "source"))
    for rank in (0, 1):
        with edited(source / f"iter_0000002/mp_rank_{rank:02}_000/model_optim_rng.pt") as tree:
            vars(tree["args"]).update(q_lora_rank=8, kv_lora_rank=8, qk_pos_emb_head_dim=4, no_save_optim=True)
            tree["model"][name] = torch.zeros(10, 64, dtype=torch.bfloat16)
            del tree["optimizer"]
    for rank in (0, 1):
        with edited(source / f"iter_0000002/mp_rank_{rank:02}_001/model_optim_rng.pt") as tree:
            vars(tree["args"]).update(no_save_optim=True)
            del tree["optimizer"]
    with pytest.raises(Unsupported, match=f"{name}: torch_dist has what --mla-down-proj-fusion joins"):
        converted(source, tmp_path / "target")


def test_layers_have_keys_of_their_own_where_some_are_not_trained(tmp_path: Path) -> None:
    """Megatron-core 0.19.2 ends such a save with "Invalid access pattern"; a folder with holes it would not load, nor would we."""
    source = Path(shutil.copytree(GOLDENS / "tp2pp2dp2_bf16_nodo", tmp_path / "source"))
    frozen = "decoder.layers.1.mlp.linear_fc2.weight"
    for rank in (0, 1):
        with edited(source / f"iter_0000002/mp_rank_{rank:02}_000/model_optim_rng.pt") as tree:
            matrices = [
                name for name, value in tree["model"].items() if isinstance(value, torch.Tensor) and value.dim() > 1
            ]
            at, inner = matrices.index(frozen), tree["optimizer"]["optimizer"]
            inner["state"] = {n - (n > at): state for n, state in inner["state"].items() if n != at}
            for group in inner["param_groups"]:
                group["params"] = [n - (n > at) for n in group["params"] if n != at]
            del tree["optimizer"]["fp32_from_fp16_params"][0][at]
    read = ReadOptions(rules=Rules((ParamRule(frozen, trainable=False),)))
    job = convert(source, tmp_path / "target", replace(options(), to="megatron-dist", read=read))
    assert [text for fate, text in job.report.lines if fate is Fate.NOTE and "(non_homogeneous_layers)" in text]
    found = open_checkpoint(tmp_path / "target", ReadOptions())
    assert [spec.name for spec in found.model.params if not spec.trainable] == [frozen]
    stored = read_whole(tmp_path / "target")
    assert {frozen, f"optimizer.state.exp_avg.{frozen.replace('1', '0', 1)}"} <= stored.tensors.keys()
    assert f"optimizer.state.exp_avg.{frozen}" not in stored.tensors
    assert (stored.common["content_metadata"]["non_homogeneous_layers"], job.lossless) == (True, True)
    convert(source, tmp_path / "legacy", replace(options(tp=1, pp=1), read=read))
    flat = options(optimizer="distributed", optimizer_sharding="dp_reshardable")
    job = convert(source, tmp_path / "flat", replace(flat, to="megatron-dist", read=read))
    assert [text for fate, text in job.report.lines if fate is Fate.NOTE and f"that they are {frozen}" in text]
    for how in (read, ReadOptions()):  # told, and found by the values
        found = open_checkpoint(tmp_path / "flat", how)
        assert [spec.name for spec in found.model.params if not spec.trainable] == [frozen]


@pytest.mark.parametrize("what", ["that has not stepped yet", "of fp32 and half parameters"])
def test_a_plain_optimizer_that_megatron_loads_from_no_torch_dist_is_told(what: str, tmp_path: Path) -> None:
    source = Path(shutil.copytree(GOLDENS / "tp2pp2dp2_bf16_nodo", tmp_path / "source"))
    norm = "decoder.final_layernorm.weight"
    for file in source.rglob("model_optim_rng.pt"):
        with edited(file) as tree:
            if "stepped" in what:
                tree["iteration"] = tree["args"].iteration = 0
                tree["optimizer"]["optimizer"]["state"] = {}
            elif norm in tree["model"]:
                vectors = [name for name, value in tree["model"].items() if getattr(value, "ndim", 0) == 1]
                tree["model"][norm] = tree["model"][norm].float()
                del tree["optimizer"]["fp32_from_fp16_params"][1][vectors.index(norm)]
    if "stepped" in what:
        (source / "iter_0000002").rename(source / "iter_0000000")
        (source / "latest_checkpointed_iteration.txt").write_text("0")
    told = converted(source, tmp_path / "target").report.lines
    assert [text for fate, text in told if fate is Fate.NOTE and text.startswith(f"a plain optimizer {what}")]
