"""What ROLL saves on FSDP2 is read whole, and ``will-resume`` says what its own load leaves out of it: moments, and random states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.manager.runs import listed_steps
from mcore_rlhf.manager.will_resume import forecast, loader_named
from mcore_rlhf.trainers.resuming import Outcome, Settings, Thing
from mcore_rlhf.verify.checkpoint import Depth, verify
from tests.trainers import lab as labs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
RELEASE, STEP = "ROLL-8eb27cc2", "checkpoint-2"


def test_moments_and_random_states_begin_anew(trainers: Path, tmp_path: Path) -> None:
    lab, step = labs.Lab(trainers, tmp_path), tmp_path / "run" / STEP
    needed = [RELEASE, f"{RELEASE}/mcore_adapter/src", "needs"]
    seen: Any = lab.run("roll_fsdp_job", needed, 2, [("train", 3), ("save", step), ("train", 2), ("attempt", step)])
    (step / "pipeline").mkdir()
    (step / "pipeline" / "worker_state_pipeline.json").write_text(json.dumps({"step": 2, "log_history": [], "kv": {}}))
    wanted, again = seen[3:5], seen[5]["steps"]
    assert [one["lr"] for one in again] == [one["lr"] for one in wanted]
    assert again[0]["loss"] == wanted[0]["loss"]  # the weights are restored
    assert again[1]["loss"] != wanted[1]["loss"]  # and the moments are not
    assert again[0]["drawn"] == [seen[0]["drawn"][0]] * 2  # the seed's own, on both ranks
    told = forecast(step.parent, loader_named("roll-fsdp2")[0], Settings({}))
    said = {one.thing: one.row.outcome for one in told.roles["actor"]}
    assert {thing for thing, outcome in said.items() if outcome is Outcome.ANEW} == {Thing.OPTIMIZER, Thing.RNG}
    assert {said[thing] for thing in (Thing.WEIGHTS, Thing.GROUPS, Thing.SCHEDULER, Thing.COUNTERS)} == {
        Outcome.RESTORED
    }
    source = open_checkpoint(step / "dcp", ReadOptions())
    assert (source.state.iteration, source.optimizer, source.parallel.dp) == (3, "dcp", 2)
    assert verify(step / "dcp", ReadOptions(), Depth.DEEP).intact
    assert [one.step for one in listed_steps(step.parent)] == [3]
    next(iter((step / "dcp").glob("*.distcp"))).write_bytes(bytes(99))
    assert forecast(step.parent, loader_named("roll-fsdp2")[0], Settings({})).stops
