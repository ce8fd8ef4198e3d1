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
from mcore_rlhf.manager.convert_step import convert_step
from mcore_rlhf.manager.subject import find
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.trainers.lab import PROJECT
from tests.trainers.test_run_seams import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RELEASE, STEP = "ROLL-8eb27cc2", "checkpoint-3"


def roll(
    trainers: Path, job: str, folder: Path, *, ranks: int = 1, tp: int = 1, pp: int = 1, ckpt_format: str = "legacy",
    kind: str = "distributed",
) -> Any:  # fmt: skip
    adapter = trainers / RELEASE / "mcore_adapter" / "src"
    path = os.pathsep.join(map(str, [PROJECT, trainers / RELEASE, adapter, trainers / "needs"]))
    status, seen, said = run(
        trainers, RELEASE, "tests.trainers.roll_job", job, folder, ranks, PYTHONPATH=path, TP=str(tp),
        PP=str(pp), CKPT_FORMAT=ckpt_format, KIND=kind,
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
    assert (source.state.iteration, source.parallel.tp, source.optimizer) == (4, tp, "distributed")
    wanted = WriteOptions(tp=tp, dp=ranks // tp, global_batch_size=4)
    report = convert(step, tmp_path / "dist", ConvertOptions(to="megatron-dist", fsync=False, write=wanted)).report
    assert not [text for fate, text in report.lines if fate.value == "lost"]
    place = tmp_path / "dist" / "iter_0000004"
    assert loaded(trainers, tmp_path / "core", [place], "core", ranks=ranks, tp=tp) == [next_losses]


def into_run(folder: Path, place: Path, **how: Any) -> Path:
    """A step of ROLL's that is made of a checkpoint."""
    options = ConvertOptions(to="roll", fsync=False, write=WriteOptions(**how))
    convert_step(find(folder, ReadOptions()), place, options)
    return place / STEP


def test_goes_on_from_what_is_written(trainers: Path, tmp_path: Path) -> None:
    next_losses = roll(trainers, "plain", tmp_path / "run", ranks=2, tp=2)
    step, by_samples = tmp_path / "run" / STEP, WriteOptions(global_batch_size=4)
    convert(step, tmp_path / "core", ConvertOptions(to="megatron", fsync=False, write=by_samples))
    convert(step, tmp_path / "dist", ConvertOptions(to="megatron-dist", fsync=False, write=by_samples))
    copies = [into_run(step, tmp_path / "own")]
    copies += [into_run(tmp_path / name, tmp_path / f"of_{name}", global_batch_size=4) for name in ("core", "dist")]
    seen = loaded(trainers, tmp_path / "all", copies, ranks=2, tp=2)
    assert [live["losses"] for live in seen] == [next_losses] * 3, seen
    assert all(live["scheduler"] == 4 and live["RNG"] for live in seen)
    across = into_run(step, tmp_path / "stages", tp=1, pp=2, dp=1)
    (live,) = loaded(trainers, tmp_path / "across", [across], ranks=2, pp=2)
    assert live["losses"] == pytest.approx(next_losses, abs=2e-3), live


def test_a_plain_optimizer_beside_each_ranks_weights(trainers: Path, tmp_path: Path) -> None:
    """It is read, and a run with a distributed one goes on from what is made of it; one of the other kind stops."""
    next_losses = roll(trainers, "plain", tmp_path / "run", ranks=2, kind="plain")
    step = tmp_path / "run" / STEP
    source = open_checkpoint(step, ReadOptions())
    assert (source.state.iteration, source.optimizer, source.parallel.dp) == (4, "plain", 2)
    assert verify(step, ReadOptions(), Depth.DEEP).intact
    written = into_run(step, tmp_path / "new", optimizer="distributed", optimizer_sharding="fully_reshardable")
    (live,) = loaded(trainers, tmp_path / "all", [written], "loads_reshardable", ranks=2)
    assert (live["losses"], live["scheduler"]) == (next_losses, 4)
    shown = into_run(step, tmp_path / "like", optimizer="distributed", like=str(written))
    assert forecast(written, loader_named("roll")[0], Settings({"strategy_config.lr": 1})).stops
    assert forecast(shown, loader_named("roll")[0], Settings({"distrib_optim_fully_reshardable": True})).resumes
    stops = loaded(trainers, tmp_path / "other", [step, written], ranks=2)
    assert all(isinstance(live, str) for live in stops), stops
    assert forecast(step, loader_named("roll")[0], Settings({"use_distributed_optimizer": True})).stops


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
