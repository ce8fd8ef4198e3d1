"""DeepSpeed's Muon, without DeepSpeed: a genuine run, whose momentum is whole on both sides of a border of partitions."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.core.catalog import MASTER, TensorName
from mcore_rlhf.errors import Corrupt, LayoutMismatch, Lossy, Unsupported
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.passes import crossed
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.registry import format_named, open_checkpoint
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.catalog_values import tensor_of
from tests.helpers.deepspeed_goldens import GOLDENS, assembled
from tests.helpers.plain_load import plain_load

ROOT = GOLDENS.parent / "deepspeed_muon" / "z2_bf16_dp2"
MOMENTUM = "momentum_buffer"


def states(source: Source) -> dict[tuple[str, str], torch.Tensor]:
    """Every master and state, whole, under DeepSpeed's name for it."""
    found = {}
    for name in source.catalog:
        entry = source.catalog.get(name)
        if entry is not None and name.state != "param":
            found[name.param, "fp32" if name.state == MASTER else name.state] = assembled(source.root, entry).float()
    return found


def to(target: Path, **write: Any) -> Path:
    options = ConvertOptions(to=write.pop("to", "deepspeed"), write=WriteOptions(**write), fsync=False, workers=1)
    convert(ROOT, target, options)
    return target


def same(found: dict[tuple[str, str], torch.Tensor]) -> bool:
    expected = torch.load(ROOT / "expected.pt", weights_only=True)["state"]
    assert len(expected) == 7 * 3 - 3
    return found.keys() == expected.keys() and all(torch.equal(found[key], value) for key, value in expected.items())


def optimizer(root: Path, rank: int) -> Any:
    tag = (root / "latest").read_text().strip()
    (file,) = (root / tag).glob(f"*zero_pp_rank_{rank}_*optim_states.pt")
    return plain_load(file)["optimizer_state_dict"]


def test_it_is_what_deepspeed_gathered() -> None:
    source = open_checkpoint(ROOT, ReadOptions())
    assert same(states(source))
    assert [group.fields["use_muon"] for group in source.state.groups] == [True, False]
    assert verify(ROOT, ReadOptions(), Depth.DEEP).intact


@pytest.mark.parametrize(("stage", "dp"), [(2, 2), (2, 1), (1, 3), (2, 5), (3, 2), (0, 1)])
def test_any_stage_and_degree_holds_the_same(stage: int, dp: int, tmp_path: Path) -> None:
    assert same(states(open_checkpoint(to(tmp_path / "out", zero_stage=stage, dp=dp), ReadOptions())))


def test_unchanged_it_is_the_genuine_one(tmp_path: Path) -> None:
    out = to(tmp_path / "out")
    for rank in range(2):
        theirs, ours = (optimizer(root, rank)["base_optimizer_state"]["state"] for root in (ROOT, out))
        assert [list(state) for state in ours.values()] == [list(state) for state in theirs.values()]
        assert torch.equal(ours[0][MOMENTUM], theirs[0][MOMENTUM])
        assert ours[0][MOMENTUM].dtype == theirs[0][MOMENTUM].dtype == torch.bfloat16


def test_a_parameter_at_a_border_is_whole_on_both_sides(tmp_path: Path) -> None:
    """Matrices of 732, 240 and 240 elements over three ranks of 404: the first two lie across a border."""
    expected = torch.load(ROOT / "expected.pt", weights_only=True)["state"]
    head, up, down = (
        expected[name, MOMENTUM].flatten() for name in ("head.weight", "model.up.weight", "model.down.weight")
    )
    out = to(tmp_path / "out", dp=3)
    held = [optimizer(out, rank)["base_optimizer_state"]["state"][0][MOMENTUM].float() for rank in range(3)]
    for found, parts in zip(held, ([head], [head, up], [up, down]), strict=True):
        assert torch.equal(found, torch.cat(parts))


