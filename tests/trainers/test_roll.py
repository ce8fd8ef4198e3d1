"""ROLL's own save is read whole: Megatron-core's loader goes on from it, converted, with ROLL's next losses, and ``will-resume`` says what
ROLL's own load does without each file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.convert import convert
from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.trainers.lab import PROJECT
from tests.trainers.test_run_seams import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RELEASE, STEP = "ROLL-8eb27cc2", "checkpoint-3"


def roll(trainers: Path, job: str, folder: Path, *, ranks: int = 1, tp: int = 1, ckpt_format: str = "legacy") -> Any:
    adapter = trainers / RELEASE / "mcore_adapter" / "src"
    path = os.pathsep.join(map(str, [PROJECT, trainers / RELEASE, adapter, trainers / "needs"]))
    status, seen, said = run(
        trainers, RELEASE, "tests.trainers.roll_job", job, folder, ranks, PYTHONPATH=path, TP=str(tp), CKPT_FORMAT=ckpt_format
    )  # fmt: skip
    assert status == 0, said[-3000:]
    return seen


def loaded(trainers: Path, place: Path, folders: list[Path], job: str = "loads", **how: Any) -> list[Any]:
    place.mkdir()
    (place / "copies.txt").write_text("\n".join(map(str, folders)))
    seen: list[Any] = roll(trainers, job, place, **how)
    return seen


@pytest.mark.parametrize(
    ("ckpt_format", "ranks", "tp", "job"),
    [("legacy", 2, 1, "plain"), ("torch_dist", 2, 2, "plain"), ("legacy", 2, 2, "reshardable")],
)
def test_core_goes_on(trainers: Path, tmp_path: Path, ckpt_format: str, ranks: int, tp: int, job: str) -> None:
    next_losses = roll(trainers, job, tmp_path / "run", ranks=ranks, tp=tp, ckpt_format=ckpt_format)
    step = tmp_path / "run" / STEP
    assert verify(step, ReadOptions(), Depth.DEEP).intact
    source = open_checkpoint(step, ReadOptions())
    assert (source.state.iteration, source.parallel.tp, source.optimizer) == (3, tp, "distributed")
    wanted = WriteOptions(tp=tp, dp=ranks // tp, global_batch_size=4)
    report = convert(step, tmp_path / "dist", ConvertOptions(to="megatron-dist", fsync=False, write=wanted)).report
    assert not [text for fate, text in report.lines if fate.value == "lost"]
    place = tmp_path / "dist" / "iter_0000003"
    assert loaded(trainers, tmp_path / "core", [place], "core", ranks=ranks, tp=tp) == [next_losses]


CHANGES: dict[str, Callable[[Path], object]] = {
    "whole": lambda step: None,
    "no schedule": lambda step: (step / "scheduler.pt").unlink(),
    "schedule of zeros": lambda step: (step / "scheduler.pt").write_bytes(bytes(999)),
    "no tracker": lambda step: (step / "latest_checkpointed_iteration.txt").unlink(),
    "no weights": lambda step: shutil.rmtree(step / "iter_0000001" / "mp_rank_00"),
    "weights of zeros": lambda step: (step / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt").write_bytes(
        bytes(999)
    ),
    "no optimizer": lambda step: shutil.rmtree(step / "iter_0000001" / "dist_optimizer"),
    "no list": lambda step: (step / "iter_0000001" / "dist_optimizer" / "metadata.json").unlink(),
    "no metadata": lambda step: (step / "iter_0000001" / "dist_optimizer" / ".metadata").unlink(),
    "no random states": lambda step: (step / "rng_state" / "rng_state_0.pth").unlink(),
}


def test_each_file_taken(trainers: Path, tmp_path: Path) -> None:
    next_losses = roll(trainers, "plain", tmp_path / "run")
    folders = [tmp_path / str(number) / STEP for number, _ in enumerate(CHANGES)]
    for folder, change in zip(folders, CHANGES.values(), strict=True):
        shutil.copytree(tmp_path / "run" / STEP, folder)
        change(folder)
    seen, wrong = loaded(trainers, tmp_path / "all", folders), list[object]()
    assert seen[0]["losses"] == next_losses
    for name, folder, live in zip(CHANGES, folders, seen, strict=True):
        told = forecast(folder, loader_named("roll")[0], Settings({}))
        said = {
            one.thing.value: one.row.outcome is Outcome.RESTORED
            for one in told.roles.get("actor", told.roles.get("", []))
        }
        real = None if isinstance(live, str) else (live["losses"] == next_losses, bool(live["RNG"]))
        if told.stops != (real is None) or (real and (said["optimizer"], said["RNG"]) != real):
            wrong.append((name, live, said, told.stops))
    assert not wrong, "\n".join(map(str, wrong))


def test_its_own_weights_in_torch_dist_stop_it(trainers: Path, tmp_path: Path) -> None:
    roll(trainers, "plain", tmp_path / "run", ckpt_format="torch_dist")
    step = tmp_path / "run" / STEP
    (live,) = loaded(trainers, tmp_path / "loads", [step])
    assert "AttributeError" in live
    assert forecast(step, loader_named("roll")[0], Settings({})).stops
