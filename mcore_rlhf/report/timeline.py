"""The timeline of a run: what its steps tell, and what its events tell where somebody kept them; on a page and as a Chrome trace."""

from __future__ import annotations

import statistics
import time
from calendar import timegm
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

from mcore_rlhf.errors import CheckpointError, UsageError
from mcore_rlhf.manager.run.events import EVENTS_NAME
from mcore_rlhf.manager.run.steps import Step, read_manifest
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.paths import storage_error
from mcore_rlhf.storage.reading import parse_json, read_text

_NO_HISTORY = (
    "The run keeps no history, so that this is what its steps alone tell: failures, resumes and steps that were deleted left no trace. "
    f"on_event=EventLog(root / “{EVENTS_NAME}”) keeps one from now on."
)
_MICRO = 1e6
_COMMITTING = 2.0
"""Seconds from the beginning of a manifest's own second until the event of its commit."""


class StepOnTime(TypedDict, total=False):
    """A step as ``steps --json`` says it, and its save: ``began_at`` and ``committed_at`` in seconds since 1970, ``save_seconds``
    from one to the other, ``stall_seconds`` of them in which training waited; each null where the step does not say it.
    """

    step: int
    state: str
    bytes: int
    metrics: dict[str, float]
    began_at: float | None
    committed_at: float | None
    save_seconds: float | None
    stall_seconds: float | None


class Happened(TypedDict):
    """An event of the manager: ``time`` in seconds since 1970; see :class:`~mcore_rlhf.manager.run.options.Event`."""

    time: float
    kind: str
    step: int | None
    rank: int
    values: dict[str, float]
    text: str


class RunFacts(TypedDict):
    """A run: its ``steps``, its ``events``, where they come from (``history``), and medians of what saving costs, or null."""

    root: str
    steps: list[StepOnTime]
    events: list[Happened]
    history: str
    stall_seconds: float | None
    save_seconds: float | None


def run_facts(root: Path, listed: Sequence[Step], told: Sequence[Mapping[str, Any]], events: Path | None) -> RunFacts:
    """Put the steps of a run on time.

    Args:
        root: The run's root.
        listed: Its steps.
        told: What ``steps --json`` says of each.
        events: A file of events; None takes the root's own, where there is one.

    Raises:
        UsageError: A line of the file is no event.
        StorageError: The file cannot be read.
    """
    path = events if events is not None else root / EVENTS_NAME
    found = _events(path) if events is not None or path.is_file() else None
    steps = [_on_time(step, facts) for step, facts in zip(listed, told, strict=True)]
    _sharpen(steps, found or [])
    return {
        "root": str(root),
        "steps": steps,
        "events": found or [],
        "history": _NO_HISTORY if found is None else f"Events are those of {path}; saves are as the steps tell them.",
        "stall_seconds": _median(step["stall_seconds"] for step in steps),
        "save_seconds": _median(step["save_seconds"] for step in steps),
    }


def chrome_trace(run: RunFacts) -> dict[str, object]:
    """The timeline as Chrome's and Perfetto's viewers open it, in microseconds.

    Source: the Trace Event Format, "Complete Events" (``X``), "Instant Events" (``i``), "Metadata Events" (``M``).
    """
    lanes = ("saves", "training waits", "events")
    trace: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": lane, "args": {"name": name}}
        for lane, name in enumerate(lanes)
    ]
    for step in run["steps"]:
        began, until = step["began_at"], step["committed_at"]
        if until is None:
            continue
        start = until if began is None else began
        args = {"state": step["state"], "bytes": step["bytes"]}
        trace.append(_complete(f"save step {step['step']}", 0, start, until - start, args))
        if began is not None and step["stall_seconds"]:
            trace.append(_complete(f"step {step['step']}: training waits", 1, began, step["stall_seconds"], {}))
    for event in run["events"]:
        name = event["kind"] if event["step"] is None else f"{event['kind']} step {event['step']}"
        args = {**event["values"], "rank": event["rank"], "text": event["text"]}
        trace.append(
            {"name": name, "ph": "i", "s": "p", "ts": event["time"] * _MICRO, "pid": 1, "tid": 2, "args": args}
        )
    return {"traceEvents": trace, "displayTimeUnit": "ms", "otherData": {"root": run["root"]}}


def _complete(name: str, lane: int, start: float, seconds: float, args: Mapping[str, object]) -> dict[str, object]:
    return {"name": name, "ph": "X", "ts": start * _MICRO, "dur": seconds * _MICRO, "pid": 1, "tid": lane, "args": args}


def _on_time(step: Step, told: Mapping[str, Any]) -> StepOnTime:
    """When a step was saved, as far as it says so itself."""
    committed = _seconds(step.time)
    times = {"began_at": None, "committed_at": committed, "save_seconds": None, "stall_seconds": None}
    on_time = cast(StepOnTime, {**told, **times})
    try:
        manifest = read_manifest(step.path)
    except CheckpointError:
        return on_time
    on_time["stall_seconds"] = _number(manifest, "stall_seconds")
    on_time["save_seconds"] = saved = _number(manifest, "save_seconds")
    if committed is not None and saved is not None:
        on_time["began_at"] = committed - saved
    return on_time


def _sharpen(steps: Sequence[StepOnTime], events: Sequence[Happened]) -> None:
    """Take the times of commits from events: a manifest's are whole seconds, into which several saves may fall.

    A step that was saved again has several commits; the one that lies in the manifest's second, or just behind it, is its own.
    """
    commits: dict[int | None, list[float]] = {}
    for event in events:
        if event["kind"] == "commit":
            commits.setdefault(event["step"], []).append(event["time"])
    for step in steps:
        said, saved = step["committed_at"], step["save_seconds"]
        if said is None:
            continue
        own = [at for at in commits.get(step["step"], ()) if 0 <= at - said < _COMMITTING]
        if own:
            step["committed_at"] = own[0]
            step["began_at"] = None if saved is None else own[0] - saved


def _number(manifest: Manifest, name: str) -> float | None:
    value = manifest.report.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    return None


def _seconds(text: str) -> float | None:
    try:
        return float(timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return None


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _events(path: Path) -> list[Happened]:
    """The events of a file, oldest first; a last line that was cut off by a crash is passed over."""
    try:
        lines = read_text(path, errors="replace").splitlines(keepends=True)
    except OSError as error:
        raise storage_error(error, path, "read") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(_event(parse_json(line)))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise UsageError(
                f"{path}: line {number} is no event: {error}\nExpected lines as EventLog writes them: "
                '{"time": 1795186605.3, "kind": "commit", "step": 50, "rank": 0, "values": {}, "text": ""}'
            ) from None
    return sorted(found, key=lambda event: event["time"])


def _event(line: Mapping[str, Any]) -> Happened:
    step = line["step"]
    return {
        "time": float(line["time"]),
        "kind": str(line["kind"]),
        "step": None if step is None else int(step),
        "rank": int(line.get("rank", 0)),
        "values": {str(name): float(value) for name, value in line.get("values", {}).items()},
        "text": str(line.get("text", "")),
    }
