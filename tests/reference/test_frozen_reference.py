"""A reference that nothing trains is one file of all steps, on real megatron-core; what changes is written, and every step is whole."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.demo import versions
from mcore_rlhf.demo.configs import Parallel
from mcore_rlhf.errors import LayoutMismatch
from mcore_rlhf.families.megatron.state import TIMELESS, of_its_step
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.storage.pt import read_pt
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.reference import frozen_jobs as jobs
from tests.reference import releases
from tests.reference.engine_lab import ADAM, MOE, SAME_ROWS
from tests.reference.frozen_jobs import CHANGED, LAST, REFERENCE
from tests.reference.lab import TIMEOUT, Lab
from tests.reference.merge import bits_equal
from tests.reference.observing import Session
from tests.reference.test_pretrain import PRETRAIN, Scripts, scripts

__all__ = ["scripts"]  # a fixture of the module that pretrains
LAYOUT = Parallel(tp=2, dp=2)
WAYS: dict[str, dict[str, Any]] = {
    "as a whole": {"asynchronous": False},
    "in waves": {"lazy_snapshot": True, "max_host_memory": 1, "save_retries": 2, "on_error": "continue"},
}


class Saved:
    """A run of several steps."""

    def __init__(self, lab: Lab, how: str, session: Session) -> None:
        self.lab, self.root, self.session = lab, lab.new_root(), session
        self.seen = self.run(jobs.save_steps, str(self.root), WAYS[how])

    def run(self, job: Any, *args: Any) -> Any:
        return self.lab.pool.run(job, self.session, *args, world_size=self.session.parallel.world_size, timeout=TIMEOUT)

    def step(self, number: int) -> Path:
        return self.root / f"global_step_{number}"

    def file(self, number: int, rank: int, role: str = REFERENCE) -> Path:
        return self.step(number) / role / f"iter_{number:07d}" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"

    def is_linked(self, number: int, rank: int) -> bool:
        return self.file(number, rank).samefile(self.file(number - 1, rank))

    def said(self) -> set[tuple[int, int]]:
        """Of which steps and ranks the manifests say that the reference's file was linked."""
        found = set[tuple[int, int]]()
        for step in range(1, LAST + 1):
            report = json.loads((self.step(step) / "manifest.json").read_text())["report"]
            for path, source in report.get("linked", {}).items():
                assert source == f"../global_step_{step - 1}/{path.replace(f'{step:07d}', f'{step - 1:07d}')}"
                found.add((step, int(path.split("mp_rank_")[1][:2])))
        return found

    def differences(self, number: int, others: list[jobs.Seen], roles: tuple[str, ...]) -> list[str]:
        return [
            f"rank {rank} {role} {key}"
            for rank, other in enumerate(others)
            for role in roles
            for key, tensor in self.seen[rank][number - 1].states[role].items()
            if not bits_equal(tensor, other.states[role][key])
        ]


@pytest.fixture(scope="module", params=WAYS)
def saved(lab: Lab, request: pytest.FixtureRequest) -> Saved:
    return Saved(lab, request.param, Session(SAME_ROWS, LAYOUT, ADAM))


def test_it_is_written_once_and_again_where_it_changed(saved: Saved) -> None:
    every = {(step, rank) for step in range(2, LAST + 1) for rank in (0, 1)}
    written = {(CHANGED, 1), (LAST, 0)}
    assert saved.said() == every - written
    assert {one for one in every if saved.is_linked(*one)} == every - written - {(LAST - 1, 0)}  # which was replaced
    assert {saved.file(step, 0, "actor").stat().st_nlink for step in range(1, LAST + 1)} == {1}


@pytest.mark.parametrize("step", [2, CHANGED, LAST])
def test_every_step_is_resumed_from_bit_for_bit(saved: Saved, step: int) -> None:
    loaded = saved.run(jobs.load_step, str(saved.root), step)
    assert saved.differences(step, loaded, (REFERENCE, "actor")) == []
    assert [one.draws for one in loaded] == [rank[step - 1].draws for rank in saved.seen]
    assert {one.iteration for one in loaded} == {step}


def test_megatrons_own_loader_takes_it(saved: Saved) -> None:
    loaded = saved.run(jobs.load_with_megatron, str(saved.step(2) / REFERENCE))
    assert saved.differences(2, loaded, (REFERENCE,)) == []
    again = saved.run(jobs.load_with_megatron, str(saved.step(2) / REFERENCE))
    assert [one.draws for one in loaded] == [one.draws for one in again]
    assert len({tuple(one.draws[:4]) for one in loaded}) == 1, "the default states of a start are one"
    assert loaded[0].draws[4:] != loaded[1].draws[4:], "those within a tensor-parallel rank are not"


