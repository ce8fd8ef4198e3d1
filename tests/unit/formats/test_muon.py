"""Megatron's Muon with Adam beside it, plain and layer-wise, against what torch's own DCP reader finds in the same run's ``torch_dist``."""

from __future__ import annotations

import operator
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.convert import convert
from mcore_rlhf.core.catalog import BFLOAT16, EXP_AVG, EXP_AVG_SQ, MASTER
from mcore_rlhf.errors import Incomplete, Lossy, Unsupported
from mcore_rlhf.families.megatron.arguments import Arguments
from mcore_rlhf.families.megatron.dealing import Dealing
from mcore_rlhf.families.megatron.groups import ChainedOptimizer, LocalParam, Membership
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.formats.megatron.writer import megatron_target
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.layouts.tensor import Shard
from mcore_rlhf.models.spec import Rules
from tests.helpers.catalog_values import tensor_of
from tests.helpers.conversions import GOLDENS, Conversions, options
from tests.helpers.damage import edit_args
from tests.helpers.dist_reader import check_every_state, read_tensors, states_of
from tests.helpers.plain_load import plain_load

GENUINE = GOLDENS.parent / "megatron_0_19"
RUNS = ("muon_tp2_bf16", "muon_pingpong_dp2_bf16")
MOMENTUM = "momentum_buffer"


@pytest.mark.parametrize("run", RUNS)
def test_every_state_is_that_of_the_same_run_in_torch_dist(run: str) -> None:
    check_every_state(open_checkpoint(GENUINE / run, ReadOptions()), states_of(GENUINE / f"dist_{run}"))


@pytest.mark.parametrize("run", RUNS)
def test_who_trains_what_is_in_the_catalogue(run: str) -> None:
    source = open_checkpoint(GENUINE / run, ReadOptions())
    states: dict[str, set[str]] = {}
    for name in source.catalog:
        states.setdefault(name.param, set()).add(name.state)
    muon, adam = {"param", MASTER, MOMENTUM}, {"param", MASTER, EXP_AVG, EXP_AVG_SQ}
    assert states.pop("embedding.word_embeddings.weight") == states.pop("output_layer.weight") == adam
    assert all(own == (adam if "norm" in name else muon) for name, own in states.items())
    assert [group.fields.get("optimizer") for group in source.state.groups] == [None, "adam", "adam"]
    assert [group.fields.get("step") for group in source.state.groups] == [None, 6, 6]


def test_what_was_dealt_by_size_stays_so_whatever_the_arguments_say(tmp_path: Path) -> None:
    """Runs of ``pretrain_gpt.py`` deal by size, and store ``use_layer_wise_param_layout`` as true; 0.19.2 looks for ``fp32_param``.

    Its own folder of such a run has the same keys; there, what is the default is said.
    """
    root = Path(shutil.copytree(GENUINE / "muon_pingpong_dp2_bf16", tmp_path / "root"))
    edit_args(root, use_layer_wise_param_layout=True)
    convert(root, tmp_path / "dist", replace(options(), to="megatron-dist"))
    keys, theirs = (
        {key.removeprefix("chained_0.").removeprefix("chained_1.") for key in read_tensors(path)}
        for path in (tmp_path / "dist", GENUINE / "dist_muon_pingpong_dp2_bf16")
    )
    assert keys == theirs
    convert(tmp_path / "dist", tmp_path / "again", replace(options(), to="megatron-dist"))
    assert keys == set(read_tensors(tmp_path / "again"))
    assert open_checkpoint(tmp_path / "again", ReadOptions()).state.args["use_layer_wise_param_layout"] is False


@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_ranks_file_it_is_said_what_is_lost(tmp_path: Path, rank: int) -> None:
    """The model file looks complete, with the states of one rank."""
    root = tmp_path / "root"
    shutil.copytree(GENUINE / "muon_pingpong_dp2_bf16", root)
    (root / f"iter_0000006/mp_rank_00/layer_wise_optimizer_{rank}.pt").unlink()
    with pytest.raises(Incomplete, match=rf"(?s)layer_wise_optimizer_{rank}\.pt.*1 of 2.*lost.*--no-optimizer"):
        open_checkpoint(root, ReadOptions())
    assert open_checkpoint(root, ReadOptions(optimizer=False)).optimizer is None


def test_files_of_another_dealing_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(GENUINE / "muon_pingpong_dp2_bf16", root)
    folder = root / "iter_0000006/mp_rank_00"
    first, second = (folder / f"layer_wise_optimizer_{rank}.pt" for rank in (0, 1))
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)
    with pytest.raises(Unsupported, match=r"param group 0 has \d+ parameters"):
        open_checkpoint(root, ReadOptions())


@pytest.mark.parametrize(("name", "rows"), [("L", False), ("moment2_buffer", True)])
def test_states_of_whole_matrices_are_named(tmp_path: Path, name: str, rows: bool) -> None:
    """Soap's factors also where they are shaped like their matrix; normuon's second moment has one column."""
    root = tmp_path / "root"
    shutil.copytree(GENUINE / "muon_pingpong_dp2_bf16", root)
    for file in root.rglob("layer_wise_optimizer_*.pt"):
        members = torch.load(file, weights_only=True)
        for state in members[0]["optimizer"]["state"].values():
            state[name] = state[MOMENTUM][:, :1].clone() if rows else state[MOMENTUM].clone()
        torch.save(members, file)
    with pytest.raises(Lossy, match=rf"{name} \(\d+, \d+\) of decoder\..*(?s:.*)at the layout that was saved"):
        open_checkpoint(root, ReadOptions())


