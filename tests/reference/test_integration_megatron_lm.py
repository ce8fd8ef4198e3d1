"""The drop-in for Megatron-LM's scripts on real megatron-core models: what it saves goes on bit for bit, with it and without."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.demo.configs import Parallel
from mcore_rlhf.demo.workers import WorkerError
from mcore_rlhf.manager.run import steps
from tests.reference import integration_jobs
from tests.reference.engine_lab import ADAM, SAME_ROWS
from tests.reference.integration_jobs import FLOPS, Ran
from tests.reference.lab import TIMEOUT, Lab, Trained, together
from tests.reference.merge import differences
from tests.reference.observing import END, LOOK, Session

LAYOUT = Parallel(tp=2, dp=2)
OTHER = Parallel(pp=2, dp=2)
Script = Callable[..., tuple[Trained, list[Ran]]]


@pytest.fixture(scope="module")
def script(lab: Lab) -> Script:
    """Run a script on the pool."""

    def run(parallel: Parallel = LAYOUT, *, load: Path | None = None, save: Path | None = None, **given: Any) -> Any:
        where = {"load": str(load) if load else None, "save": str(save) if save else None}
        session = Session(SAME_ROWS, parallel, ADAM, **where)
        asynchronous = given.pop("asynchronous", False)
        job, world = integration_jobs.run_script, parallel.world_size
        ranks = lab.pool.run(job, session, given, asynchronous, world_size=world, timeout=TIMEOUT)
        return together(session, load or save or lab.folder, [rank.seen for rank in ranks]), ranks

    return run


@pytest.fixture(scope="module")
def saved(lab: Lab, script: Script) -> Trained:
    """An uninterrupted run that saved behind training."""
    return script(save=lab.new_root(), asynchronous=True)[0]


def same_from_there_on(saved: Trained, resumed: Trained) -> None:
    assert differences(saved.models[LOOK], resumed.models[LOOK]) == []
    assert resumed.losses == {step: saved.losses[step] for step in (3, 4)}
    assert differences(saved.models[END], resumed.models[END]) == []
    assert (resumed.groups, resumed.scheduler) == (saved.groups, saved.scheduler)


def test_a_script_goes_on_bit_for_bit(saved: Trained, script: Script) -> None:
    assert [step.step for step in steps.committed(saved.root)] == [LOOK]
    resumed, ranks = script(load=saved.root)
    same_from_there_on(saved, resumed)
    assert {rank.loaded for rank in ranks} == {(LOOK, FLOPS)}
    assert {rank.consumed for rank in ranks} == {LOOK * ADAM.global_batch_size}
    assert all("kept: random states of every rank" in rank.printed[-1] for rank in ranks)


def test_megatrons_own_loader_goes_on_from_a_step(saved: Trained, lab: Lab) -> None:
    same_from_there_on(saved, lab.resume(saved.root / f"global_step_{LOOK}" / "actor", SAME_ROWS, LAYOUT, ADAM))


def test_a_folder_of_megatrons_own_is_loaded(saved: Trained, script: Script, lab: Lab) -> None:
    """With Megatron's random states, of which the file has those of the first data-parallel rank."""
    theirs = lab.train(SAME_ROWS, LAYOUT, ADAM)
    assert theirs.losses == saved.losses
    resumed, ranks = script(load=theirs.root)
    same_from_there_on(theirs, resumed)
    assert ranks[0].loaded[0] == LOOK
    assert ranks[0].loaded[1] > 0
    assert all(
        "random states: the step has none of every rank; those of the model's own files" in rank.printed[-1]
        for rank in ranks
    )


def test_a_step_without_a_manifest_is_loaded_when_it_is_named(saved: Trained, script: Script, lab: Lab) -> None:
    """As RLinf writes them: a folder for each role, Megatron's own in it."""
    step = lab.new_root() / f"global_step_{LOOK}"
    shutil.copytree(lab.train(SAME_ROWS, LAYOUT, ADAM).root, step / "actor")
    resumed, _ = script(load=step)
    same_from_there_on(saved, resumed)
    # the same folder as the run's root: nothing is committed, and that is no fresh start
    with pytest.raises(WorkerError, match=r"none of them can be resumed from(?s:.*)adopt"):
        script(load=step.parent)


@pytest.mark.parametrize("source", ["ours", "theirs"])
def test_another_layout_is_loaded_through_a_plan(saved: Trained, script: Script, lab: Lab, source: str) -> None:
    root = saved.root if source == "ours" else lab.train(SAME_ROWS, LAYOUT, ADAM).root
    resumed, ranks = script(OTHER, load=root)
    assert differences(saved.models[LOOK], resumed.models[LOOK]) == []
    assert {rank.loaded[0] for rank in ranks} == {LOOK}
    said = "derived: random states" if source == "ours" else "those of this run are left as they are"
    assert all(said in rank.printed[-1] for rank in ranks)


def test_fine_tuning_takes_the_weights_alone(saved: Trained, script: Script) -> None:
    tuned, ranks = script(load=saved.root, finetune=True)
    assert {(rank.loaded[0], rank.consumed) for rank in ranks} == {(0, 0)}
    assert _params(saved)
    assert differences(_params(saved), _params(tuned)) == []
    assert tuned.losses[3] != saved.losses[3]
    assert differences(saved.models[END], tuned.models[END]) != []


def _params(run: Trained) -> Any:
    return {key: tensor for key, tensor in run.models[LOOK].items() if key[0] == "param"}
