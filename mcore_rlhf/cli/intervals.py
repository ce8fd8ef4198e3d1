"""``mcore-rlhf interval``: how often to save, and why."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

from mcore_rlhf.errors import UsageError
from mcore_rlhf.manager.run import interval
from mcore_rlhf.manager.run.interval import Costs, Estimate, Measured, measure
from mcore_rlhf.storage.paths import parse_size

from .options import CostOptions
from .output import Column, Facts, count, duration, emit_json, print_table, say, size
from .steps import require_root


def run(root: Path | None, given: CostOptions, every: int | None, json: bool) -> None:
    """Compute, and explain.

    Args:
        root: A run whose steps are measured.
        given: What the options say; they win over what is measured.
        every: A further interval to compare.
        json: For machines.
    """
    if root is not None:
        require_root(root)
    measured = measure(root) if root is not None else None
    costs = costs_of(given, measured)
    if json:
        emit_json(_facts(costs, measured, every))
    else:
        _print(costs, measured, every)


def costs_of(given: CostOptions, measured: Measured | None) -> Costs:
    """The costs from options and measurements.

    Raises:
        UsageError: One is missing; all that are get named.
    """
    found = measured or Measured(0, 0, None, None, None)
    step = _first(given.step_seconds, found.step_seconds)
    save = _first(given.save_seconds, found.save_seconds, found.stall_seconds)
    stall = _first(given.stall_seconds, found.stall_seconds)
    wanted = {"--step-seconds": step, "--save-seconds": save, "--mtbf-hours": given.mtbf_hours}
    missing = [name for name, value in wanted.items() if value is None]
    if step is None or save is None or given.mtbf_hours is None:
        measuring = "its steps do not say it" if measured else "--root measures the first two from a run"
        raise UsageError(f"missing: {', '.join(missing)}; {measuring}\nGive what is missing as options.")
    nbytes = _size(given.size) if given.size is not None else found.nbytes
    return Costs(
        step, save, 3600 * given.mtbf_hours, given.steps, stall, given.restart_seconds, nbytes, given.keep_last
    )


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise UsageError(f"--size: {error}") from None


def _facts(costs: Costs, measured: Measured | None, every: int | None) -> Facts:
    """``costs``; ``measured`` (null without a root); ``best`` and ``table`` (estimates); ``young`` and ``daly`` (``seconds``,
    ``every``); ``failures`` expected, and the ``failure_probability``; ``explanation`` (lines).
    """
    optimum = interval.best(costs)
    return {
        "costs": asdict(costs),
        "measured": asdict(measured) if measured is not None else None,
        "best": asdict(optimum),
        "young": _classical(costs, interval.young(costs)),
        "daly": _classical(costs, interval.daly(costs)),
        "failures": costs.failures,
        "failure_probability": -math.expm1(-costs.failures),
        "table": [asdict(row) for row in interval.around(costs, *([every] if every else []))],
        "explanation": explanation(costs, optimum),
    }


def _classical(costs: Costs, seconds: float) -> Facts:
    return {"seconds": seconds, "every": interval.in_steps(costs, seconds)}


def explanation(costs: Costs, optimum: Estimate) -> list[str]:
    """Why it is this interval, in a few sentences."""
    lines = [
        f"In {duration(costs.training)} of training with one failure every {duration(costs.mtbf_seconds)}, "
        f"{costs.failures:.2f} failures are to be expected ({-math.expm1(-costs.failures):.0%} for at least one).",
        f"Saving every {count(optimum.every, 'step')} takes {duration(optimum.saving_seconds)} of training in all, and failures "
        f"cost {duration(optimum.lost_seconds)}: half an interval each on average"
        + (", and the restart." if costs.restart_seconds else "."),
    ]
    if costs.shortest < optimum.every < costs.steps:
        lines.append(
            "Saving more often would cost more than it rescues; saving less often would lose more than it spares."
        )
    if costs.stall < costs.save_seconds:
        lines.append(
            f"A save keeps training waiting for {duration(costs.stall)} of its {duration(costs.save_seconds)}; what is written "
            "behind the training is lost by a failure until it is committed, which counts above."
        )
    if optimum.every == costs.shortest > 1:
        lines.append("No shorter interval is possible: one save has to be committed before the next begins.")
    if optimum.every == costs.steps:
        lines.append("That is the end of the run: a failure is too rare to be worth a save before it.")
    if costs.stall > costs.mtbf_seconds / 10:
        lines.append("Saves take long for such frequent failures: all these formulas are first approximations there.")
    if not costs.step_nbytes:
        lines.append("Give --size, or --root, for the disk use.")
    else:
        kept = "all steps are kept" if costs.keep_last is None else f"{count(costs.keep_last, 'step')} are kept"
        lines.append(
            f"The disk holds {size(optimum.disk_nbytes)} where {kept}, and {size(costs.step_nbytes)} more during a save."
        )
    return lines


def _print(costs: Costs, measured: Measured | None, every: int | None) -> None:
    optimum = interval.best(costs)
    say(f"save every {count(optimum.every, 'step')} ({duration(optimum.every * costs.step_seconds)})")
    for line in explanation(costs, optimum):
        say(f"  {line}")
    for name, seconds in (("Young 1974", interval.young(costs)), ("Daly 2006", interval.daly(costs))):
        say(f"  {name}: {duration(seconds)}, {count(interval.in_steps(costs, seconds), 'step')}")
    if measured is not None:
        say(f"  measured from {count(measured.steps, 'step')}: medians")
    titles = ("every", "saves", "saving", "lost", "overhead", *(("disk",) if costs.step_nbytes else ()))
    rows = (_row(row)[: len(titles)] for row in interval.around(costs, *([every] if every else [])))
    print_table([Column(title, True) for title in titles], rows)


def _row(row: Estimate) -> tuple[str, ...]:
    disk = size(row.disk_nbytes)
    saves, overhead = f"{row.saves:,.1f}", f"{row.overhead:.2%}"
    return str(row.every), saves, duration(row.saving_seconds), duration(row.lost_seconds), overhead, disk
