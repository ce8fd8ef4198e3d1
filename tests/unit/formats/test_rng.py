"""Random-number states of a new layout: repeatable, equal where Megatron needs them equal, different elsewhere."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mcore_rlhf.convert import convert
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.engines.stateful import torch_values
from mcore_rlhf.families.megatron.folders import file_ranks
from mcore_rlhf.families.megatron.state import RngMaker
from mcore_rlhf.layouts.parallel import ParallelConfig
from tests.helpers.conversions import GOLDENS, Conversions, golden, options
from tests.helpers.damage import MODEL, copied, edit_args, edited
from tests.helpers.plain_load import bits, plain_load, same

SAVED: dict[str, Any] = golden("tp1_bf16_do").ranks[0].model["rng_state"][0]
TRACKER = ("data-parallel-rng", "model-parallel-rng", "expert-parallel-rng")
LAYOUT = ParallelConfig(tp=2, pp=2, ep=2, etp=2, dp=2)


def states(maker: RngMaker, how: str, layout: ParallelConfig = LAYOUT) -> dict[str, dict[str, Any]]:
    return {at.folder: dict(torch_values(getattr(maker, how)(at))) for at in file_ranks(layout)}


def maker(saved: Any = SAVED, iteration: int = 2) -> RngMaker:
    return RngMaker(saved, iteration, 1234)


@pytest.mark.parametrize("how", ["derived", "fresh"])
def test_states_are_built_like_megatrons_and_can_be_set(how: str) -> None:
    for state in states(maker(), how).values():
        assert list(state) == list(SAVED)
        assert tuple(state["rng_tracker_states"]) == tuple(SAVED["rng_tracker_states"])
        random.Random().setstate(state["random_rng_state"])
        np.random.RandomState().set_state(state["np_rng_state"])
        for tensor in (state["torch_rng_state"], state["cuda_rng_state"], *state["rng_tracker_states"].values()):
            assert (tensor.dtype, tensor.shape) == (torch.uint8, (5056,))
            torch.Generator().set_state(tensor)


@pytest.mark.parametrize("how", ["derived", "fresh"])
def test_which_ranks_agree(how: str) -> None:
    made = states(maker(), how)
    folders = {at.folder: at for at in file_ranks(LAYOUT)}

    def classes(key: Any) -> set[frozenset[str]]:
        """Groups of folders that have equal states."""
        found: dict[Any, set[str]] = {}
        for folder, state in made.items():
            found.setdefault(key(state), set()).add(folder)
        return {frozenset(group) for group in found.values()}

    def by(coordinate: Any) -> set[frozenset[str]]:
        found: dict[Any, set[str]] = {}
        for folder, at in folders.items():
            found.setdefault(coordinate(at), set()).add(folder)
        return {frozenset(group) for group in found.values()}

    for name in ("torch_rng_state", "cuda_rng_state"):
        assert classes(lambda s, n=name: bits(s[n])) == by(lambda at: at.pp_rank), name
    assert classes(lambda s: s["random_rng_state"]) == by(lambda at: at.pp_rank)
    assert classes(lambda s: s["np_rng_state"][1].tobytes()) == by(lambda at: at.pp_rank)

    def tracked(name: str) -> set[frozenset[str]]:
        return classes(lambda s: bits(s["rng_tracker_states"][name]))

    assert tracked("data-parallel-rng") == by(lambda at: at.pp_rank)
    assert tracked("model-parallel-rng") == by(lambda at: (at.tp_rank, at.pp_rank))
    if how == "fresh":
        return  # Megatron's own seeds of stage 1, expert rank 0 and of stage 0, expert rank 1 are the same
    assert tracked("expert-parallel-rng") == by(lambda at: (at.ep_rank, at.etp_rank, at.pp_rank))


def test_deriving_depends_on_the_source_and_the_step_only() -> None:
    first = states(maker(), "derived")
    assert same(first, states(maker(), "derived")) == []
    at = next(iter(first))

    def torch_state(made: dict[str, dict[str, Any]]) -> bytes:
        return bits(made[at]["torch_rng_state"])

    assert torch_state(states(maker(iteration=3), "derived")) != torch_state(first)
    other = dict(SAVED, torch_rng_state=SAVED["torch_rng_state"].clone())
    other["torch_rng_state"][9] += 1
    assert torch_state(states(maker(other), "derived")) != torch_state(first)
    assert bits(first[at]["torch_rng_state"]) != bits(SAVED["torch_rng_state"]), (
        "a new layout does not repeat the old one"
    )


def test_fresh_states_are_those_of_megatrons_start() -> None:
    """``_set_random_seed`` and ``model_parallel_cuda_manual_seed`` of core_v0.16.1, for --seed 1234."""
    for at in file_ranks(LAYOUT):
        state: Any = torch_values(maker().fresh(at))
        seed = 1234 + 100 * at.pp_rank
        tracker = state["rng_tracker_states"]
        assert torch.Generator().set_state(state["torch_rng_state"]).initial_seed() == seed
        expected = {
            "data-parallel-rng": seed, "model-parallel-rng": seed + 2718 + at.tp_rank,
            "expert-parallel-rng": seed + 1024 + 100 * at.ep_rank + at.etp_rank,
        }  # fmt: skip
        for name, value in expected.items():
            assert bits(tracker[name]) == bits(torch.Generator().manual_seed(value).get_state())
        assert state["random_rng_state"] == random.Random(seed).getstate()


def test_states_of_a_gpu_have_sixteen_bytes() -> None:
    """A CUDA generator's state is its seed and its offset; what was on a GPU stays so, what was on the CPU too."""
    gpu = torch.zeros(16, dtype=torch.uint8)
    saved = dict(SAVED, cuda_rng_state=gpu, rng_tracker_states=dict.fromkeys(TRACKER, gpu))
    for how in ("derived", "fresh"):
        for state in states(maker(saved), how).values():
            assert state["torch_rng_state"].shape == (5056,)
            for tensor in (state["cuda_rng_state"], *state["rng_tracker_states"].values()):
                assert tensor.shape == (16,)
                assert bits(tensor)[8:] == bytes(8)
    without = states(maker(None), "fresh")
    assert all(state["cuda_rng_state"].shape == (16,) for state in without.values())


