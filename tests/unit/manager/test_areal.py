"""Runs of AReaL: one step, which is the run's own folder; what its recover_info says, and what of it others can have."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.errors import (
    CheckpointError,
    Corrupt,
    Incomplete,
    LayoutMismatch,
    NotACheckpoint,
    StorageError,
    UsageError,
)
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import StepJob, convert_step
from mcore_rlhf.manager.run.adopt import adopt
from mcore_rlhf.manager.runs import listed_steps, run_at
from mcore_rlhf.manager.subject import find
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.storage.unpickle import unpickle
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing

GOLDEN = Path(__file__).parents[2] / "goldens" / "areal" / "trial"
STEP, DATA = "recover_info/step_info.json", "recover_info/dataloader_info.pkl"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a critic, which is the actor again."""
    shutil.copytree(GOLDEN, tmp_path / "trial")
    shutil.copytree(GOLDEN / "default", tmp_path / "trial" / "critic")
    return tmp_path / "trial"


def converted(source: Path, to: str, target: Path, **write: Any) -> StepJob:
    options = ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(**write))
    return convert_step(find(source, ReadOptions()), target, options)


def said(run: Path, **change: object) -> None:
    path = run / STEP
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def told(run: Path, settings: dict[str, object] | None = None, world: int | None = None) -> dict[Thing, Outcome]:
    found = forecast(run, loader_named("areal")[0], Settings(settings or {}), world)
    return {one.thing: one.row.outcome for one in found.roles["actor"]}


def test_its_one_step_is_how_many_are_done(run: Path) -> None:
    """Not what the optimizer counts, which steps several times in one of the run's."""
    said(run, global_step=40, epoch=4, epoch_step=0)
    (step,) = listed_steps(run)
    assert (step.step, step.state, step.roles) == (41, "foreign", ("actor", "critic"))
    assert find(run, ReadOptions()).step == 41
    for role in ("default", "critic"):
        assert open_checkpoint(run / role / "recover_checkpoint", ReadOptions()).state.iteration == 41
    assert [step.step for step in listed_steps(run / "default")] == [3]  # the weights that lie there


@pytest.mark.parametrize("number", [-2, True, "2", 2.0, None, 10**18])
def test_a_step_that_is_no_number_is_named(run: Path, number: object) -> None:
    said(run, global_step=number)
    with pytest.raises(Corrupt, match=r"step_info\.json: global_step should be a whole number"):
        find(run, ReadOptions())


def test_a_file_that_is_gone_is_named_and_all_begins_anew(run: Path) -> None:
    for name in sorted(path.name for path in (GOLDEN / "recover_info").iterdir()):
        path = run / "recover_info" / name
        kept = path.read_bytes()
        path.unlink()
        (step,) = listed_steps(run)
        assert step.state == "partial"
        assert name in step.why
        with pytest.raises(NotACheckpoint, match=name):
            find(run, ReadOptions())
        assert set(told(run).values()) == {Outcome.ANEW}
        path.write_bytes(kept)


def test_it_is_not_adopted_as_the_next_step_is_written_over_it(run: Path) -> None:
    with pytest.raises(UsageError, match="no folder of their own for a manifest"):
        adopt(run)


@pytest.mark.parametrize("to", ["areal", "verl", "rlinf", "openrlhf", "megatron"])
def test_a_run_goes_there_and_back_with_its_step(run: Path, tmp_path: Path, to: str) -> None:
    described = (
        {"reference_config": str(GOLDEN / "default" / "epoch0epochstep2globalstep2")} if to == "megatron" else {}
    )
    converted(run, to, tmp_path / "there", **described)
    job = converted(tmp_path / "there", "areal", tmp_path / "back")
    assert job.published == tmp_path / "back"
    back = run_at(tmp_path / "back")
    assert back is not None
    assert [*back.found] == [3]
    assert [*back.found[3].models()] == ["actor", "critic"]
    assert json.loads((tmp_path / "back" / STEP).read_text())["global_step"] == 2
    state = open_checkpoint(tmp_path / "back" / "default" / "recover_checkpoint", ReadOptions()).state
    assert len(state.groups) == 1
    position = unpickle((tmp_path / "back" / DATA).read_bytes(), DATA)
    assert (position[0] if isinstance(position, list) else position)["_sampler_iter_yielded"] == 3  # type: ignore[call-overload]
    assert told(tmp_path / "back")[Thing.DATA] is Outcome.RESTORED


