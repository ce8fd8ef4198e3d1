"""A step that ROLL saved: Megatron's parts in folders of their own, without arguments, at iteration 1 whatever its step is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from mcore_rlhf.cli.app import app
from mcore_rlhf.convert import convert
from mcore_rlhf.core.catalog import MASTER, PARAM
from mcore_rlhf.errors import CheckpointError, Incomplete, Unsupported, UsageError
from mcore_rlhf.families.inventory import inventory_of
from mcore_rlhf.families.megatron.state import MegatronState
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.convert_step import StepJob, convert_step
from mcore_rlhf.manager.runs import goes_without, listed_steps
from mcore_rlhf.manager.subject import find
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.storage.manifest import STEP_MANIFEST
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.helpers.damage import edit_args
from tests.helpers.plain_load import plain_load, plain_save

GOLDEN, STEP, ITERATION = Path(__file__).parents[2] / "goldens" / "trainers" / "roll", "checkpoint-3", "iter_0000001"
WEIGHTS = f"{ITERATION}/mp_rank_00/model_optim_rng.pt"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "run"))


def test_all_parts_are_one_checkpoint(root: Path) -> None:
    assert [step.step for step in listed_steps(root)] == [4]
    for given in (root / STEP, root / STEP / ITERATION):
        found = open_checkpoint(given, ReadOptions())
        assert (found.state.iteration, found.optimizer, found.state.by_steps) == (4, "distributed", True)
        assert {PARAM, MASTER} <= {PARAM, *found.states}
        assert (found.state.scheduler or {})["num_steps"] == 4
        assert [found.state.args[name] for name in ("num_layers", "num_query_groups", "swiglu")] == [2, 2, True]
    assert verify(root / STEP, ReadOptions(), Depth.DEEP).intact
    told = forecast(root, loader_named("roll")[0], Settings({}))
    assert told.resumes
    assert {one.thing for one in told.roles["actor"]} >= {Thing.WEIGHTS, Thing.OPTIMIZER, Thing.SCHEDULER, Thing.RNG}


def test_a_tracker_of_an_iteration_that_is_not_there_stops_its_loader(root: Path) -> None:
    (root / STEP / "latest_checkpointed_iteration.txt").write_text("2")
    said = "latest_checkpointed_iteration.txt names iter_0000002, which is not there: ROLL finds no weights"
    assert open_checkpoint(root / STEP, ReadOptions()).notes.contradictions == [said]
    told = forecast(root, loader_named("roll")[0], Settings({}))
    assert told.stops
    assert {one.why for one in told.roles["actor"]} == {said}


def test_random_states_of_its_ranks_are_kept(root: Path, tmp_path: Path) -> None:
    written = WriteOptions(rng="keep", global_batch_size=4)
    done = convert(root / STEP, tmp_path / "out", ConvertOptions(to="megatron", fsync=False, write=written))
    made = open_checkpoint(tmp_path / "out", ReadOptions()).state
    assert (done.lossless, made.iteration, made.args["consumed_train_samples"]) == (True, 4, 16)


@pytest.mark.parametrize("batch", [None, 4])
def test_megatrons_own_data_go_forward_by_samples(root: Path, tmp_path: Path, batch: int | None) -> None:
    """Which it counts where somebody says how many a step has; both loaders begin them again else, and are said to."""
    for to in ("megatron-lm", "megatron-bridge"):
        written = ConvertOptions(to=to, fsync=False, write=WriteOptions(global_batch_size=batch))
        convert_step(find(root / STEP, ReadOptions()), tmp_path / to, written)
        (told,) = forecast(tmp_path / to, loader_named(to)[0], Settings({})).roles.values()
        (data,) = (one.row.outcome for one in told if one.thing is Thing.DATA)
        assert data is (Outcome.RESTORED if batch else Outcome.ANEW)


def test_weights_alone(root: Path, tmp_path: Path) -> None:
    """Saved with ``save_only_model``, or asked for so."""
    alone = open_checkpoint(root / STEP, ReadOptions(optimizer=False))
    shutil.rmtree(root / STEP / ITERATION / "dist_optimizer")
    found = open_checkpoint(root / STEP, ReadOptions())
    assert (found.optimizer, alone.states, found.state.iteration, alone.state.iteration) == (None, (), 4, 4)
    assert found.model == replace(alone.model)


def test_adapters_are_called_so(root: Path) -> None:
    adapters = root / STEP / "default"
    shutil.copytree(root / STEP / ITERATION / "mp_rank_00", adapters / ITERATION / "mp_rank_00")
    shutil.rmtree(root / STEP / ITERATION / "mp_rank_00")
    shutil.copy(root / STEP / "mca_config.json", adapters)
    (adapters / "latest_checkpointed_iteration.txt").write_text("1")
    (adapters / "adapter_config.json").write_text("{}")
    for given in (root / STEP, adapters, adapters / ITERATION):
        with pytest.raises(Unsupported, match="a LoRA of ROLL's"):
            open_checkpoint(given, ReadOptions())


def test_steps_of_mcore_adapters_own_trainer(root: Path) -> None:
    """Random states and counters lie elsewhere in them."""
    shutil.move(root / STEP / "rng_state" / "rng_state_0.pth", root / STEP / "rng_state_0.pth")
    shutil.rmtree(root / STEP / "pipeline")
    (root / STEP / "trainer_state.json").write_text('{"global_step": 3}')
    ((step,),) = [listed_steps(root)]
    assert (step.step, step.state) == (3, "foreign")
    whole = open_checkpoint(GOLDEN / STEP, ReadOptions())
    assert inventory_of(open_checkpoint(root / STEP, ReadOptions())).keys() >= inventory_of(whole).keys()


def gone(name: str) -> Callable[[Path], object]:
    return lambda step: (step / name).unlink()


def described(**fields: object) -> Callable[[Path], object]:
    def change(step: Path) -> None:
        file = step / "mca_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (gone(WEIGHTS), "model_optim_rng.pt"), (gone(f"{ITERATION}/dist_optimizer/.metadata"), ".metadata"),
        (gone(f"{ITERATION}/dist_optimizer/__0_0.distcp"), "__0_0.distcp"),
        (lambda step: (step / "scheduler.pt").write_bytes(bytes(99)), "scheduler.pt"),
        (lambda step: (step / "rng_state" / "rng_state_0.pth").write_bytes(b"x"), "rng_state_0.pth"),
        (lambda step: (step / "mca_config.json").write_text("["), "mca_config.json"),
        (described(num_layers=3), "3"), (described(tensor_model_parallel_size=4), "4"), (described(hidden_size=10**12), "hidden"),
    ],
)  # fmt: skip
def test_what_is_damaged_is_named(root: Path, change: Callable[[Path], object], named: str) -> None:
    change(root / STEP)
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(root / STEP, ReadOptions())


def test_an_optimizer_of_its_own_file_is_looked_into(root: Path) -> None:
    shutil.rmtree(root / STEP / ITERATION / "dist_optimizer")
    shutil.copy(root / STEP / "scheduler.pt", root / STEP / ITERATION / "mp_rank_00" / "optimizer.pt")
    with pytest.raises(CheckpointError, match="0 of the 0 param groups"):
        open_checkpoint(root / STEP, ReadOptions())


def test_a_plain_optimizer_of_each_rank_is_missed(root: Path, tmp_path: Path) -> None:
    """One of several, and all of them, where the schedule is there, which ROLL saves with them."""
    into_run(root / STEP, tmp_path / "new", tp=2, dp=1)
    plain = WriteOptions(tp=2, dp=1, optimizer="plain", global_batch_size=4)
    convert(root / STEP, tmp_path / "plain", ConvertOptions(to="megatron", fsync=False, write=plain))
    step = tmp_path / "new" / STEP
    shutil.rmtree(step / ITERATION / "dist_optimizer")
    (step / STEP_MANIFEST).unlink()
    files = [step / ITERATION / f"mp_rank_0{rank}" / "optimizer.pt" for rank in range(2)]
    for file in files:
        written = tmp_path / "plain" / "iter_0000004" / file.parent.name / "model_optim_rng.pt"
        plain_save(plain_load(written)["optimizer"], file)
    assert open_checkpoint(step, ReadOptions()).optimizer == "plain"
    assert verify(step, ReadOptions(), Depth.DEEP).intact
    files[1].unlink()
    with pytest.raises(Incomplete, match=r"mp_rank_01/optimizer\.pt: missing, and other ranks have theirs"):
        open_checkpoint(step, ReadOptions())
    files[0].unlink()
    assert "missing, the optimizer" in verify(step, ReadOptions()).problems.describe()
    (step / "scheduler.pt").unlink()
    assert verify(step, ReadOptions()).intact  # as save_only_model leaves it


@pytest.mark.parametrize("called", ["best", "checkpoint-3-kept"])
def test_a_step_of_another_name_is_at_its_own_iteration(root: Path, called: str) -> None:
    other = (root / STEP).rename(root / called)
    assert open_checkpoint(other, ReadOptions()).state.iteration == 4  # its counters say 3, from 0 on
    shutil.rmtree(other / "pipeline")
    found = open_checkpoint(other, ReadOptions())
    assert (found.state.iteration, "as its schedule counts" in str(found.notes.lines)) == (4, True)
    (other / "pipeline").mkdir()
    (other / "pipeline" / "worker_state_pipeline.json").write_text('{"step": "x"}')
    with pytest.raises(CheckpointError, match=r"worker_state_pipeline\.json: step should be a whole number"):
        open_checkpoint(other, ReadOptions())


def test_a_rank_without_random_states_is_named(root: Path) -> None:
    (root / STEP / "rng_state" / "rng_state_0.pth").unlink()
    assert goes_without(root / STEP)[0].startswith("rng_state/rng_state_0.pth: without it")
    said = "missing  rng_state/rng_state_0.pth: without it ROLL"
    for command in (["verify", str(root)], ["adopt", str(root / STEP)], ["verify", str(root / STEP)]):
        assert said in CliRunner().invoke(app, command, prog_name="mcore-rlhf").output, command


def test_one_process_of_mcore_adapters_trainer(root: Path) -> None:
    shutil.move(root / STEP / "rng_state" / "rng_state_0.pth", root / STEP / "rng_state.pth")
    assert [*open_checkpoint(root / STEP, ReadOptions()).family.shards[0].top] == ["rng_state"]


def into_run(source: Path, place: Path, **how: object) -> StepJob:
    written = WriteOptions(**how)  # type: ignore[arg-type]
    return convert_step(find(source, ReadOptions()), place, ConvertOptions(to="roll", fsync=False, write=written))


@pytest.mark.parametrize("samples", [16, 17])
def test_samples_are_steps_or_lost(tmp_path: Path, samples: int) -> None:
    golden = Path(shutil.copytree(GOLDEN.parents[1] / "megatron" / "tp1_bf16_do", tmp_path / "megatron"))
    edit_args(golden, consumed_train_samples=samples)
    done = into_run(golden, tmp_path / "new")
    said = "as the 2 steps" if samples == 16 else "consumed_train_samples: 17, and ROLL counts steps alone"
    assert said in str(done.jobs["actor"].report.lines)
    assert done.lossless == (samples == 16)


def test_its_run_is_written(root: Path, tmp_path: Path) -> None:
    done = into_run(root / STEP, tmp_path / "new")
    assert (done.lossless, done.published) == (True, tmp_path / "new" / STEP)
    old, new = (open_checkpoint(run / STEP, ReadOptions()) for run in (root, tmp_path / "new"))
    assert inventory_of(old).keys() == inventory_of(new).keys()
    assert (new.state.iteration, new.state.scheduler, new.state.groups) == (4, old.state.scheduler, old.state.groups)
    held = torch.load(tmp_path / "new" / STEP / WEIGHTS)  # of weights alone, as ROLL's load asks for
    assert [*held] == ["model"]


def test_how_the_optimizer_lies_is_as_like_shows(root: Path, tmp_path: Path) -> None:
    into_run(root / STEP, tmp_path / "shows", optimizer_sharding="fully_reshardable")
    into_run(root / STEP, tmp_path / "new", like=str(tmp_path / "shows"))
    family = MegatronState.of(open_checkpoint(tmp_path / "new" / STEP, ReadOptions()))
    assert family is not None
    assert family.sharding == "fully_reshardable"


def test_a_step_of_another_trainers_run_becomes_one(root: Path, tmp_path: Path) -> None:
    convert(
        root / STEP,
        tmp_path / "core",
        ConvertOptions(to="megatron", fsync=False, write=WriteOptions(global_batch_size=4)),
    )
    into_run(tmp_path / "core", tmp_path / "new", global_batch_size=4)
    counted = json.loads((tmp_path / "new" / STEP / "pipeline" / "worker_state_pipeline.json").read_text())
    config = json.loads((tmp_path / "new" / STEP / "mca_config.json").read_text())
    assert (counted, config["num_layers"], config["swiglu"]) == ({"step": 3}, 2, True)
    new, old = (open_checkpoint(run / STEP, ReadOptions()) for run in (tmp_path / "new", root))
    assert new.state.scheduler == old.state.scheduler
    with pytest.raises(UsageError, match="use_distributed_optimizer: true"):
        into_run(root / STEP, tmp_path / "plain", optimizer="plain")
