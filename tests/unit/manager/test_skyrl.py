"""Runs of SkyRL: its roles by their own names, its tracker, and what it asks for beside the models."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_rlhf.errors import Incomplete, LayoutMismatch, Unsupported, UsageError
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.run.adopt import adopt
from mcore_rlhf.manager.runs import listed_steps, run_at, unmet
from mcore_rlhf.manager.subject import chosen_step, find
from mcore_rlhf.manager.will_resume import forecast, forecast_for_its_writer, loader_named
from mcore_rlhf.storage.dcp.rankfile import read_rank_file
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from mcore_rlhf.verify.checkpoint import verify
from tests.unit.manager.test_into_run import RUNS, VERL, into

GOLDEN, STEP = RUNS / "skyrl_fsdp2", "global_step_3"
_ANEW, _REFUSED, _RESTORED = Outcome.ANEW, Outcome.REFUSED, Outcome.RESTORED


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What SkyRL saved, with a critic beside the policy."""
    root = tmp_path / "run"
    shutil.copytree(GOLDEN, root)
    shutil.copytree(root / STEP / "policy", root / STEP / "critic")
    return root


def outcomes(root: Path, world: int = 2, **settings: object) -> dict[Thing, Outcome]:
    values = {name.replace("__", "."): value for name, value in settings.items()}
    found = forecast(root, loader_named("skyrl")[0], Settings(values), world)
    assert [*found.roles] == ["actor", "critic"]
    return {one.thing: one.row.outcome for one in found.roles["actor"]}


def equal(a: Path, b: Path) -> None:
    """In everything, the optimizer's too."""
    first, second = (open_checkpoint(path, ReadOptions()) for path in (a, b))
    assert {*first.catalog} == {*second.catalog}
    assert first.state.iteration == second.state.iteration == 3
    assert [(one.state.scheduler or {})["last_epoch"] for one in (first, second)] == [3, 3]


def test_its_roles_are_policy_and_critic(run: Path, tmp_path: Path) -> None:
    """verl's row took its steps, of whose roles a conversion then lost the policy."""
    found = run_at(run)
    assert found is not None
    assert (found.trainer.name, found.tracked()) == ("skyrl", 3)
    (step,) = listed_steps(run)
    assert (step.state, step.roles) == ("foreign", ("actor", "critic"))
    assert [*find(run, ReadOptions()).models] == ["actor", "critic"]
    done = into(run, tmp_path / "new", "skyrl")
    assert done.lossless
    assert (tmp_path / "new" / "latest_ckpt_global_step.txt").read_text() == "3"
    for name in ("trainer_state.pt", "data.pt"):
        assert (tmp_path / "new" / STEP / name).read_bytes() == (run / STEP / name).read_bytes()
    assert {*outcomes(tmp_path / "new").values()} == {_RESTORED}
    again = into(tmp_path / "new", tmp_path / "again", "skyrl", dp=3)
    assert [*again.jobs] == ["actor", "critic"]
    extra = read_rank_file(tmp_path / "again" / STEP / "policy", "extra_state_world_size_3_rank_2.pt").tree
    assert [extra[key] for key in ("rank", "world_size", "fsdp_strategy", "client_state")] == [2, 3, "fsdp", {}]


@pytest.mark.parametrize("through", ["verl", "megatron", "hf", "dcp", "rlinf"])
def test_there_and_back(through: str, run: Path, tmp_path: Path) -> None:
    """By a trainer's run or by a step of ours: the place in the data and what it keeps beside go along."""
    write = {"with_optimizer": True} if through == "hf" else {}
    into(run, tmp_path / "there", through, **write)
    back = into(tmp_path / "there", tmp_path / "back", "skyrl", dp=2, like=str(run))
    assert not any("data.pt" in text for text in back.report.lost)
    equal(run / STEP / "policy", tmp_path / "back" / STEP / "policy")
    assert unmet(tmp_path / "back" / STEP) == []
    counted = read_rank_file(tmp_path / "back" / STEP, "trainer_state.pt").tree
    assert counted["global_step"] == 3