def test_what_is_made_is_as_the_run_that_is_shown(run: Path, tmp_path: Path) -> None:
    converted(run, "verl", tmp_path / "verl")
    converted(tmp_path / "verl", "areal", tmp_path / "shown", like=str(GOLDEN))
    for name in ("saver_info.json", "evaluator_info.json", "checkpoint_info.json", "stats_logger_info.json"):
        assert (tmp_path / "shown" / "recover_info" / name).read_bytes() == (
            GOLDEN / "recover_info" / name
        ).read_bytes()
    short = Path(shutil.copytree(GOLDEN, tmp_path / "short"))
    said(short, steps_per_epoch=2)
    converted(tmp_path / "verl", "areal", tmp_path / "epochs", like=str(short))
    assert json.loads((tmp_path / "epochs" / STEP).read_text()) == {
        "epoch": 1, "epoch_step": 0, "global_step": 2, "steps_per_epoch": 2,
    }  # fmt: skip
    saver = short / "recover_info" / "saver_info.json"
    saver.unlink()
    with pytest.raises(UsageError, match=r"saver_info\.json: No such file"):
        converted(tmp_path / "verl", "areal", tmp_path / "no", like=str(short))
    (tmp_path / "secret").write_text("{}")
    saver.symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="leads out of"):
        converted(tmp_path / "verl", "areal", tmp_path / "no", like=str(short))
    with pytest.raises(UsageError, match="is no run of AReaL"):
        converted(tmp_path / "verl", "areal", tmp_path / "no", like=str(tmp_path / "verl"))


def test_shares_of_other_ranks_are_lost_and_not_the_whole_run(run: Path, tmp_path: Path) -> None:
    """AReaL begins everything anew where the list has other than as many items as there are ranks."""
    (one,) = pickle.loads((run / DATA).read_bytes())
    (run / DATA).write_bytes(pickle.dumps([one, one]))
    assert set(told(run, world=3).values()) == {Outcome.ANEW}
    assert told(run, world=2)[Thing.DATA] is Outcome.RESTORED
    job = converted(run, "areal", tmp_path / "two", dp=2)
    assert (tmp_path / "two" / DATA).read_bytes() == (run / DATA).read_bytes()
    assert job.lossless
    job = converted(run, "areal", tmp_path / "three", dp=3)
    assert any("shares of 2 data-parallel ranks, and AReaL has 3" in text for text in job.report.lost)
    assert unpickle((tmp_path / "three" / DATA).read_bytes(), DATA) == {}
    (run / DATA).write_bytes(pickle.dumps(one))  # of one loader for all, as its single controller has it
    job = converted(run, "areal", tmp_path / "whole", dp=3)
    assert job.lossless


def test_nothing_of_ours_lies_where_it_would_be_of_an_older_step(run: Path, tmp_path: Path) -> None:
    """AReaL writes over the folder, and leaves what is not its own."""
    config = str(GOLDEN / "default" / "epoch0epochstep2globalstep2")
    converted(run, "megatron", tmp_path / "megatron", reference_config=config)
    job = converted(tmp_path / "megatron", "areal", tmp_path / "back")
    names = {path.name for path in (tmp_path / "back" / "default" / "recover_checkpoint").iterdir()}
    assert names == {".metadata", "__0_0.distcp"}
    assert any(text.startswith("schedule, random states and client state") for text in job.jobs["actor"].report.lost)
    said(tmp_path / "back", global_step=7, epoch_step=7)
    assert find(tmp_path / "back", ReadOptions()).step == 8
    assert open_checkpoint(tmp_path / "back" / "default" / "recover_checkpoint", ReadOptions()).state.iteration == 8