@pytest.mark.parametrize("scattered", [True, False])
def test_ranks_did_not_agree_on_it_before_0_19_3(scattered: bool, tmp_path: Path) -> None:
    """With ``reduce_scatter`` only a rank's own elements are the parameter's; they are taken, and that is said."""
    root = copied(tmp_path)
    with edited(root / "global_step2" / "mp_rank_00_model_states.pt") as tree:
        tree["ds_version"] = "0.18.2"
        tree["ds_config"]["zero_optimization"]["reduce_scatter"] = scattered
    for rank, others in enumerate([slice(606, 732), slice(0, 606)]):  # of head.weight, which begins both parts
        with edited(next((root / "global_step2").glob(f"*zero_pp_rank_{rank}_*"))) as tree:
            tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0][MOMENTUM][others] += 1 + rank
    options = ConvertOptions(to="deepspeed", write=WriteOptions(dp=3), fsync=False)
    if not scattered:
        with pytest.raises(Corrupt, match=MOMENTUM):
            convert(root, tmp_path / "out", options)
        return
    job = convert(root, tmp_path / "out", options)
    assert not job.lossless
    assert any(
        "momentum_buffer of 1 parameters at borders" in text and "0.18.2" in text for _, text in job.report.lines
    )
    assert same(states(open_checkpoint(tmp_path / "out", ReadOptions())))
    assert verify(root, ReadOptions(), Depth.DEEP).intact


def test_an_offloaded_run_gets_them_cut_as_all_other_states(tmp_path: Path) -> None:
    root = copied(tmp_path)
    with edited(root / "global_step2" / "mp_rank_00_model_states.pt") as tree:
        tree["ds_config"]["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    job = convert(root, tmp_path / "out", ConvertOptions(to="deepspeed", write=WriteOptions(dp=3), fsync=False))
    assert any("momentum_buffer of DeepSpeed's Muon: cut as all other states" in text for _, text in job.report.lines)
    held = [optimizer(tmp_path / "out", rank)["base_optimizer_state"]["state"][0][MOMENTUM] for rank in range(3)]
    assert [tensor.numel() for tensor in held] == [404, 404, 404]
    assert same(states(open_checkpoint(tmp_path / "out", ReadOptions())))


def test_copies_at_a_border_that_differ_are_damaged(tmp_path: Path) -> None:
    root = copied(to(tmp_path / "three", dp=3).parent, "three")
    (root / "mcore_rlhf.json").unlink()  # the old file's checksums
    with edited(next((root / "global_step2").glob("*zero_pp_rank_1_*"))) as tree:
        tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0][MOMENTUM][7] += 1
    with pytest.raises(Corrupt, match=MOMENTUM):
        convert(root, tmp_path / "out", ConvertOptions(to="deepspeed", fsync=False))


@pytest.mark.parametrize(("group", "state", "kind"), [(0, MOMENTUM, Unsupported), (1, "exp_avg", LayoutMismatch)])
def test_lengths_that_are_not_known_are_no_damage_but_those_that_are_known(
    group: int, state: str, kind: type[Exception], tmp_path: Path
) -> None:
    root = copied(tmp_path)
    with edited(next((root / "global_step2").glob("*zero_pp_rank_1_*"))) as tree:
        held = tree["optimizer_state_dict"]["base_optimizer_state"]["state"][group]
        held[state] = held[state][:-5].clone()
    with pytest.raises(kind, match=f"{state} of the flat group with"):
        open_checkpoint(root, ReadOptions())
    assert states(open_checkpoint(root, ReadOptions(optimizer=False))) == {}


def test_universal_files_have_what_each_parameter_has(tmp_path: Path) -> None:
    zero = next(to(tmp_path / "out", to="universal").glob("*/zero"))
    files = {path.parent.name: sorted(file.stem for file in path.parent.iterdir()) for path in zero.glob("*/fp32.pt")}
    assert files["model.up.weight"] == ["fp32", MOMENTUM]
    assert files["model.up.bias"] == ["exp_avg", "exp_avg_sq", "fp32", "step"]
    source = open_checkpoint(tmp_path / "out", ReadOptions())
    assert same({key: value for key, value in states(source).items() if key[0] not in ("model.shift", "model.count")})
    assert source.catalog.get(TensorName(source.role, "model.up.weight", "exp_avg")) is None
    (zero / "model.up.bias" / "exp_avg.pt").unlink()
    with pytest.raises(Exception, match=r"model\.up\.bias: exp_avg\.pt is missing, which 3 parameters have"):
        open_checkpoint(tmp_path / "out", ReadOptions())


