from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_rlhf.errors import Untrusted, UsageError
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.events import EVENTS_NAME, EventLog
from mcore_rlhf.manager.run.options import Event
from mcore_rlhf.report.timeline import RunFacts, chrome_trace, run_facts
from mcore_rlhf.storage.links import enclose
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


def test_commits_are_as_sharp_as_the_events_say(root: Path) -> None:
    """A manifest's time is in whole seconds; several saves may fall into one."""
    (second,) = {step["committed_at"] for step in _facts(root)["steps"]}
    assert second is not None
    lines = [(second + 0.25, 10), (second + 1.5, 20), (second + 900, 20), (second - 3, 10)]
    for at, step in lines:
        with open(root / EVENTS_NAME, "a", encoding="utf-8") as file:
            file.write(json.dumps({"time": at, "kind": "commit", "step": step}) + "\n")
    assert [step["committed_at"] for step in _facts(root)["steps"]] == [second + 0.25, second + 1.5]


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"step": 1e999, "time": 1, "kind": "saved"}',
        '{"step": 1, "time": 1, "kind": "saved", "values": 5}',
    ],
    ids=["deep", "endless", "no values"],
)
def test_events_of_a_stranger_are_no_bug_of_ours(root: Path, line: str) -> None:
    (root / "events.jsonl").write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(UsageError, match="line 1 is no event"):
        run_facts(root, [], [], None)


def test_events_are_not_read_through_a_link_out_of_the_run(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "history"
    outside.write_text('{"step": 1, "time": 1, "kind": "saved", "text": "secret"}\n', encoding="utf-8")
    (root / "events.jsonl").unlink(missing_ok=True)
    (root / "events.jsonl").symlink_to(outside)
    enclose(root)
    with pytest.raises(Untrusted, match="--follow-links"):
        run_facts(root, [], [], None)
