"""ms-swift's own load takes what we write, with the losses of its own files; ``will-resume`` says what it does without each key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.families.options import ConvertOptions, ReadOptions, WriteOptions
from mcore_rlhf.manager.convert_step import convert_step
from mcore_rlhf.manager.subject import find
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings
from tests.helpers.one_key import copies_without
from tests.trainers.lab import PROJECT
from tests.trainers.test_run_seams import run
from tests.trainers.test_will_resume_bridge import agree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RELEASE, BRIDGE, STEP = "ms_swift-4.6.0", "mcore_bridge-1.6.5", "checkpoint-4"


def swift(trainers: Path, job: str, folder: Path, *, ranks: int = 2, tp: int = 1) -> Any:
    path = os.pathsep.join(map(str, [PROJECT, trainers / RELEASE, trainers / BRIDGE, trainers / "needs"]))
    status, seen, said = run(
        trainers, RELEASE, "tests.trainers.ms_swift_job", job, folder, ranks, PYTHONPATH=path, TP=str(tp)
    )
    assert status == 0, said[-3000:]
    return seen


def converted(source: Path, target: Path, to: str, **write: object) -> Path:
    """The step that a conversion made."""
    given = ConvertOptions(to=to, fsync=False, workers=1, write=WriteOptions(**write))  # type: ignore[arg-type]
    convert_step(find(source, ReadOptions()), target, given)
    return target / STEP


def loaded(trainers: Path, place: Path, steps: list[Path], **how: int) -> list[Any]:
    place.mkdir()
    (place / "copies.txt").write_text("\n".join(map(str, steps)))
    seen: list[Any] = swift(trainers, "loads", place, **how)
    return seen


@pytest.fixture(scope="module")
def run_of(trainers: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A run of two data-parallel ranks, and what its next two losses were."""
    root = tmp_path_factory.mktemp("swift") / "run"
    return root, swift(trainers, "plain", root)


def test_back_again(trainers: Path, run_of: tuple[Path, list[float]], tmp_path: Path) -> None:
    root, next_losses = run_of
    assert swift(trainers, "reshardable", tmp_path / "own") == next_losses
    back = converted(root, tmp_path / "back", "ms-swift")
    cut = converted(root, tmp_path / "cut", "ms-swift", tp=2)
    converted(root, tmp_path / "megatron", "megatron", tp=2)
    again = converted(tmp_path / "megatron", tmp_path / "again", "ms-swift", tp=1)
    as_one = loaded(trainers, tmp_path / "one", [root / STEP, back, again])
    assert [one["losses"] for one in as_one] == [next_losses] * 3
    assert as_one[0] == as_one[1]
    assert [one["counters"] for one in as_one] == [4] * 3
    as_two = loaded(trainers, tmp_path / "two", [tmp_path / "own" / STEP, cut], tp=2)
    assert as_two[0]["losses"] == as_two[1]["losses"]


def test_each_file_and_each_name_taken(trainers: Path, run_of: tuple[Path, list[float]], tmp_path: Path) -> None:
    step = run_of[0] / STEP
    copies = list(copies_without(step, tmp_path / "copies", ("args.json", "config.json")))
    whole, *seen = loaded(trainers, tmp_path / "all", [step, *(copy for copy, _ in copies)], ranks=1)
    wrong = []
    for (copy, what), live in zip(copies, seen, strict=True):
        found = forecast(copy, loader_named("ms-swift")[0], Settings({"finetune": False}))
        told = {one.thing.value: one.row.outcome is Outcome.RESTORED for one in found.roles.get("", [])}
        if not agree(found.stops, found.taken.folder is None, told, live, whole) and not found.doubtful:
            wrong.append((what, live, [why for why in told.items() if not why[1]], found.taken.why))
    assert not wrong, "\n".join(map(str, wrong))
    assert len(copies) > 30
