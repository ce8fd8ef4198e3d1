"""Megatron's Muon with Adam beside it, plain and layer-wise, against what torch's own DCP reader finds in the same run's ``torch_dist``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mcore_rlhf.core.catalog import EXP_AVG, EXP_AVG_SQ, MASTER
from mcore_rlhf.errors import Incomplete, Unsupported
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from tests.helpers.conversions import GOLDENS
from tests.helpers.dist_reader import check_every_state, states_of

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


@pytest.mark.parametrize("rank", [0, 1])
def test_without_a_ranks_file_it_is_said_what_is_lost(tmp_path: Path, rank: int) -> None:
    """What an older release of ours committed: the model file looks complete, with the states of one rank."""
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
