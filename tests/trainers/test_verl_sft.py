"""verl's SFT goes on from what was made of its runs: with the same losses and, on as many ranks, the same data in the same order."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from tests.trainers import lab as labs
from tests.trainers.test_verl import Seen

WORKERS = {"0.9.1": 0, "0.7.0": 2}


class Lab(labs.Lab):
    """Runs of verl's SFT, each done once."""

    def carry_out(self, release: str, world: int, do: Sequence[tuple[str, object]], **how: Any) -> Seen:
        needed = [f"verl-{release}", "needs"]
        return self.run("verl_sft_job", needed, world, do, **{"strategy": "fsdp2", "workers": WORKERS[release], **how})

    def trained(self, release: str) -> tuple[Path, Seen]:
        """The root of a run, and what it saw in two steps more."""
        path, wanted = self.once(
            release, self.folder / f"run-{release}" / "global_step_3", lambda do: self.carry_out(release, 2, do)
        )
        return path.parent, wanted

    def goes_on(self, root: Path, release: str = "0.9.1", world: int = 2) -> Seen:
        return self.carry_out(release, world, [("load", root / "global_step_3"), ("train", 2)], seed=7)


@pytest.fixture(scope="module")
def lab(trainers: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(trainers, tmp_path_factory.mktemp("verl-sft"))


def learnt(seen: Seen) -> list[tuple[Any, ...]]:
    """All but random numbers, of which a loader draws one when it begins, before a step or behind it."""
    return [(step["loss"], step["lr"], step["data"]) for step in seen]


def told(root: Path, world: int = 2) -> dict[Thing, Outcome]:
    found = forecast(root, loader_named("verl-sft")[0], Settings(), world)
    return {one.thing: one.row.outcome for one in found.roles[""]}


@pytest.mark.parametrize("release", WORKERS)
def test_it_goes_on_from_its_own(lab: Lab, release: str) -> None:
    run, wanted = lab.trained(release)
    assert set(told(run).values()) == {Outcome.RESTORED}
    target, job = lab.convert(run, "verl-sft", f"{release}-same")
    assert job.lossless
    assert set(told(target).values()) == {Outcome.RESTORED}
    assert learnt(lab.goes_on(target, release)) == learnt(wanted)


def test_on_other_ranks_its_data_begin_anew_and_that_is_said(lab: Lab) -> None:
    """A rank's state counts samples of its own share: of three it would be another place, and nothing would say so."""
    run, wanted = lab.trained("0.9.1")
    three, job = lab.convert(run, "verl-sft", "three", dp=3)
    assert any("counts the shares of 2 data-parallel ranks" in text for text in job.report.lost)
    assert told(three, 3)[Thing.DATA] is Outcome.ANEW
    seen = lab.goes_on(three, world=3)
    assert [step["loss"] for step in seen] == pytest.approx([step["loss"] for step in wanted], abs=2e-6)


def test_a_rank_without_its_file_begins_its_data_anew(lab: Lab, tmp_path: Path) -> None:
    run, wanted = lab.trained("0.9.1")
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "global_step_3" / "data_1.pt").unlink()
    assert told(tmp_path / "run")[Thing.DATA] is Outcome.ANEW
    seen = lab.goes_on(tmp_path / "run")
    assert [step["data"] for step in seen] != [step["data"] for step in wanted]
    assert [step["loss"] for step in seen] == [step["loss"] for step in wanted]
