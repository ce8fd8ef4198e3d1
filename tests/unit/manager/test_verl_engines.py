"""Steps of verl's engines that save as Automodel and as torchtitan do, put together of what these two themselves wrote."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mcore_rlhf.convert import ConvertOptions, convert
from mcore_rlhf.errors import UsageError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.run.adopt import adopt
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing

GOLDENS = Path(__file__).parents[2] / "goldens"
AUTOMODELS = GOLDENS / "nemo_rl" / "v2_ws2" / "step_3" / "policy"
TITANS = GOLDENS / "torchtitan" / "checkpoint" / "step-3"


@pytest.fixture(params=["automodel", "torchtitan"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    step = tmp_path / "run" / "global_step_3"
    if request.param == "automodel":
        shutil.copytree(AUTOMODELS / "weights" / "model", step / "actor" / "model")
        shutil.copytree(AUTOMODELS / "optimizer" / "optim", step / "actor" / "optim")
    else:
        shutil.copytree(TITANS, step / "step-3")
    shutil.copyfile(GOLDENS / "trainers" / "nm_v1" / "step_3" / "train_dataloader.pt", step / "data.pt")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("3")
    return tmp_path / "run"


def outcomes(run: Path) -> dict[Thing, Outcome]:
    found = forecast(run, loader_named("verl")[0], Settings())
    return {one.thing: one.row.outcome for prospects in found.roles.values() for one in prospects}


def test_weights_and_optimizer_are_one_checkpoint(run: Path, tmp_path: Path) -> None:
    """Of Automodel's layout none was opened; and of either it was said that the loader stops."""
    (place,) = (path for path in (run / "global_step_3").iterdir() if path.is_dir())
    source = open_checkpoint(place, ReadOptions())
    assert {"exp_avg", "exp_avg_sq"} <= {*source.states}
    assert source.state.iteration == 3
    assert convert(place, tmp_path / "out", ConvertOptions(to="dcp", fsync=False)).lossless
    adopt(run / "global_step_3")


def test_its_loader_goes_on_without_random_states(run: Path) -> None:
    found = outcomes(run)
    assert {thing for thing, outcome in found.items() if outcome is Outcome.REFUSED} == set()
    assert found[Thing.WEIGHTS] is found[Thing.OPTIMIZER] is Outcome.RESTORED
    assert found[Thing.RNG] is Outcome.ANEW


def test_a_damaged_file_is_refused(run: Path) -> None:
    file = next((run / "global_step_3").glob("*/**/.metadata"))
    file.write_bytes(bytes(file.stat().st_size))
    assert outcomes(run)[Thing.OPTIMIZER] is Outcome.REFUSED


def test_two_roles_of_which_one_is_called_model_stay_two(tmp_path: Path) -> None:
    for name in ("model", "critic"):
        shutil.copytree(TITANS, tmp_path / name)
    with pytest.raises(UsageError, match="holds several checkpoints: critic, model"):
        open_checkpoint(tmp_path, ReadOptions())