def test_fsdp1_becomes_what_it_loads(tmp_path: Path) -> None:
    """SkyRL has FSDP2 alone: flat pieces of verl's FSDP1 would be loaded as other parameters' states."""
    step = tmp_path / "verl" / STEP
    shutil.copytree(VERL.parent / "fsdp1_flat_ws3", step / "actor")
    done = into(tmp_path / "verl", tmp_path / "new", "skyrl")
    source = open_checkpoint(tmp_path / "new" / STEP / "policy", ReadOptions())
    assert any("SkyRL's rank files" in text for _, text in source.notes.lines)
    optimizer = read_rank_file(tmp_path / "new" / STEP / "policy", "optim_world_size_3_rank_0.pt").tree
    assert len(optimizer["state"]) == sum(spec.trainable for spec in done.jobs["actor"].source.model.params)
    with pytest.raises(UsageError, match="was not written by skyrl"):
        into(tmp_path / "verl", tmp_path / "other", "skyrl", like=str(step / "actor"))


def test_tied_weights_are_trained_apart(tmp_path: Path) -> None:
    """As SkyRL makes two parameters of one, its loader asks for as many states; and what it saves is no longer tied."""
    step = tmp_path / "verl" / STEP
    shutil.copytree(VERL.parent / "fsdp2_tied_ws2", step / "actor")
    done = into(tmp_path / "verl", tmp_path / "new", "skyrl")
    assert any("SkyRL trains lm_head.weight apart" in text for _, text in done.jobs["actor"].report.lines)
    made = open_checkpoint(tmp_path / "new" / STEP / "policy", ReadOptions())
    assert not made.model.tied
    names = {name.param for name in made.catalog if name.state == "exp_avg"}
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= names
    optimizer = read_rank_file(tmp_path / "new" / STEP / "policy", "optim_world_size_2_rank_0.pt").tree
    assert len(optimizer["param_groups"][0]["params"]) == len(optimizer["state"]) == len(names)


def test_weights_alone_have_a_schedule_that_it_can_load(run: Path, tmp_path: Path) -> None:
    """It hands the schedule whatever its file has; nothing of it is an error."""
    into(run, tmp_path / "new", "skyrl", no_optimizer=True)
    assert outcomes(tmp_path / "new")[Thing.OPTIMIZER] is _ANEW
    extra = read_rank_file(tmp_path / "new" / STEP / "policy", "extra_state_world_size_2_rank_0.pt").tree
    parameter = torch.nn.Parameter(torch.zeros(1))
    schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([parameter], 0.5), lambda step: 1 / (1 + step))
    schedule.load_state_dict(dict(extra["lr_scheduler"]))
    assert (schedule.last_epoch, schedule.base_lrs) == (3, [0.5])


def test_what_is_missing_is_named(run: Path) -> None:
    step = run / STEP
    (step / "policy" / "optim_world_size_2_rank_1.pt").unlink()
    with pytest.raises(Incomplete, match=r"optim_world_size_2_rank_1\.pt: missing; 2 ranks"):
        open_checkpoint(step / "policy", ReadOptions())
    with pytest.raises(Incomplete, match="optim_world_size_2_rank_1"):
        adopt(step)
    assert outcomes(run)[Thing.OPTIMIZER] is _ANEW
    (step / "trainer_state.pt").unlink()
    assert "trainer_state.pt" in unmet(step)[0].message
    assert {*outcomes(run).values()} == {_REFUSED}


def test_a_step_of_another_number_is_refused(run: Path) -> None:
    (run / STEP).rename(run / "global_step_5")
    (run / "latest_ckpt_global_step.txt").write_text("5")
    with pytest.raises(LayoutMismatch, match="global_step is 3, and the folder is global_step_5"):
        find(run, ReadOptions())


def test_files_of_verl_beside_its_own_are_named(run: Path) -> None:
    shutil.copytree(run / STEP / "policy", run / STEP / "actor")
    with pytest.raises(LayoutMismatch, match="SkyRL and of verl"):
        find(run, ReadOptions())


def test_its_tracker_says_which_step_is_meant(run: Path) -> None:
    shutil.copytree(run / STEP, run / "global_step_4")
    torch.save({"global_step": 4}, run / "global_step_4" / "trainer_state.pt")
    chosen = chosen_step(run)
    assert chosen is not None
    assert (chosen.step, chosen.why) == (3, "tracker")