def test_will_resume_says_what_megatron_lm_makes_of_it(saved: Saved) -> None:
    found = forecast(saved.step(2) / REFERENCE, loader_named("megatron-lm")[0], Settings())
    told = {one.thing: one.row.outcome for one in found.roles[""]}
    anew = {Thing.COUNTERS, Thing.RNG, Thing.DATA}
    assert told[Thing.WEIGHTS] is Outcome.RESTORED
    assert {told[thing] for thing in anew} == {Outcome.ANEW}


def test_it_is_read_as_of_its_step_wherever_it_lies(saved: Saved, tmp_path: Path) -> None:
    for step in (2, 4):
        assert verify(saved.step(step), ReadOptions(role=REFERENCE), Depth.DEEP).intact
        alone = tmp_path / f"alone_{step}"
        shutil.copytree(saved.step(step) / REFERENCE, alone)
        source = open_checkpoint(alone, ReadOptions())
        assert source.state.iteration == step
        assert any("the same at every step" in text for _, text in source.notes.lines)
        target = tmp_path / f"out_{step}"
        convert(alone, target, ConvertOptions("megatron", ReadOptions(), WriteOptions(tp=1), fsync=False))
        tree = read_pt(target, f"iter_{step:07d}/mp_rank_00/model_optim_rng.pt").tree
        assert tree["iteration"] == step
        assert not any("mcore_rlhf" in key for key in tree)
    (tmp_path / "alone_4/iter_0000004").rename(tmp_path / "alone_4/iter_0000009")  # its actor's would be refused
    (tmp_path / "alone_4/latest_checkpointed_iteration.txt").write_text("9")
    assert open_checkpoint(tmp_path / "alone_4", ReadOptions()).state.iteration == 9
    shutil.copytree(saved.step(4) / "actor", tmp_path / "actor")
    (tmp_path / "actor/iter_0000004").rename(tmp_path / "actor/iter_0000009")
    (tmp_path / "actor/latest_checkpointed_iteration.txt").write_text("9")
    with pytest.raises(LayoutMismatch, match="the folder is of iteration 9"):
        open_checkpoint(tmp_path / "actor", ReadOptions())


@pytest.mark.parametrize("more", [{"optimizer": {}}, {TIMELESS: 1}, {TIMELESS: "True"}])
def test_what_says_so_and_is_trained_has_its_own_iteration(more: dict[str, Any]) -> None:
    top = {"iteration": 7, "model": {}, TIMELESS: True}
    assert of_its_step(top) == {"model": {}}
    assert of_its_step({**top, **more}) == {**top, **more}


@pytest.mark.slow
def test_so_are_experts(lab: Lab) -> None:
    saved = Saved(lab, "as a whole", Session(replace(MOE, dropout=0.0), Parallel(ep=2, dp=2), ADAM))
    files = [*saved.step(2).glob(f"{REFERENCE}/*/*/*.pt")]
    assert len(files) == 2
    assert {path.stat().st_nlink for path in files} == {LAST - 2, LAST}  # the one was damaged before the last step


def test_by_default_the_file_says_its_iteration(lab: Lab) -> None:
    """Who links nothing has what Megatron-LM writes."""
    root, session = lab.new_root(), Session(SAME_ROWS, Parallel(), ADAM)
    lab.pool.run(jobs.save_steps, session, str(root), {"link_unchanged": False}, world_size=1, timeout=TIMEOUT)
    tree = read_pt(root, "global_step_2/reference/iter_0000002/mp_rank_00/model_optim_rng.pt").tree
    assert tree["iteration"] == 2
    assert tree["args"].consumed_train_samples == 8
    assert "mcore_rlhf_timeless" not in tree


@pytest.mark.slow
@pytest.mark.skipif(
    releases.running(versions.MEGATRON) != releases.NEWEST, reason="the script is for the newest release"
)
def test_megatron_lms_load_checkpoint_takes_it(scripts: Scripts) -> None:
    """Its own script, in which the loader exits where there is no iteration, or no state of the random numbers' tracker."""
    given = [*PRETRAIN, "--save-interval", "2"]
    given[given.index("--tensor-model-parallel-size") + 1] = "1"
    (linked, iteration, same, restored) = scripts.run("pretrain_frozen.py", given, world=1)[0]
    assert linked
    assert (iteration, same, restored) == (0, True, True)
