"""What a resume check came to: as plain data, and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mcore_rlhf.manager.prove.findings import Finding, Tally
from mcore_rlhf.manager.prove.killing import Kill
from mcore_rlhf.manager.prove.outcome import Comparison, Control, Outcome

from .output import Column, Facts, console, count, duration, print_facts, print_table

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN = 20
_SAYS = {
    "exact": "EXACT: the resumed run is the uninterrupted one, bit for bit, and the broken control was caught",
    "different": "DIFFERENT: the resumed run is not the uninterrupted one",
    "blind": "BLIND: everything is equal, but so is the broken control: nothing is proved",
    "no control": "EQUAL, bit for bit; no broken control was compared",
}


def facts_of(outcome: Outcome) -> Facts:
    """``verdict`` (``exact``, ``different``, ``blind``, ``no control``), ``passed``, ``steps``, ``more``, ``folder``;
    ``runs`` (``name``, ``equal``, ``kill``, ``repeatable``: whether the killed run was the
    other's equal until then, ``states``, ``metrics``); ``control`` or null (``caught``, ``broken``,
    ``states``, ``metrics``); ``seconds`` by start of the command; ``notes``.
    """
    return {
        "verdict": outcome.verdict,
        "passed": outcome.passed,
        "steps": outcome.steps,
        "more": outcome.more,
        "folder": None if outcome.folder is None else str(outcome.folder),
        "runs": [
            {
                "kill": None if run.kill is None else _kill_facts(run.kill),
                "repeatable": None if run.before is None else run.before.tally.equal,
                **_comparison_facts(run.comparison),
            }
            for run in outcome.interrupted
        ],
        "control": None if outcome.control is None else _control_facts(outcome.control),
        "seconds": outcome.seconds,
        "notes": outcome.notes,
    }


def _kill_facts(kill: Kill) -> Facts:
    return {
        "resumed_from": kill.resumes_from,
        "saving": None if kill.partial is None else kill.partial.step,
        "phase": kill.phase,
        "processes": kill.processes,
        "seconds": kill.seconds,
    }


def _control_facts(control: Control) -> Facts:
    broken = None if control.broken is None else str(control.broken)
    return {"caught": control.caught, "broken": broken, **_comparison_facts(control.comparison)}


def _comparison_facts(found: Comparison) -> Facts:
    metrics = found.metrics
    lines = None
    if metrics is not None:
        lines = {
            "lines": metrics.lines,
            "equal_lines": metrics.equal,
            "repeated_lines": metrics.repeated,
            "began_again": metrics.began_again,
            **_tally_facts(metrics.tally),
        }
    states = {"files": found.states.files, **_tally_facts(found.states.tally)}
    return {"name": found.name, "equal": found.equal, "states": states, "metrics": lines}


def _tally_facts(tally: Tally) -> Facts:
    return {
        "values": tally.compared,
        "differing": tally.differing,
        "ignored": tally.ignored,
        "differences": [_finding_facts(finding) for finding in tally.findings],
    }


def _finding_facts(finding: Finding) -> Facts:
    return {
        "where": finding.where,
        "key": finding.key,
        "first": finding.first,
        "second": finding.second,
        "detail": finding.detail,
    }


def print_outcome(outcome: Outcome) -> None:
    """Print a table of what was compared, what differs, and what to make of it."""
    out = console()
    print_facts(out, _runs(outcome))
    out.print()
    columns = [Column("compared with run A"), Column("values", True), Column("equal", True), Column("different", True)]
    print_table(out, [*columns, Column("")], list(_rows(outcome)))
    for run in outcome.interrupted:
        _print_findings(out, run.comparison)
    out.print()
    for note in outcome.notes:
        out.print(note)
    out.print(_SAYS[outcome.verdict])
    if outcome.folder is not None:
        out.print(f"Logs and metrics: {outcome.folder}")


def _runs(outcome: Outcome) -> Iterator[tuple[str, str]]:
    seconds = outcome.seconds
    if "A" in seconds:
        yield "run A", f"{outcome.steps + outcome.more} steps uninterrupted, {duration(seconds['A'])}"
    for run in outcome.interrupted:
        name, kill = run.comparison.name, run.kill
        if kill is not None:
            yield f"run {name}", f"killed after {duration(kill.seconds)}, {kill.phase}"
            again = duration(seconds.get(f"{name}-resumed", 0.0))
            yield "", f"resumed from step {kill.resumes_from}, {again}"
    if outcome.control is not None and outcome.control.broken is not None:
        yield "run C", f"resumed from a broken copy, {duration(seconds.get('C', 0.0))}"
        yield "", str(outcome.control.broken)


def _rows(outcome: Outcome) -> Iterator[Sequence[str]]:
    for run in outcome.interrupted:
        good = "exact" if run.comparison.equal else "DIFFERENT"
        yield from _comparison_rows(f"run {run.comparison.name}", run.comparison, good, outcome.steps + outcome.more)
    if outcome.control is not None:
        caught = "caught" if outcome.control.caught else "NOT CAUGHT"
        yield from _comparison_rows("control", outcome.control.comparison, caught, outcome.steps + outcome.more)


def _comparison_rows(name: str, found: Comparison, verdict: str, last: int) -> Iterator[Sequence[str]]:
    states = found.states
    yield _row(f"{name}: step {last}, {count(states.files, 'file')}", states.tally, verdict)
    if found.metrics is not None:
        lines, repeated = count(found.metrics.lines, "line"), found.metrics.repeated
        again = f", {repeated} of them done again" if repeated else ""
        yield _row(f"{name}: metrics, {lines}{again}", found.metrics.tally, "")


def _row(what: str, tally: Tally, verdict: str) -> Sequence[str]:
    return what, count(tally.compared), count(tally.compared - tally.differing), count(tally.differing), verdict


def _print_findings(out: Console, found: Comparison) -> None:
    metrics = found.metrics.tally.findings if found.metrics is not None else []
    total = found.states.tally.differing + (found.metrics.tally.differing if found.metrics is not None else 0)
    for title, findings in (("metrics", metrics), ("states", found.states.tally.findings)):
        if findings:
            out.print(f"\nrun {found.name}: {title} that differ from run A's")
            rows = [
                (f"{finding.where}: {finding.key}" if title == "states" else finding.key, _said(finding))
                for finding in findings
            ]
            print_table(out, [Column("where"), Column("run A, then this one")], rows, _SHOWN // 2)
    if total > _SHOWN:
        out.print(f"  {total:,} in all; --json lists up to 1,000 of each")


def _said(finding: Finding) -> str:
    if finding.first == finding.second:
        return finding.detail
    return f"{finding.first} and {finding.second}{f' ({finding.detail})' if finding.detail else ''}"
