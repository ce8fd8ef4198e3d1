from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rlhf.errors import UsageError
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.events import EVENTS_NAME, EventLog
from mcore_rlhf.manager.run.options import Event
from mcore_rlhf.report.timeline import RunFacts, chrome_trace, run_facts
from tests.unit.manager.roots import make_step


def _facts(root: Path, events: Path | None = None) -> RunFacts:
    listed = steps.listed(root)
    return run_facts(
        root, listed, [{"step": step.step, "state": step.state, "bytes": step.nbytes} for step in listed], events
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number in (10, 20):
        make_step(tmp_path / "run", number)
    return tmp_path / "run"


def test_without_a_history_it_says_so(root: Path) -> None:
    found = _facts(root)
    assert [step["step"] for step in found["steps"]] == [10, 20]
    assert found["events"] == []
    assert "keeps no history" in found["history"]
    assert "EventLog" in found["history"]


def test_events_that_a_manager_kept_are_read_back(root: Path) -> None:
    log = EventLog(root / EVENTS_NAME)
    log(Event("load", None, 0, {}, "nothing to resume"))
    log(Event("commit", 10, 0, {"seconds": 2.5}))
    log(Event("commit", 10, 3, {"seconds": 2.5}))  # another rank's
    log(Event("failed", 20, 0, {}, "disk full"))
    found = _facts(root)
    assert [(e["kind"], e["step"], e["values"], e["text"]) for e in found["events"]] == [
        ("load", None, {}, "nothing to resume"),
        ("commit", 10, {"seconds": 2.5}, ""),
        ("failed", 20, {}, "disk full"),
    ]
    assert str(root / EVENTS_NAME) in found["history"]


def test_a_line_that_a_crash_cut_off_is_passed_over_and_another_is_not(root: Path) -> None:
    path = root / EVENTS_NAME
    EventLog(path)(Event("load", None, 0))
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"time": 17')
    assert len(_facts(root)["events"]) == 1
    with open(path, "a", encoding="utf-8") as file:
        file.write("\n")
    with pytest.raises(UsageError, match="line 2 is no event"):
        _facts(root)


def test_a_chrome_trace_has_saves_and_events_in_microseconds(root: Path) -> None:
    EventLog(root / EVENTS_NAME)(Event("delete", 5, 0, {"bytes": 7}))
    run = _facts(root)
    run["steps"][0].update(began_at=100.0, committed_at=103.5, stall_seconds=0.5)
    trace = json.loads(json.dumps(chrome_trace(run)))["traceEvents"]
    save = next(e for e in trace if e["name"] == "save step 10")
    assert (save["ph"], save["ts"], save["dur"]) == ("X", 100e6, 3.5e6)
    waits = next(e for e in trace if "waits" in e["name"] and e["ph"] == "X")
    assert (waits["ts"], waits["dur"]) == (100e6, 0.5e6)
    assert next(e for e in trace if e["name"] == "delete step 5")["ph"] == "i"
