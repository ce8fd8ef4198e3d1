"""What `will-resume` says of a place in the data without one key; in `tests/trainers/test_torchdata.py`, torchdata itself agrees."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.manager.run.checks import check_values
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from mcore_rlhf.trainers.torchdata import astray, missing

GOLDENS = Path(__file__).parents[1] / "goldens"
STATE: dict[str, Any] = {
    "_index_sampler_state": None, "_sampler_iter_yielded": 3, "_num_yielded": 3, "_IterableDataset_len_called": None, "_shared_seed": None,
    "_sampler_iter_state": {"samples_yielded": 12, "sampler_iter_state": {"yielded": 12, "generator": torch.zeros(8, dtype=torch.uint8)}},
    "fetcher_state": None, "dataset_state": None, "_iterator_finished": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        ((), ""), (("_num_yielded",), "_num_yielded"), (("fetcher_state",), ""),
        (("_sampler_iter_state", "samples_yielded"), "_sampler_iter_state/samples_yielded"),
        (("_sampler_iter_state", "sampler_iter_state", "generator"), "_sampler_iter_state/sampler_iter_state/generator"),
    ],
)  # fmt: skip
def test_half_a_state_is_no_place_in_the_data(tmp_path: Path, gone: tuple[str, ...], told: str) -> None:
    step = Path(shutil.copytree(GOLDENS / "trainers" / "skyrl_fsdp2", tmp_path / "run"))
    data = next(step.rglob("data.pt"))
    state = {**STATE, "_sampler_iter_state": {**STATE["_sampler_iter_state"]}}
    state["_sampler_iter_state"]["sampler_iter_state"] = {**STATE["_sampler_iter_state"]["sampler_iter_state"]}
    inner = state
    for key in gone[:-1]:
        inner = inner[key]
    for key in gone[-1:]:
        del inner[key]
    torch.save(state, data)
    found = forecast(data.parent, loader_named("skyrl")[0], Settings())
    (place,) = [one for of in found.roles.values() for one in of if one.thing is Thing.DATA]
    assert (place.row.outcome is Outcome.REFUSED) == bool(told)
    assert not told or f"data.pt has no {told}: " in place.why


def test_what_is_no_state_of_torchdatas_is_not_judged() -> None:
    """A loader of the trainer's own has what it has."""
    assert missing(()) == missing({"epoch", "offset"}) == ""


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, ""),
        ({"_sampler_iter_yielded": 4, "_iterator_finished": True}, ""),  # an iterable dataset's end
        ({"_num_yielded": 4}, "_num_yielded is 4, and _sampler_iter_yielded is 3"),
        ({"_sampler_iter_yielded": 4}, "_num_yielded is 3, and _sampler_iter_yielded is 4"),
        ({"_sampler_iter_state": {**STATE["_sampler_iter_state"], "samples_yielded": 16}}, "samples_yielded is 16, and yielded"),
    ],
)  # fmt: skip
def test_a_state_that_says_two_places_is_named(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    torch.save({"epoch": 1, "loader": STATE | changed}, tmp_path / "data.pt")
    assert told in check_values(tmp_path, ["data.pt"]).describe()
    assert bool(told) == bool(check_values(tmp_path, ["data.pt"]))


def test_so_is_one_with_workers_and_a_tree_of_itself_ends() -> None:
    main = {"_sampler_iter_yielded": 3, "_sampler_iter_state": STATE["_sampler_iter_state"]}
    state: dict[str, Any] = {"_snapshot": {"_snapshot_step": 3, "_main_snapshot": main}, "_steps_since_snapshot": 0}
    state["self"] = [state, state]
    assert astray(state) == ""
    state["_snapshot"]["_snapshot_step"] = 2
    assert astray([state]) == "_snapshot_step is 2, and _sampler_iter_yielded is 3"
