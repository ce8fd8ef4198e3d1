"""``will-resume`` says what verl and OpenRLHF do with steps of theirs from which one key was taken, of each key of each file.

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
from tests.helpers.one_key import At, keys_of, without_key
from tests.trainers.lab import Lab

PACKAGES = {"verl": "verl-0.9.1", "openrlhf": "openrlhf-0.11.2"}
PLACES = {"verl": "global_step_3/actor", "openrlhf": ""}
_DEEPEST, _STATES = 4, (0, 1)


@pytest.fixture(scope="module")
def lab(trainers: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(trainers, tmp_path_factory.mktemp("keys"))


def _taken(root: Path, folder: Path) -> list[tuple[Path, str]]:
    """Copies of a run, each without one key, and which."""
    made = []
    for file in sorted(path for path in root.rglob("*.pt") if path.name != "data.pt"):
        for at in keys_of(torch.load(file, weights_only=False)):
            if _is_told_apart(at):
                copy = Path(shutil.copytree(root, folder / f"copy-{len(made)}" / root.name))
                changed = copy / file.relative_to(root)
                torch.save(without_key(torch.load(changed, weights_only=False), at), changed)
                made.append((copy, f"{file.name}: {'/'.join(map(str, at))}"))
    return made


def _is_told_apart(at: At) -> bool:
    """Of states that are alike two are enough; DeepSpeed's configuration is not loaded; items of lists are no keys."""
    numbered = (
        "state" in at[:-1] and at[at.index("state") + 1] not in _STATES and isinstance(at[at.index("state") + 1], int)
    )
    return len(at) <= _DEEPEST and not numbered and "ds_config" not in at[:-1] and not isinstance(at[-1], int)


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_each_key_of_each_file_taken(lab: Lab, name: str, tmp_path: Path) -> None:
    root = lab.folder / f"{name}-run"
    place, needed = PLACES[name], [PACKAGES[name], "needs"]
    wanted = lab.run(f"{name}_job", needed, 1, [("train", 3), ("save", root / place), ("train", 2)], strategy="fsdp2")[
        3:
    ]
    if name == "verl":
        shutil.copy(next((root / place).glob("extra_state*")), root / "global_step_3" / "data.pt")
    copies = _taken(root, tmp_path)
    attempts = [("attempt", copy / place) for copy, _ in copies]
    seen = lab.run(f"{name}_job", needed, 1, attempts, strategy="fsdp2")
    loader, wrong, unsaid = loader_named(name)[0], [], list[str]()
    for (copy, key), live in zip(copies, seen, strict=True):
        found = forecast(copy if name == "openrlhf" else copy / "global_step_3", loader, Settings(), 1)
        told = {one.thing: one for of in found.roles.values() for one in of}
        restored = {} if "failed" in live else _restored(live["steps"], wanted, name)
        same = found.stops == ("failed" in live)
        same = same and all((told[thing].row.outcome is Outcome.RESTORED) == one for thing, one in restored.items())
        unsaid += [key] if not same and found.doubtful else []
        if not same and not found.doubtful:
            wrong.append(
                (
                    key,
                    live.get("failed", restored),
                    [(one.thing.value, one.why) for one in told.values() if one.row.outcome.is_loss],
                )
            )
    print(f"{sum(1 for key in unsaid)} of {len(copies)} cannot be opened: {unsaid}")
    assert not wrong, "\n".join(map(str, wrong))
    assert len(copies) > 50


def _restored(seen: list[Any], wanted: list[Any], name: str) -> dict[Thing, bool]:
    (first, second), (before, after) = seen, wanted
    found = {Thing.WEIGHTS: first["loss"] == before["loss"], Thing.SCHEDULER: first["lr"] == before["lr"]}
    if name == "verl":
        found[Thing.RNG] = first["drawn"] == before["drawn"]
    if all(found[thing] for thing in (Thing.WEIGHTS, Thing.SCHEDULER)):
        found[Thing.OPTIMIZER] = second["loss"] == after["loss"]
    return found