def test_the_state_of_a_sampler_with_a_generator_is_lost_by_name(run: Path, tmp_path: Path) -> None:
    """AReaL's loader has no sampler that would take it."""
    converted(run, "rlinf", tmp_path / "rlinf")
    place = tmp_path / "rlinf" / "global_step_3" / "data" / "data.pt"
    state = {"_num_yielded": 3, "_sampler_iter_state": {"generator": torch.Generator().get_state()}}
    torch.save(state, place)
    (place.parents[1] / "manifest.json").unlink()  # as RLinf has it
    job = converted(tmp_path / "rlinf", "areal", tmp_path / "back")
    assert any("has tensors, as a sampler with a generator" in text for text in job.report.lost)
    assert unpickle((tmp_path / "back" / DATA).read_bytes(), DATA) == {}


def test_no_code_of_a_position_is_run(run: Path, tmp_path: Path) -> None:
    (run / DATA).write_bytes(b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x07echo hi\x85R.")
    for to in ("areal", "verl"):
        with pytest.raises(CheckpointError, match=r"posix\.system"):
            converted(run, to, tmp_path / to)


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (lambda run: (run / "default" / "recover_checkpoint" / ".metadata").unlink(), Incomplete, "metadata"),
        (lambda run: (run / STEP).write_text("{"), Corrupt, "step_info.json"),
        (
            lambda run: (
                said(run, global_step=9, epoch_step=9)
                or (run / "default" / "global_step_3" / "data.pt").mkdir(parents=True)
            ),
            None,
            "",
        ),
    ],
)
def test_what_is_damaged_is_named(
    run: Path, tmp_path: Path, damage: Callable[[Path], object], error: type[CheckpointError] | None, words: str
) -> None:
    damage(run)
    if error is None:
        assert converted(run, "areal", tmp_path / "out").source.step == 10
        return
    with pytest.raises((error, LayoutMismatch), match=words):
        converted(run, "areal", tmp_path / "out")


def test_what_its_loader_asks_for_and_a_configuration_changes(run: Path) -> None:
    usual = told(run)
    assert {thing for thing, outcome in usual.items() if outcome is Outcome.ANEW} == {Thing.SCHEDULER, Thing.RNG}
    assert set(told(run, {"recover.mode": "off"}).values()) == {Outcome.ANEW}
    assert told(run, {"recover.no_load_optim": True})[Thing.OPTIMIZER] is Outcome.ANEW
    said(run, more=1)
    assert set(told(run).values()) == {Outcome.ANEW}
    shutil.copyfile(GOLDEN / STEP, run / STEP)
    path = run / "recover_info" / "saver_info.json"
    path.write_text(json.dumps({"epoch": {}}))
    assert set(told(run).values()) == {Outcome.REFUSED}


def test_a_run_that_it_went_on_in_is_not_overwritten(run: Path, tmp_path: Path) -> None:
    """The folder is a whole run's: of what it has saved since, nothing may go with what a conversion once wrote there."""
    target = tmp_path / "run"
    again = ConvertOptions(to="areal", fsync=False, workers=1, overwrite=True)
    converted(run, "areal", target)
    convert_step(find(run, ReadOptions()), target, again)
    shutil.copytree(
        GOLDEN / "default" / "epoch0epochstep2globalstep2", target / "default" / "epoch0epochstep3globalstep3"
    )
    with pytest.raises(StorageError, match="not even --overwrite"):
        convert_step(find(run, ReadOptions()), target, again)
    shutil.rmtree(target / "default" / "epoch0epochstep3globalstep3")
    said(target, global_step=4, epoch_step=4)
    with pytest.raises(StorageError, match="not even --overwrite"):
        convert_step(find(run, ReadOptions()), target, again)
    assert find(target, ReadOptions()).step == 5
