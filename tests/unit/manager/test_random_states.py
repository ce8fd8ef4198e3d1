"""Random states: kept where the layout is the same, and otherwise derived, refused or left alone, and never silently."""

from __future__ import annotations

import copy
import io
import random

import numpy as np
import pytest
import torch

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.errors import CheckpointError, LayoutMismatch
from mcore_rlhf.manager.run.rng import RngKeeper, RngState, captured, derived, file_content, put_back


def draws() -> tuple[object, ...]:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist()


def through_a_file(tree: object) -> object:
    buffer = io.BytesIO()
    torch.save(tree, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def test_every_generator_goes_on_where_it_was() -> None:
    random.gauss(0, 1)
    np.random.randn()  # both keep a second normal number for later
    state = through_a_file(captured())
    expected = draws()
    assert draws() != expected
    assert isinstance(state, dict)
    put_back(state)
    assert draws() == expected


def keeper(rank: int = 0, size: int = 2, layout: str = "actor DP2", policy: str = "derive") -> RngKeeper:
    return RngKeeper(rank, size, layout, None, policy)  # type: ignore[arg-type]


def two_ranks() -> object:
    first = captured()
    random.seed(2)
    torch.manual_seed(2)
    return through_a_file(file_content([first, captured()], "actor DP2"))


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_gets_its_own(rank: int) -> None:
    tree, report = two_ranks(), Report()
    state = keeper(rank).chosen(tree, "rng", 5, report)
    assert state is not None
    assert isinstance(tree, dict)
    assert torch.equal(state["torch"], tree["ranks"][rank]["torch"])  # type: ignore[arg-type]
    assert [fate for fate, _ in report.lines] == [Fate.KEPT]


def test_another_layout_is_derived_and_said() -> None:
    tree, report = two_ranks(), Report()
    states = [keeper(rank, 4, "actor DP4").chosen(tree, "rng", 5, report) for rank in range(4)]
    seeds = [state["torch"].numpy().tobytes() for state in states if state is not None]  # type: ignore[union-attr, attr-defined]
    assert len(set(seeds)) == 4
    ((fate, text),) = report.lines
    assert fate is Fate.DERIVED
    assert "actor DP2 on 2 ranks, now actor DP4 on 4" in text


def test_derived_states_depend_on_the_saved_one_the_step_and_the_rank_and_on_nothing_else() -> None:
    first = captured()

    def seed(state: RngState, step: int, rank: int) -> bytes:
        return derived(state, step, rank)["torch"].numpy().tobytes()  # type: ignore[attr-defined]

    base = seed(first, 5, 1)
    random.random()
    assert seed(copy.deepcopy(first), 5, 1) == base
    assert seed(first, 6, 1) != base
    assert seed(first, 5, 2) != base
    assert seed(captured(), 5, 1) != base
    put_back(derived(first, 5, 1))
    draws()


def test_another_layout_is_refused_or_ignored_by_option() -> None:
    tree, report = two_ranks(), Report()
    with pytest.raises(LayoutMismatch, match="DP2 on 2 ranks, now actor DP4 on 4"):
        keeper(0, 4, "actor DP4", "refuse").chosen(tree, "rng", 5, report)
    assert keeper(0, 4, "actor DP4", "ignore").chosen(tree, "rng", 5, report) is None
    assert [fate for fate, _ in report.lines] == [Fate.LOST]


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ([], "expected a dictionary"),
        ({"ranks": []}, "expected a dictionary"),
        ({"ranks": [{}], "version": 99}, "version 99"),
        ({"ranks": [{"python": 1}], "version": 1}, "cuda, numpy, torch, tracker"),
    ],
)
def test_a_file_that_is_something_else(tree: object, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        keeper().chosen(tree, "rng/rng_state.pt", 5, Report())
