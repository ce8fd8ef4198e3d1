"""open-instruct's saves and resumes re-enacted with DeepSpeed's own engine, and what every command makes of their roots."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mcore_rlhf.demo.workers import WorkerPool
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import convert_step
from mcore_rlhf.manager.run.adopt import adopt
from mcore_rlhf.manager.runs import listed_steps, run_at
from mcore_rlhf.manager.subject import find
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from mcore_rlhf.verify.checkpoint import verify
from tests.reference.deepspeed_models import Setting

TRAINERS = Path(__file__).parents[1] / "goldens" / "trainers"
WORKER = "tests.reference.open_instruct_worker"
pytestmark = pytest.mark.reference


def told(folder: Path, trainer: str) -> dict[Thing, Outcome]:
    found = forecast(folder, loader_named(trainer)[0], Settings())
    return {one.thing: one.row.outcome for prospects in found.roles.values() for one in prospects}


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting("plain", "bf16", request.param, 2)


@pytest.fixture(scope="module")
def grpo(setting: Setting, deepspeed_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks: one step."""
    root = tmp_path_factory.mktemp("grpo") / "state"
    deepspeed_pool.run(f"{WORKER}:save", root, setting, world_size=2, timeout=100)
    return root


def test_its_grpo_is_a_run(grpo: Path, tmp_path: Path) -> None:
    found = run_at(grpo)
    assert found is not None
    assert (found.trainer.name, [*found.found], found.tracked()) == ("open-instruct", [3], 3)
    root = shutil.copytree(grpo, tmp_path / "run")
    assert verify(root / "global_step3", ReadOptions()).intact
    assert adopt(root / "global_step3").step == 3
    assert [step.state for step in listed_steps(root)] == ["committed"]


def test_it_resumes_as_it_is_said_to(grpo: Path, setting: Setting, deepspeed_pool: WorkerPool, tmp_path: Path) -> None:
    """Below stage 3 all ranks take rank 0's random states; without a value it stops."""
    ranks = deepspeed_pool.run(f"{WORKER}:resume", grpo, setting, world_size=2, timeout=100)
    own = setting.stage == 3
    assert ranks == [(3, 0), (3, int(own))]
    outcomes = told(grpo, "open-instruct")
    assert outcomes[Thing.RNG] is (Outcome.RESTORED if own else Outcome.ANEW)
    assert outcomes[Thing.COUNTERS] is outcomes[Thing.DATA] is outcomes[Thing.OPTIMIZER] is Outcome.RESTORED
    root = shutil.copytree(grpo, tmp_path / "run")
    for file in (root / "global_step3").glob("*_model_states.pt"):
        tree = torch.load(file, weights_only=False)
        del tree["training_step"]
        torch.save(tree, file)
    assert told(root, "open-instruct")[Thing.COUNTERS] is Outcome.REFUSED
    with pytest.raises(Exception, match="training_step"):
        deepspeed_pool.run(f"{WORKER}:resume", root, setting, world_size=2, timeout=100)


def test_it_goes_on_from_what_was_made_of_it(
    grpo: Path, setting: Setting, deepspeed_pool: WorkerPool, tmp_path: Path
) -> None:
    """Of one rank's files for two ranks, its client state in them."""
    options = ConvertOptions(to="deepspeed", write=WriteOptions(dp=1), fsync=False)
    convert_step(find(grpo, ReadOptions()), tmp_path / "one", options)
    step = find(tmp_path / "one", ReadOptions())
    ((_, place),) = step.models.items()
    assert open_checkpoint(place, step.reading("actor")).state.other["training_step"] == 3
    alone = Setting(setting.kind, setting.dtype, setting.stage, 1)
    tag = next(place.glob("global_step*"), place)
    assert deepspeed_pool.run(f"{WORKER}:resume", tag.parent, alone, world_size=1, timeout=100) == [(3, 0)]


def test_its_tuning_goes_on_from_completed_steps_alone(tmp_path: Path) -> None:
    """``accelerator.save_state(step_N)``, then ``COMPLETED``."""
    shutil.copytree(TRAINERS / "ac_ds2" / "step_3", tmp_path / "step_3")
    shutil.copytree(TRAINERS / "ac_ds2" / "step_3", tmp_path / "step_6", ignore=shutil.ignore_patterns("COMPLETED"))
    assert [(step.step, step.state) for step in listed_steps(tmp_path)] == [(3, "foreign"), (6, "partial")]
    found = run_at(tmp_path)
    assert found is not None
    assert found.trainer.name == "open-instruct-tuning"
    assert find(tmp_path, ReadOptions()).folder.name == "step_3"
    assert told(tmp_path / "step_3", "open-instruct-tuning")[Thing.COUNTERS] is Outcome.RESTORED
    assert {*told(tmp_path / "step_6", "open-instruct-tuning").values()} == {Outcome.ANEW}
