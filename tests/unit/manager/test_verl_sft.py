"""Runs of verl's SFT: one model in a step, and of each data-parallel rank what its loader says of its share of the data."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from mcore_rlhf.cli.app import app
from mcore_rlhf.manager.run.adopt import Adoption, adopt
from mcore_rlhf.manager.runs import goes_without, listed_steps, run_at
from mcore_rlhf.manager.will_resume import forecast, forecast_for_its_writer, loader_named
from mcore_rlhf.storage.pickling import pickle_tree
from mcore_rlhf.storage.unpickle import unpickle
from mcore_rlhf.trainers.resuming import Outcome, Thing
from mcore_rlhf.trainers.settings_file import read_settings
from tests.unit.manager.test_into_run import VERL, into

STEP = "global_step_3"
PLACE = {
    "_index_sampler_state": None, "_sampler_iter_state": None, "_sampler_iter_yielded": 3, "_num_yielded": 3, "_shared_seed": None,
    "_IterableDataset_len_called": None, "fetcher_state": None, "dataset_state": None, "_iterator_finished": False,
}  # fmt: skip
"""Of torchdata's ``StatefulDataLoader``."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two ranks, whose loaders say the same but for what their workers draw."""
    root = tmp_path / "run"
    shutil.copytree(VERL, root / STEP)
    for rank in range(2):
        torch.save({**PLACE, "seed": rank}, root / STEP / f"data_{rank}.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    return root


def outcomes(root: Path) -> set[Outcome]:
    found = forecast_for_its_writer(root)
    assert found is not None
    return {one.row.outcome for one in found.roles[""]}


def test_each_rank_keeps_its_own_place_where_there_are_as_many(run: Path, tmp_path: Path) -> None:
    found = run_at(run)
    assert found is not None
    assert (found.trainer.name, outcomes(run)) == ("verl-sft", {Outcome.RESTORED})
    done = into(run, tmp_path / "new", "verl-sft")
    assert done.lossless
    for rank in range(2):
        kept = (tmp_path / "new" / STEP / f"data_{rank}.pt").read_bytes()
        assert kept == (run / STEP / f"data_{rank}.pt").read_bytes()
    (step,) = listed_steps(tmp_path / "new")
    assert (step.state, step.roles, outcomes(tmp_path / "new")) == ("committed", ("actor",), {Outcome.RESTORED})


def test_of_all_ranks_the_place_is_looked_for(run: Path) -> None:
    """Of which none has one where several have one place: of sequence parallelism, or under Ray, whose driver has the loader."""
    step = run / STEP
    assert not goes_without(step, dp=2)
    (step / "data_1.pt").unlink()
    (said,) = goes_without(step, dp=2)
    assert said == (
        "data_1.pt: without it verl's SFT begins its data anew, on 1 of 2 ranks, unless 2 ranks each share their data "
        "(sequence parallelism, or Ray's driver)"
    )
    (step / "data_0.pt").rename(step / "data_1.pt")
    (said,) = goes_without(step, dp=2)
    assert said == "data_0.pt: without it verl's SFT begins its data anew, on 1 of 2 ranks"
    found = CliRunner().invoke(app, ["verify", str(step), "--json"])
    assert json.loads(found.stdout)["missing"] == [said]


@pytest.mark.parametrize(("to", "write"), [("verl-sft", {"dp": 3}), ("verl", {}), ("openrlhf", {}), ("areal", {})])
def test_a_share_is_no_place_for_another_number_of_loaders(
    to: str, write: dict[str, int], run: Path, tmp_path: Path
) -> None:
    """What one rank yielded of two is another place in the data of three, or of one; the loader would go on from it without a word."""
    done = into(run, tmp_path / "new", to, **write)
    assert any("counts the shares of 2 " in text for text in done.report.lost)
    assert not [*(tmp_path / "new").rglob("data*.pt")]
    assert all(
        path.read_bytes() == pickle_tree({}, "").data for path in (tmp_path / "new").rglob("dataloader_info.pkl")
    )


def test_of_one_rank_it_is_the_whole_and_goes_both_ways(run: Path, tmp_path: Path) -> None:
    one = into(run, tmp_path / "one", "verl-sft", dp=1).published
    assert isinstance(one, Path)
    position = {"_num_yielded": 3, "_sampler_iter_state": {"samples_yielded": 6}}
    torch.save(position, one / "data_0.pt")
    (one / "manifest.json").unlink()
    assert into(tmp_path / "one", tmp_path / "ppo", "verl").account.lossless
    assert (tmp_path / "ppo" / STEP / "data.pt").is_file()
    assert into(tmp_path / "ppo", tmp_path / "back", "verl-sft").account.lossless
    assert (tmp_path / "back" / STEP / "data_0.pt").read_bytes() == (one / "data_0.pt").read_bytes()
    into(tmp_path / "one", tmp_path / "areal", "areal")
    pickled = tmp_path / "areal" / "recover_info" / "dataloader_info.pkl"
    assert unpickle(pickled.read_bytes(), pickled.name) == position
    two = into(tmp_path / "ppo", tmp_path / "two", "verl-sft", dp=2)
    assert any("counts the shares of 1 data-parallel ranks" in text for text in two.report.lost)


class _Calls:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("true",)


def test_a_state_that_would_run_code_or_is_none_stays_behind(run: Path, tmp_path: Path) -> None:
    torch.save({"_num_yielded": 3, "calls": _Calls()}, run / STEP / "data_1.pt")
    done = into(run, tmp_path / "new", "verl-sft")
    assert any("posix.system" in text and "begins its data anew" in text for text in done.report.lost)
    assert not [*(tmp_path / "new").rglob("data*.pt")]


def test_a_gone_rank_is_told_and_a_step_is_adopted(run: Path, tmp_path: Path) -> None:
    adopt(run / STEP, Adoption(workers=1))
    assert [(step.state, step.roles) for step in listed_steps(run)] == [("committed", ("actor",))]
    (run / STEP / "data_1.pt").unlink()
    loader, settings = loader_named("verl-sft")[0], tmp_path / "config.yaml"
    settings.write_text("checkpoint: {load_contents: [model, extra]}")
    told = {one.thing: one for one in forecast(run, loader, read_settings(settings)).roles[""]}
    assert "data_1.pt is not there (1 of 2 ranks)" in told[Thing.DATA].why
    assert told[Thing.OPTIMIZER].row.outcome is Outcome.ANEW