@pytest.mark.parametrize(
    ("name", "tracker", "why"),
    [
        ("global_step_20", "3", "more than ckpt_interval (10) steps ahead"),
        ("global_step_3.old", "3", "a ValueError"),
        ("", "9", "a FileNotFoundError"),
        ("", "latest", "a ValueError"),
    ],
)
def test_it_stops_at_a_root_that_it_does_not_believe(name: str, tracker: str, why: str, run: Path) -> None:
    if name:
        (run / name).mkdir()
    (run / "latest_ckpt_global_step.txt").write_text(tracker)
    found = forecast(run, loader_named("skyrl")[0], Settings())
    assert found.taken.stops
    assert why in found.taken.why


DAMAGES: dict[str, tuple[Callable[[Path], object], Thing, Outcome]] = {
    "no data": (lambda step: (step / "data.pt").unlink(), Thing.DATA, _ANEW),
    "broken data": (lambda step: (step / "data.pt").write_bytes(b""), Thing.DATA, _ANEW),
    "no extra": (lambda step: (step / "policy" / "extra_state_world_size_2_rank_1.pt").unlink(), Thing.WEIGHTS, _REFUSED),
    "empty optimizer": (
        lambda step: torch.save({}, step / "policy" / "optim_world_size_2_rank_0.pt"), Thing.OPTIMIZER, _ANEW,
    ),
    "no rng": (
        lambda step: torch.save({"lr_scheduler": {}}, step / "policy" / "extra_state_world_size_2_rank_0.pt"),
        Thing.RNG, _ANEW,
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_its_loader_makes_of_less(damage: str, run: Path) -> None:
    assert {*outcomes(run).values()} == {_RESTORED}
    break_it, thing, outcome = DAMAGES[damage]
    break_it(run / STEP)
    assert outcomes(run)[thing] is outcome


def test_what_a_configuration_changes(run: Path) -> None:
    assert outcomes(run, trainer__placement__policy_num_gpus_per_node=2)[Thing.WEIGHTS] is _RESTORED
    assert {*outcomes(run, trainer__resume_mode="none").values()} == {_ANEW}
    assert {*outcomes(run, trainer__fully_async__max_staleness_steps=4).values()} == {_REFUSED}
    torch.save({"consumed_uids": ["a"], "filtered_uids": [], "epoch": 0}, run / STEP / "fully_async_state.pt")
    assert {*outcomes(run, trainer__fully_async__max_staleness_steps=4).values()} == {_RESTORED}


def test_a_bias_that_its_critic_has_not_is_refused(run: Path, tmp_path: Path) -> None:
    into(run, tmp_path / "hf", "hf", with_optimizer=False)
    from safetensors.torch import load_file, save_file

    file = tmp_path / "hf" / STEP / "critic" / "model.safetensors"
    held = load_file(file)
    held.pop("lm_head.weight")
    save_file({**held, "score.weight": torch.ones(1, 16), "score.bias": torch.ones(1)}, tmp_path / "model.safetensors")
    folder = tmp_path / "critic"
    folder.mkdir()
    (tmp_path / "model.safetensors").rename(folder / "model.safetensors")
    shutil.copyfile(tmp_path / "hf" / STEP / "critic" / "config.json", folder / "config.json")
    with pytest.raises(Unsupported, match=r"score\.bias"):
        into(folder, tmp_path / "new", "skyrl", role="critic")
    save_file({**held, "score.weight": torch.ones(1, 16)}, folder / "model.safetensors")
    into(folder, tmp_path / "new", "skyrl", role="critic")
    step = next((tmp_path / "new").glob("global_step_*"))
    assert "value_head.weight" in read_rank_file(step / "critic", "model_world_size_1_rank_0.pt").tree
    assert "score.weight" in open_checkpoint(step / "critic", ReadOptions()).model.shapes


def test_doctor_knows_whose_it_is(run: Path) -> None:
    found = forecast_for_its_writer(run)
    assert found is not None
    assert found.loader.trainer.name == "skyrl"
    assert verify(run / STEP / "policy", ReadOptions()).intact