def test_a_conversion_keeps_derives_or_drops(conversions: Conversions) -> None:
    name = "tp2pp2dp2_bf16_do"
    old = [rank.model["rng_state"] for rank in golden(name).ranks]
    kept = conversions.reading(conversions.of(GOLDENS / name, dp=4, rng="keep"))
    assert same([rank.model["rng_state"] for rank in kept.ranks], old) == []
    for how, word in (("derive", "derived"), ("drop", "lost")):
        root, job = conversions.job(GOLDENS / name, rng=how)
        made = [rank.model["rng_state"] for rank in conversions.reading(root).ranks]
        assert all(same(a, b) for a, b in zip(made, old, strict=True))
        assert any(fate.value == word and "RNG" in line for fate, line in job.report.lines)
        assert all(list(state[0]) == list(SAVED) for state in made)


@pytest.mark.parametrize(("dp", "fate", "stored"), [(1, Fate.LOST, 1), (2, Fate.KEPT, 2), (3, Fate.DERIVED, 3)])
def test_states_of_data_parallel_ranks_are_not_said_to_be_kept_where_they_are_not(
    dp: int, fate: Fate, stored: int, tmp_path: Path
) -> None:
    """With ``--data-parallel-random-init`` each data-parallel rank has its own."""
    root = copied("tp1_bf16_do", tmp_path)
    edit_args(root, data_parallel_random_init=True, data_parallel_size=2, world_size=2)
    (path,) = root.rglob(MODEL)
    with edited(path) as tree:
        tree["rng_state"].append({**tree["rng_state"][0], "random_rng_state": random.Random(7).getstate()})
    job = convert(root, tmp_path / "out", replace(options(dp=dp), to="megatron"))
    assert [found for found, text in job.report.lines if text.startswith("RNG states")] == [fate]
    assert job.lossless == (fate is not Fate.LOST)
    (there,) = (tmp_path / "out").rglob(MODEL)
    assert len(plain_load(there)["rng_state"]) == stored