def test_written_at_its_own_layout_it_is_megatrons_own_file(conversions: Conversions, tmp_path: Path) -> None:
    """Whatever stands in the optimizers' dictionaries, in its order: of both kinds, and of every rank."""
    for run in RUNS:
        made = conversions.of(GENUINE / run)
        files = sorted(path.relative_to(GENUINE / run) for path in (GENUINE / run).rglob("*.pt"))
        assert files == sorted(path.relative_to(made) for path in made.rglob("*.pt"))
        for file in files:
            theirs, ours = plain_load(GENUINE / run / file), plain_load(made / file)
            if isinstance(theirs, dict):
                theirs, ours = theirs["optimizer"], ours["optimizer"]
            assert list(flat(ours)) == list(flat(theirs)), file


def flat(value: Any, where: str = "") -> Iterator[tuple[str, object]]:
    """Every leaf of a nest by its place; a tensor as its type, shape and bytes."""
    if isinstance(value, dict | list):
        yield where, len(value)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(item, f"{where}/{key}")
    elif isinstance(value, torch.Tensor):
        yield where, (value.dtype, tuple(value.shape), value.numpy().tobytes())
    else:
        yield where, value


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 1},
    {"tp": 2, "pp": 2, "dp": 3},
    {"dp": 1},
    {"dp": 4},
    {"tp": 4, "dp": 2, "optimizer": "distributed"},
    {"tp": 1, "optimizer": "plain"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("run", RUNS)
def test_at_another_layout_every_state_is_what_torch_read(
    conversions: Conversions, run: str, layout: dict[str, Any]
) -> None:
    root, job = conversions.job(GENUINE / run, **layout, padded_vocab_size=160 if "tp2" in run else 144)
    check_every_state(open_checkpoint(root, ReadOptions()), states_of(GENUINE / f"dist_{run}"))
    assert job.lossless
    args = vars(plain_load(next(root.rglob("model_optim_rng.pt")))["args"])
    wise = layout.get("optimizer", "distributed" if "pingpong" in run else "plain") == "distributed"
    assert (args["use_layer_wise_distributed_optimizer"], args["use_distributed_optimizer"]) == (wise, False)
    assert bool(list(root.rglob("layer_wise_optimizer_*.pt"))) == wise
    assert not (wise and args["use_layer_wise_param_layout"])


def test_parameters_are_dealt_by_size_there_and_back() -> None:
    """Megatron's own example: of 4 ranks and 10 parameters; experts have turns of their own."""
    names = [f"decoder.layers.{i}.mlp.linear_fc1.weight" for i in range(10)]
    expert = [f"decoder.layers.0.mlp.experts.local_experts.{i}.linear_fc1.weight" for i in range(3)]
    params = [LocalParam(name, 0, (100 - i, 1), BFLOAT16, False) for i, name in enumerate(names)]
    params += [LocalParam(name, 0, (7, 1), BFLOAT16, False) for name in expert]
    groups = [ParamGroup({"wd_mult": 1.0}), ParamGroup({"wd_mult": 1.0}, expert=True)]
    dealing = Dealing((ChainedOptimizer((0,), None, True),), [groups], Membership(Arguments({}), Rules()), True)
    ranks = [dealing.of_rank(params, Shard(rank, 4), Shard(rank // 2, 2))[0] for rank in range(4)]
    assert [[9 - names.index(param.name) for param in dense] for dense, _ in ranks] == [
        [0, 7, 8], [1, 6, 9], [2, 5], [3, 4],
    ]  # fmt: skip
    assert [[expert.index(param.name) for param in own] for _, own in ranks] == [[0], [0], [1, 2], [1, 2]]


def test_a_context_parallel_group_would_overwrite_its_files(tmp_path: Path) -> None:
    source = open_checkpoint(GENUINE / "muon_pingpong_dp2_bf16", ReadOptions())
    with pytest.raises(Unsupported, match=r"(?s)CP 2.*--optimizer plain"):
        megatron_target(replace(source, parallel=replace(source.parallel, cp=2)), WriteOptions())


@pytest.mark.parametrize("to", ["hf", "dcp", "universal", "deepspeed"])
def test_other_formats_keep_it_for_the_way_back(conversions: Conversions, tmp_path: Path, to: str) -> None:
    """Each state by its name, of the parameters that have it, and each group with what it had."""
    there = tmp_path / "there"
    convert(GENUINE / "muon_tp2_bf16", there, replace(options(with_optimizer=to == "hf"), to=to))
    momenta = {name.param for name in open_checkpoint(there, ReadOptions()).catalog if name.state == MOMENTUM}
    assert len(momenta) == 4 * 7  # q, k, v, o, gate, up, down
    back = open_checkpoint(conversions.of(there, tp=2, padded_vocab_size=160), ReadOptions())
    first = open_checkpoint(GENUINE / "muon_tp2_bf16", ReadOptions())
    assert set(back.catalog) == set(first.catalog)
    for name in first.catalog:
        theirs, ours = (tensor_of(source, name.param, name.state) for source in (first, back))
        assert torch.equal(ours[:132] if len(ours) == 160 else ours, theirs[:132] if len(ours) == 160 else theirs)
    key = operator.itemgetter("weight_decay", "wd_mult")
    fields = [
        sorted((dict(g.fields) for g in s.state.groups), key=lambda f: (*key(f), "betas" in f)) for s in (first, back)
    ]
    assert fields[0] == fields[1]
