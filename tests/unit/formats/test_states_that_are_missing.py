"""Whole optimizers in a model file, from which something was taken on every rank alike: never "intact", never lossless."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.core.catalog import MASTER
from mcore_rlhf.demo.cpu_megatron import import_megatron
from mcore_rlhf.errors import Incomplete
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from tests.helpers.conversions import GOLDENS

PLAIN = GOLDENS / "tp2pp2dp2_bf16_nodo"
MUON = GOLDENS.parent / "megatron_0_19" / "muon_tp2_bf16"
Member = dict[str, Any]


def _inner(member: Member) -> Member:
    return member.get("optimizer", member)  # type: ignore[no-any-return]


def all_states(members: list[Member]) -> None:
    for member in members:
        _inner(member)["state"] = {}


def states_of_a_member(members: list[Member]) -> None:
    _inner(members[0])["state"] = {}


def states_of_a_parameter(members: list[Member]) -> None:
    del _inner(members[0])["state"][0]


def one_state(members: list[Member]) -> None:
    state = _inner(members[0])["state"]
    del state[1]["exp_avg_sq" if "exp_avg_sq" in state[1] else "momentum_buffer"]


def masters(members: list[Member]) -> None:
    del members[0]["fp32_from_fp16_params"]


def masters_of_a_group(members: list[Member]) -> None:
    members[0]["fp32_from_fp16_params"].pop()


def _stripped(folder: Path, take: Callable[[list[Member]], None]) -> Iterator[Path]:
    import_megatron()  # the pickles name its classes
    for path in folder.rglob("model_optim_rng.pt"):
        path.chmod(0o644)
        tree = torch.load(path, weights_only=False)
        stored = tree["optimizer"]
        take(stored if isinstance(stored, list) else [stored])
        torch.save(tree, path)
        yield path


@pytest.mark.filterwarnings("ignore")  # of the frameworks whose classes the pickles name
@pytest.mark.parametrize("golden", [PLAIN, MUON], ids=lambda path: path.name)
@pytest.mark.parametrize(
    "take", [all_states, states_of_a_member, states_of_a_parameter, one_state, masters, masters_of_a_group]
)
def test_what_is_missing_everywhere_is_missed(
    golden: Path, take: Callable[[list[Member]], None], tmp_path: Path
) -> None:
    shutil.copytree(golden, tmp_path / "run")
    assert list(_stripped(tmp_path / "run", take))
    with pytest.raises(Incomplete, match="--no-optimizer"):
        open_checkpoint(tmp_path / "run", ReadOptions())
    assert open_checkpoint(tmp_path / "run", ReadOptions(optimizer=False)).model.params


def skipped(members: list[Member]) -> None:
    """An fp16 run of which every iteration was skipped so far, as megatron-core 0.19.2 saves it."""
    for member in members:
        _inner(member)["state"] = {}
        member["grad_scaler"] = {"scale": torch.tensor([2.0**31]), "growth_tracker": 0, "hysteresis_tracker": 1}
        for group in _inner(member)["param_groups"]:
            group.pop("step", None)


@pytest.mark.filterwarnings("ignore")
def test_a_run_whose_iterations_were_all_skipped_lacks_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(PLAIN, folder)
    whole = (PLAIN / "iter_0000002/mp_rank_01_001/model_optim_rng.pt").read_bytes()
    assert list(_stripped(folder, skipped))
    source = open_checkpoint(folder, ReadOptions())
    assert (source.optimizer, source.states) == ("plain", (MASTER,))
    (folder / "iter_0000002/mp_rank_01_001/model_optim_rng.pt").write_bytes(whole)
    with pytest.raises(Incomplete, match="no state of any"):
        open_checkpoint(folder, ReadOptions())