def of_deepspeed(source: Source) -> Source:
    """A run of Megatron's Muon as DeepSpeed's own would be: marks instead of names, and nothing of Megatron's."""
    seen = crossed(source, format_named("universal"), WriteOptions())
    groups = []
    for group in seen.state.groups:
        muon = "momentum" in group.fields
        fields = {
            k: v for k, v in group.fields.items() if k in ("lr", "momentum", "betas", "eps", "weight_decay", "step")
        }
        groups.append(replace(group, fields={**fields, "use_muon": muon}))
    seen.state.groups = tuple(groups)
    return replace(seen, origin={})


def test_megatron_takes_it_with_its_own_muon() -> None:
    """Every state of a genuine run of Megatron's comes back, and what its own run needs beside them."""
    golden = open_checkpoint(GOLDENS.parent / "megatron_0_19" / "muon_tp2_bf16", ReadOptions())
    there = crossed(of_deepspeed(golden), format_named("megatron"), WriteOptions(transformer_impl="local"))
    args = there.state.args
    assert (args["optimizer"], args["use_distributed_optimizer"], args["muon_momentum"]) == ("muon", False, 0.9)
    fields = [group.fields for group in there.state.groups]
    told = {(one.get("optimizer"), one["wd_mult"], "bias_correction" in one) for one in fields}
    assert told == {(None, 1.0, False), ("adam", 1.0, True), ("adam", 0.0, True)}
    assert any("DeepSpeed's Muon of 28 matrices becomes Megatron's" in text for _, text in there.notes.lines)
    names = [name for name in golden.catalog if golden.catalog.get(name) is not None]
    assert {name.state for name in names} == {"param", MASTER, "exp_avg", "exp_avg_sq", MOMENTUM}
    for name in names:
        rows = slice(
            golden.model.vocab_size if name.param.endswith(("word_embeddings.weight", "output_layer.weight")) else None
        )
        assert torch.equal(
            tensor_of(there, name.param, name.state)[rows], tensor_of(golden, name.param, name.state)[rows]
        ), name


@pytest.mark.parametrize(
    ("name", "who"), [("model.norm.weight", "Muon"), ("model.layers.0.mlp.up_proj.weight", "Adam")]
)
def test_who_trains_otherwise_than_megatrons_muon_is_named(name: str, who: str) -> None:
    seen = of_deepspeed(open_checkpoint(GOLDENS.parent / "megatron_0_19" / "muon_tp2_bf16", ReadOptions()))
    muon, *others = seen.state.groups
    of_it, of_others = ([n for n in group.params if n != name] for group in (muon, others[0]))
    (of_it if who == "Muon" else of_others).append(name)
    rest = [replace(one, params=tuple(n for n in one.params if n != name)) for one in others[1:]]
    seen.state.groups = (replace(muon, params=tuple(of_it)), replace(others[0], params=tuple(of_others)), *rest)
    with pytest.raises(Lossy, match=rf"trained by {who} in DeepSpeed"):
        crossed(seen, format_named("megatron"), WriteOptions())
    seen.state.groups = ()
    assert crossed(seen, format_named("megatron"), WriteOptions()).model.params


def copied(folder: Path, name: str = "") -> Path:
    root = folder / "copy"
    shutil.copytree(folder / name if name else ROOT, root)
    return root


@contextmanager
def edited(path: Path) -> Iterator[Any]:
    tree = torch.load(path, weights_only=False)  # a genuine file of our own run
    yield tree
    torch.save(tree, path)
