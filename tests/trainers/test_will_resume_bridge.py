"""``will-resume --trainer megatron-bridge`` says what Megatron-Bridge does with steps from which one file, or one name, was taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings
from tests.helpers.one_key import copies_without
from tests.trainers.test_run_seams import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BRIDGE, JOB = "Megatron-Bridge-067f987", "tests.trainers.bridge_seam"


def test_each_file_and_each_name_taken(trainers: Path, tmp_path: Path) -> None:
    root = tmp_path / "whole"
    status, _, said = run(trainers, BRIDGE, JOB, "plain", root)
    assert status == 0, said[-3000:]
    copies = list(copies_without(root, tmp_path / "copies"))
    (tmp_path / "copies" / "copies.txt").write_text("\n".join(map(str, [root, *(copy for copy, _ in copies)])))
    status, seen, said = run(trainers, BRIDGE, JOB, "loads", tmp_path / "copies")
    assert status == 0, said[-3000:]
    whole, *seen = seen
    wrong = []
    for (copy, what), live in zip(copies, seen, strict=True):
        found = forecast(copy, loader_named("megatron-bridge")[0], Settings())
        told = {one.thing.value: one.row.outcome is Outcome.RESTORED for one in found.roles.get("", [])}
        if not agree(found.stops, found.taken.folder is None, told, live, whole) and not found.doubtful:
            wrong.append((what, live, [why for why in told.items() if not why[1]], found.taken.why))
    assert not wrong, "\n".join(map(str, wrong))
    assert len(copies) > 40


def agree(stops: bool, is_anew: bool, told: dict[str, bool], live: Any, whole: Any) -> bool:
    if not isinstance(live, dict):
        return stops == isinstance(live, str) and (is_anew and not stops) == (live is None)
    same = {thing: live[thing] == whole[thing] for thing in ("counters", "data", "RNG", "scheduler")}
    same["weights"] = live["losses"][0] == whole["losses"][0]
    if same["weights"] and same["scheduler"]:
        same["optimizer"] = live["losses"][1] == whole["losses"][1]
    return not stops and not is_anew and all(told[thing] == one for thing, one in same.items())
