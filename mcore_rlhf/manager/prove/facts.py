"""What a check came to, as JSON: the whole of it, and a file for each rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from mcore_rlhf.storage.publish import replace_text

from .check import CheckOutcome, Control, RunComparison, SavedAgain
from .compare import ComparisonTally, Finding
from .killing import Kill
from .metrics import MetricsComparison
from .profiles import MeasuredDifference, Profile

OutcomeFacts: TypeAlias = "dict[str, object]"


def facts_of(outcome: CheckOutcome) -> OutcomeFacts:
    """``verdict`` (``exact``, ``within``, ``different``, ``blind``, ``no control``), ``passed``, ``steps``, ``more``, ``folder``;
    ``profile`` (``name``, ``why``, ``rows``) and ``worst``, or null, of what it let pass; ``first_difference`` or null;
    ``runs`` (``name``, ``equal``, ``kill``, ``repeatable``: whether the killed run was the other's equal until then, ``states``,
    ``metrics`` of rank 0, ``ranks``: those of further ranks); ``before_update`` or null (``step``, ``equal``, ``states``); ``control`` or
    null (``caught``, ``broken``, ``states``, ``metrics``); ``seconds`` by start of the command; ``notes``.
    """
    return {
        "verdict": outcome.verdict,
        "passed": outcome.passed,
        "steps": outcome.steps,
        "more": outcome.more,
        "folder": None if outcome.folder is None else str(outcome.folder),
        "profile": _profile_facts(outcome.profile),
        "worst": _off_facts(outcome.worst),
        "first_difference": _first_facts(outcome.first),
        "runs": [
            {
                "kill": None if run.kill is None else _kill_facts(run.kill),
                "repeatable": None if run.before is None else run.before.tally.equal,
                **_comparison_facts(run.comparison),
            }
            for run in outcome.interrupted
        ],
        "before_update": _again_facts(outcome.again),
        "control": None if outcome.control is None else _control_facts(outcome.control),
        "seconds": outcome.seconds,
        "notes": outcome.notes,
    }


def by_rank(outcome: CheckOutcome) -> Mapping[int, OutcomeFacts]:
    """For each rank that wrote metrics, or rank 0 alone: ``rank``, ``verdict``, ``passed``, ``profile`` (its name), ``steps``, ``more``;
    ``runs`` (``name``, ``equal``, ``metrics`` of this rank or null, ``states`` of the whole step, ``first_difference`` or null).

    ``verdict`` and ``passed`` are the check's, the same in all of them; ``equal`` is this rank's: its metrics, and the step, which is one.
    """
    ranks = {rank for run in outcome.interrupted for rank in run.comparison.ranks} or {0}
    return {rank: _rank_facts(outcome, rank) for rank in sorted(ranks)}


def write_by_rank(outcome: CheckOutcome, folder: Path) -> list[Path]:
    """Write ``rank-R.json`` for each rank into the check's folder.

    Raises:
        StorageError: It cannot be written.
    """
    written = []
    for rank, facts in by_rank(outcome).items():
        path = folder / f"rank-{rank}.json"
        replace_text(path, json.dumps(facts, indent=2, ensure_ascii=False, allow_nan=False) + "\n", fsync=False)
        written.append(path)
    return written


def _rank_facts(outcome: CheckOutcome, rank: int) -> OutcomeFacts:
    runs: list[OutcomeFacts] = []
    for run in outcome.interrupted:
        found = run.comparison
        lines = found.ranks.get(rank)
        runs.append(
            {
                "name": found.name,
                "equal": found.states.tally.equal and (lines is None or lines.tally.equal),
                "metrics": None if lines is None else _lines_facts(lines),
                "states": {"files": found.states.files, **_tally_facts(found.states.tally)},
                "first_difference": _first_facts(found.first(rank)),
            }
        )
    return {
        "rank": rank,
        "verdict": outcome.verdict,
        "passed": outcome.passed,
        "profile": outcome.profile.name,
        "steps": outcome.steps,
        "more": outcome.more,
        "runs": runs,
    }


def _profile_facts(profile: Profile) -> OutcomeFacts:
    rows = [
        {"where": row.where, "relative": row.relative, "absolute": row.absolute, "why": row.why} for row in profile.rows
    ]
    return {"name": profile.name, "why": profile.why, "rows": rows}


def _off_facts(off: MeasuredDifference | None) -> OutcomeFacts | None:
    if off is None:
        return None
    return {"where": off.where, "key": off.key, "off": off.off, "allowed": off.allowed}


def _first_facts(finding: Finding | None) -> OutcomeFacts | None:
    return None if finding is None else _finding_facts(finding)


def _kill_facts(kill: Kill) -> OutcomeFacts:
    return {
        "resumed_from": kill.resumes_from,
        "saving": None if kill.partial is None else kill.partial.step,
        "phase": kill.phase,
        "processes": kill.processes,
        "seconds": kill.seconds,
    }


def _again_facts(again: SavedAgain | None) -> OutcomeFacts | None:
    if again is None:
        return None
    states = {"files": again.states.files, **_tally_facts(again.states.tally)}
    return {"step": again.step, "equal": again.states.tally.equal, "states": states}


def _control_facts(control: Control) -> OutcomeFacts:
    broken = None if control.broken is None else str(control.broken)
    return {"caught": control.caught, "broken": broken, **_comparison_facts(control.comparison)}


def _comparison_facts(found: RunComparison) -> OutcomeFacts:
    lines = {rank: _lines_facts(metrics) for rank, metrics in found.ranks.items()}
    states = {"files": found.states.files, **_tally_facts(found.states.tally)}
    further = {str(rank): facts for rank, facts in lines.items() if rank}
    return {"name": found.name, "equal": found.equal, "states": states, "metrics": lines.get(0), "ranks": further}


def _lines_facts(metrics: MetricsComparison) -> OutcomeFacts:
    return {
        "lines": metrics.lines,
        "equal_lines": metrics.equal,
        "repeated_lines": metrics.repeated,
        "began_again": metrics.began_again,
        **_tally_facts(metrics.tally),
    }


def _tally_facts(tally: ComparisonTally) -> OutcomeFacts:
    return {
        "values": tally.compared,
        "differing": tally.differing,
        "within": tally.within,
        "worst": _off_facts(tally.worst),
        "ignored": tally.ignored,
        "differences": [_finding_facts(finding) for finding in tally.findings],
    }


def _finding_facts(finding: Finding) -> OutcomeFacts:
    return {
        "where": finding.where,
        "key": finding.key,
        "first": finding.first,
        "second": finding.second,
        "detail": finding.detail,
    }
