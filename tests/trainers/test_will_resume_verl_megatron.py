"""``will-resume --trainer verl`` says what verl's own ``MegatronCheckpointManager`` does with steps from which one thing was taken.

One rank saves three steps; of its step, and of what ``--to verl`` made of it, copies lack a file, a key, or a name of a tensor, or have a
file of zeros. Of each copy a new run loads and sees two steps. What it restored shows in them: the weights in the first loss, the schedule
in the rate, the random states in what is drawn, the optimizer in the second loss.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from tests.helpers.one_key import copies_without
from tests.trainers.test_verl_megatron import Lab, lab
from tests.trainers.test_will_resume_keys import _NOT_LOOKED_INTO

__all__ = ["lab"]  # a fixture
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
PARTS = ("model", "optimizer", "extra")
HOW: dict[str, Any] = {"parallel": {}, "draw": True}
DIST = {"actor.megatron.use_dist_checkpointing": True}
SWITCHED = {**DIST, "actor.optim.use_checkpoint_opt_param_scheduler": True}
Restored = dict[Thing, bool]


@pytest.fixture(scope="module")
def steps(lab: Lab) -> tuple[list[Path], list[dict[str, Any]]]:
    """The role's folders of verl's own step and of ours, and what its run saw in two steps more."""
    run = lab.folder / "verls" / "global_step_3" / "actor"
    seen = lab.carry_out(1, [("train", 3), ("save", run), ("train", 2)], **HOW)
    ours, _ = lab.convert(run, "verl", "ours", tp=1)
    (ours / "global_step_3" / "manifest.json").unlink()
    return [run, ours / "global_step_3" / "actor"], seen[3:]


def restored(seen: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> Restored:
    (first, second), (before, after) = seen, wanted
    found = {
        Thing.WEIGHTS: first["loss"] == before["loss"],
        Thing.SCHEDULER: first["lr"] == before["lr"],
        Thing.RNG: first["drawn"] == before["drawn"],
    }
    if found[Thing.WEIGHTS] and found[Thing.SCHEDULER]:
        found[Thing.OPTIMIZER] = second["loss"] == after["loss"]
    return found


def compared(
    lab: Lab, copies: list[tuple[Path, str]], wanted: list[dict[str, Any]], settings: dict[str, object], **how: Any
) -> list[object]:
    """Of each copy what was said and what was seen, where the two are not the same."""
    seen = lab.carry_out(1, [("attempt", copy) for copy, _ in copies], **HOW, **how)
    loader, wrong = loader_named("verl")[0], list[object]()
    for (copy, what), live in zip(copies, seen, strict=True):
        found = forecast(copy.parent, loader, Settings(settings), 1)
        told = {one.thing: one for one in found.roles["actor"]}
        was = {} if "failed" in live else restored(live["steps"], wanted)
        same = found.stops == ("failed" in live)
        same = same and all((told[thing].row.outcome is Outcome.RESTORED) == one for thing, one in was.items())
        if not same and not found.doubtful:
            losses = [(one.thing.value, one.why) for one in told.values() if one.row.outcome.is_loss]
            wrong.append((what, live.get("failed", was), losses))
    return wrong


def copied(role: Path, folder: Path) -> Path:
    return Path(shutil.copytree(role, folder / "global_step_3" / "actor"))


def without_files(role: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    """Copies of a step, each without a file of each kind in each part, or with one of zeros."""

    def zeroed(path: Path) -> None:
        path.write_bytes(bytes(path.stat().st_size))

    for part in PARTS:
        kinds = {file.suffix or file.name: file for file in sorted((role / part / "dist_ckpt").iterdir())}
        for file in kinds.values():
            for change in (Path.unlink, zeroed):
                copy = copied(role, folder / f"{part}{file.name}{change.__name__}")
                change(copy / file.relative_to(role))
                yield copy, f"{part} {file.name} {change.__name__}"


@pytest.mark.parametrize("whose", [0, 1], ids=["verl's", "ours"])
def test_a_file_less(lab: Lab, steps: tuple[list[Path], list[dict[str, Any]]], whose: int, tmp_path: Path) -> None:
    roles, wanted = steps
    copies = [(copied(roles[whose], tmp_path / "whole"), "nothing")]
    copies += without_files(roles[whose], tmp_path)
    wrong = compared(lab, copies, wanted, SWITCHED)
    assert not wrong, "\n".join(map(str, wrong))
    assert len(copies) > 15


def test_a_key_less(lab: Lab, steps: tuple[list[Path], list[dict[str, Any]]], tmp_path: Path) -> None:
    roles, wanted = steps
    taken = copies_without(roles[1].parents[1], tmp_path, _NOT_LOOKED_INTO)
    copies = [(copy / "global_step_3" / "actor", what) for copy, what in taken if ": " in what]
    wrong = compared(lab, copies, wanted, SWITCHED)
    assert not wrong, "\n".join(map(str, wrong))
    assert len(copies) > 30


CONFIGURED: dict[str, tuple[dict[str, object], dict[str, Any]]] = {
    "the schedule is not asked for": (DIST, {"schedule": False}),
    "the optimizer not wanted": (
        {**SWITCHED, "actor.checkpoint.load_contents": ["model", "extra"]}, {"load_contents": ["model", "extra"]},
    ),
    "the rest not wanted": (
        {**SWITCHED, "actor.checkpoint.load_contents": ["model", "optimizer"]}, {"load_contents": ["model", "optimizer"]},
    ),
    "the weights not wanted": (
        {**SWITCHED, "actor.checkpoint.load_contents": ["optimizer", "extra"]}, {"load_contents": ["optimizer", "extra"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGURED)
def test_what_the_configuration_leaves_out(
    lab: Lab, steps: tuple[list[Path], list[dict[str, Any]]], name: str, tmp_path: Path
) -> None:
    settings, how = CONFIGURED[name]
    roles, wanted = steps
    copies = [(copied(role, tmp_path / str(number)), name) for number, role in enumerate(roles)]
    wrong = compared(lab, copies, wanted, settings, **how)
    assert not wrong, "\n".join(map(str, wrong))


def test_layouts_that_verl_refuses(lab: Lab, steps: tuple[list[Path], list[dict[str, Any]]], tmp_path: Path) -> None:
    """The older layout; and its own optimizer by parameters, beside weights of a gated model."""
    roles, wanted = steps
    older = copied(roles[1], tmp_path / "older")
    for part in PARTS:
        shutil.copytree(older / part / "dist_ckpt", older / "dist_ckpt", dirs_exist_ok=True)
        shutil.rmtree(older / part)
    fully, _ = lab.convert(roles[0], "verl", "fully", tp=1, optimizer_sharding="fully_reshardable")
    (fully / "global_step_3" / "manifest.json").unlink()
    copies = [(older, "layout v1"), (fully / "global_step_3" / "actor", "fully_reshardable")]
    wrong = compared(lab, copies, wanted, SWITCHED)
    without = ["optimizer", "extra"]
    alone = {**SWITCHED, "actor.checkpoint.load_contents": without}
    wrong += compared(lab, copies[1:], wanted, alone, load_contents=without)
    assert not wrong, "\n".join(map(str, wrong))


def test_weights_that_a_bridge_loads(lab: Lab, tmp_path: Path) -> None:
    """verl's default: its own step and ours with weights as Hugging Face's files, whole, without a file, or without a weight."""
    from safetensors.torch import load_file, save_file

    how = {**HOW, "base": str(lab.base("bridged"))}
    run = lab.folder / "bridged" / "global_step_3" / "actor"
    wanted = lab.carry_out(1, [("train", 3), ("save", run), ("train", 2)], **how)[3:]
    ours, _ = lab.convert(run, "verl", "bridged-ours", like=str(run))
    (ours / "global_step_3" / "manifest.json").unlink()
    copies = []
    for whose, role in (("verl's", run), ("ours", ours / "global_step_3" / "actor")):
        copies.append((copied(role, tmp_path / whose), f"{whose}, whole"))
        for part, file in (("model/huggingface", "model.safetensors"), ("model/huggingface", "config.json"),
                           ("optimizer/dist_ckpt", ".metadata"), ("extra/dist_ckpt", "metadata.json")):  # fmt: skip
            copy = copied(role, tmp_path / f"{whose}{file}")
            (copy / part / file).unlink()
            copies.append((copy, f"{whose}, without {part}/{file}"))
        for name in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
            copy = copied(role, tmp_path / f"{whose}{name}")
            weights = load_file(file := copy / "model" / "huggingface" / "model.safetensors")
            save_file({key: value for key, value in weights.items() if key != name}, file)
            copies.append((copy, f"{whose}, without {name}"))
    settings = {"actor.optim.use_checkpoint_opt_param_scheduler": True}
    wrong = compared(lab, copies, wanted, settings, base=how["base"])
    assert not wrong, "\n".join(map(str, wrong))


WANTED = {"model": Thing.WEIGHTS, "optimizer": Thing.OPTIMIZER, "extra": Thing.RNG}


@pytest.mark.parametrize("content", WANTED)
def test_other_degrees(lab: Lab, steps: tuple[list[Path], list[dict[str, Any]]], content: str) -> None:
    """Two tensor-parallel ranks load what one saved: the weights, and neither flat buckets nor random states."""
    roles, _ = steps
    settings = {**SWITCHED, "actor.megatron.tensor_model_parallel_size": 2, "actor.checkpoint.load_contents": [content]}
    found = forecast(roles[0].parent, loader_named("verl")[0], Settings(settings), 2)
    told = {one.thing: one.row.outcome for one in found.roles["actor"]}
    try:
        lab.carry_out(2, [("load", roles[0])], parallel={"tp": 2}, load_contents=[content])
        fails = False
    except AssertionError:  # a rank failed
        fails = True
    assert fails == found.stops == (content != "model")
    assert told[WANTED[content]] is (Outcome.REFUSED if fails else Outcome.RESTORED)
