"""``will-resume --trainer verl`` says what verl's own manager does with folders from which one thing was taken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from mcore_rlhf.trainers.settings_file import read_settings
from tests.helpers.damage import gone, zeroed
from tests.trainers.test_verl import Lab, lab

__all__ = ["lab"]  # a fixture
Change = Callable[[Path], object]


CASES: dict[str, tuple[Change, list[str] | None, int]] = {
    "whole": (lambda actor: None, None, 2),
    "a rank's optimizer gone": (gone("optim_*_rank_1.pt"), None, 2),
    "a rank's rest gone": (gone("extra_state_*_rank_1.pt"), None, 2),
    "a rank's model of zeros": (zeroed("model_*_rank_0.pt"), None, 2),
    "the optimizer not wanted": (lambda actor: None, ["model", "extra"], 2),
    "the rest not wanted": (lambda actor: None, ["model", "optimizer"], 2),
    "the optimizer gone and not wanted": (gone("optim_*"), ["model", "extra"], 2),
    "by one rank": (lambda actor: None, None, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_verl(lab: Lab, name: str, tmp_path: Path) -> None:
    change, contents, world = CASES[name]
    source, wanted = lab.trained("0.9.1")
    step, file = tmp_path / "global_step_3", tmp_path / "config.yaml"
    shutil.copytree(source, step / "actor")
    (step / "data.pt").write_bytes((step / "actor" / "extra_state_world_size_2_rank_0.pt").read_bytes())
    change(step / "actor")
    checkpoint = {} if contents is None else {"load_contents": contents}
    file.write_text(json.dumps({"actor_rollout_ref": {"actor": {"checkpoint": checkpoint}}}))
    found = forecast(step, loader_named("verl")[0], read_settings(file), world)
    told = {one.thing: one.row.outcome for one in found.roles["actor"]}
    how = {} if contents is None else {"load_contents": contents}
    try:
        seen = lab.carry_out("0.9.1", world, [("load", step / "actor"), ("train", 2)], seed=9, **how)
    except AssertionError:  # a rank failed
        assert found.stops, told
        return
    assert not found.stops, told
    first, second = zip(seen, wanted, strict=True)
    assert (told[Thing.WEIGHTS] is Outcome.RESTORED) == (first[0]["loss"] == first[1]["loss"])
    assert (told[Thing.RNG] is Outcome.RESTORED) == (first[0]["drawn"] == first[1]["drawn"])
    assert (told[Thing.SCHEDULER] is Outcome.RESTORED) == (first[0]["lr"] == first[1]["lr"])
    if told[Thing.SCHEDULER] is Outcome.RESTORED:
        assert (told[Thing.OPTIMIZER] is Outcome.RESTORED) == (second[0]["loss"] == second[1]["loss"])
    assert found.resumes == (name == "whole")


@pytest.mark.parametrize(("saved", "now"), [("fsdp2", "fsdp"), ("fsdp", "fsdp2")])
def test_verl_with_the_other_fsdp(lab: Lab, saved: str, now: str, tmp_path: Path) -> None:
    step = tmp_path / "global_step_3"
    shutil.copytree(lab.trained("0.9.1", strategy=saved)[0], step / "actor")
    told = {
        how: forecast(step, loader_named("verl")[0], Settings({"actor_rollout_ref.actor.strategy": how}), 2).stops
        for how in (saved, now)
    }
    assert told == {saved: False, now: True}
    with pytest.raises(AssertionError):  # a rank failed
        lab.carry_out("0.9.1", 2, [("load", step / "actor"), ("train", 2)], seed=9, strategy=now)


def test_verl_in_another_dtype(lab: Lab, tmp_path: Path) -> None:
    """What is stored in float32 goes on in ``model_dtype``, and verl says nothing."""
    source, _ = lab.trained("0.9.1")
    actor, again = tmp_path / "global_step_3" / "actor", tmp_path / "again"
    shutil.copytree(source, actor)
    lab.carry_out("0.9.1", 2, [("load", actor), ("save", again)], seed=9, dtype="bfloat16")
    for name in ("model_world_size_2_rank_0.pt", "optim_world_size_2_rank_0.pt"):
        before, now = (_tensors(torch.load(folder / name, weights_only=False)) for folder in (actor, again))
        assert all(torch.equal(one.to(torch.bfloat16), now[key]) for key, one in before.items())
    settings = Settings({"actor_rollout_ref.actor.fsdp_config.model_dtype": "bf16"})
    found = forecast(actor.parent, loader_named("verl")[0], settings)
    (told,) = [one for one in found.roles["actor"] if one.thing is Thing.DTYPE]
    assert told.why.startswith("stored as float32, cast to the bfloat16 of model_dtype")
    assert not found.resumes


def _tensors(saved: dict[str, Any]) -> dict[object, torch.Tensor]:
    """A rank's own part of each weight, or moment, of a rank's file."""
    if "state" in saved:
        saved = {(n, key): of[key] for n, of in saved["state"].items() for key in ("exp_avg", "exp_avg_sq")}
    return {key: one.to_local() for key, one in saved.items()}
