"""``will-resume`` says what verl, OpenRLHF, RLinf, NeMo-RL and prime-rl do with steps from which one file, or one key of one, was taken.

One rank saves three steps, so that one that fails keeps no others waiting; of each copy a new run loads and sees two steps. What it
restored shows in them: the weights in the first loss, the schedule in the rate, the random states in what is drawn, the optimizer in the
second loss.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from tests.helpers.one_key import copies_without
from tests.trainers.lab import Lab

PACKAGES = {
    "verl": "verl-0.9.1", "openrlhf": "openrlhf-0.11.2", "rlinf": "RLinf-a3816b5", "nemo-rl": "NeMo-RL-7ea279a",
    "prime-rl": "prime-rl-559b447/src",
}  # fmt: skip
JOBS = {"nemo-rl": "nemo_job", "prime-rl": "prime_job"}
PLACES = {"verl": "global_step_3/actor"}
STEPS = {"verl": "global_step_3", "rlinf": "global_step_3", "nemo-rl": "step_3", "prime-rl": "checkpoints/step_3"}
_OF_SOME = ("decoupled_weight_decay", "_is_initial", "lr_lambdas")
"""What not every release of torch has, or not every schedule: whether a run asks for it no file says."""


@pytest.fixture(scope="module")
def lab(trainers: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(trainers, tmp_path_factory.mktemp("keys"))


_NOT_LOOKED_INTO = {"data.pt", "train_dataloader.pt", "config.json", "fsdp_config.json", "progress.pt"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_each_key_of_each_file_taken(lab: Lab, name: str, tmp_path: Path) -> None:
    root = lab.folder / f"{name}-run"
    place, needed, job = PLACES.get(name, ""), [PACKAGES[name], "needs"], JOBS.get(name, f"{name}_job")
    if not (lab.packages / needed[0]).is_dir() and name in ("rlinf", "nemo-rl", "prime-rl"):
        pytest.skip(f"{needed[0]}: its repository could not be fetched")
    wanted = lab.run(job, needed, 1, [("train", 3), ("save", root / place), ("train", 2)], strategy="fsdp2")[3:]
    if name == "nemo-rl":
        torch.save({}, root / "step_3" / "train_dataloader.pt")
    if name == "verl":
        shutil.copy(next((root / place).glob("extra_state*")), root / "global_step_3" / "data.pt")
    copies = list(copies_without(root, tmp_path, _NOT_LOOKED_INTO))
    attempts = [("attempt", copy / place) for copy, _ in copies]
    seen = lab.run(job, needed, 1, attempts, strategy="fsdp2")
    loader, wrong, unsaid = loader_named(name)[0], [], list[str]()
    for (copy, key), live in zip(copies, seen, strict=True):
        found = forecast(copy / STEPS.get(name, ""), loader, Settings(), 1)
        told = {one.thing: one for of in found.roles.values() for one in of}
        restored = {} if "failed" in live else _restored(live["steps"], wanted, name)
        is_anew = "passed over" in live.get("failed", "")
        same = found.stops == ("failed" in live and not is_anew) and (found.taken.folder is None) == is_anew
        same = same and all((told[thing].row.outcome is Outcome.RESTORED) == one for thing, one in restored.items())
        unsaid += [key] if not same and found.doubtful else []
        if not same and not found.doubtful and not key.endswith(_OF_SOME):
            wrong.append(
                (
                    key,
                    live.get("failed", restored),
                    [(one.thing.value, one.why) for one in told.values() if one.row.outcome.is_loss],
                )
            )
    print(f"{sum(1 for key in unsaid)} of {len(copies)} cannot be opened: {unsaid}")
    assert not wrong, "\n".join(map(str, wrong))
    assert len(copies) > 30


def _restored(seen: list[Any], wanted: list[Any], name: str) -> dict[Thing, bool]:
    (first, second), (before, after) = seen, wanted
    found = {Thing.WEIGHTS: first["loss"] == before["loss"], Thing.SCHEDULER: first["lr"] == before["lr"]}
    if name == "verl":
        found[Thing.RNG] = first["drawn"] == before["drawn"]
    if all(found[thing] for thing in (Thing.WEIGHTS, Thing.SCHEDULER)):
        found[Thing.OPTIMIZER] = second["loss"] == after["loss"]
    return found
