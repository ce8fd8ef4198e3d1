"""How often to save: against brute force, against the literature, and against a simulation of failures."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_rlhf.errors import NotACheckpoint, UsageError
from mcore_rlhf.manager.run import steps
from mcore_rlhf.manager.run.interval import Costs, around, best, daly, estimate, in_steps, measure, young

from .roots import make_step


def test_the_formula_of_the_specification() -> None:
    """Training + failures · N/2 · step + steps/N · save, worked out by hand."""
    costs = Costs(step_seconds=10, save_seconds=30, mtbf_seconds=20_000, steps=1000, step_nbytes=7)
    found = estimate(costs, 50)
    assert costs.failures == 0.5
    assert (found.saves, found.saving_seconds, found.lost_seconds) == (20, 600, 0.5 * 25 * 10)
    assert found.total_seconds == 10_000 + 600 + 125
    assert found.overhead == pytest.approx(0.0725)
    assert found.disk_nbytes == 20 * 7


def test_restarts_kept_steps_and_saves_behind_the_training() -> None:
    costs = Costs(10, 30, 20_000, 1000, stall_seconds=2, restart_seconds=100, step_nbytes=7, keep_last=3)
    found = estimate(costs, 50)
    assert (found.saving_seconds, found.lost_seconds) == (40, 0.5 * (250 + 28 + 100))
    assert found.disk_nbytes == 3 * 7
    assert estimate(costs, 500).disk_nbytes == 2 * 7


_COSTS = st.builds(
    Costs,
    step_seconds=st.floats(0.01, 100),
    save_seconds=st.floats(0, 500),
    mtbf_seconds=st.floats(10, 1e6),
    steps=st.integers(1, 300),
    stall_seconds=st.one_of(st.none(), st.floats(0, 500)),
    restart_seconds=st.floats(0, 1000),
)


@given(_COSTS)
def test_no_other_interval_is_cheaper(costs: Costs) -> None:
    found = best(costs)
    allowed = range(costs.shortest, costs.steps + 1)
    assert found.every in allowed
    cheapest = min(estimate(costs, every).total_seconds for every in allowed)
    assert found.total_seconds <= cheapest * (1 + 1e-12)


@given(st.floats(1, 50), st.floats(1, 500), st.floats(1e5, 1e7))
def test_blocking_saves_reproduce_young(step: float, save: float, mtbf: float) -> None:
    """The exact optimum of the first-order cost is Young's, rounded to a whole step."""
    costs = Costs(step, save, mtbf, steps=10_000_000)
    assert young(costs) == pytest.approx(math.sqrt(2 * save * mtbf))
    assert abs(best(costs).every - young(costs) / step) <= 1


def test_daly_of_the_paper() -> None:
    """Equation 37, evaluated by hand for a save of 5 minutes and an MTBF of 24 hours."""
    costs = Costs(1, 300, 86_400, 10**6)
    assert young(costs) == pytest.approx(7200)
    ratio = 300 / 172_800
    assert daly(costs) == pytest.approx(7200 * (1 + ratio**0.5 / 3 + ratio / 9) - 300)
    assert daly(costs) == pytest.approx(7001.4, abs=0.1)
    assert daly(Costs(1, 300, 100, 10**6)) == 100  # a save takes longer than twice the MTBF


def test_daly_is_near_the_optimum_of_his_full_model() -> None:
    """Minimise his wall-clock formula (failures are exponential) numerically, and compare."""
    save, mtbf = 300.0, 7200.0

    def wall(interval: float) -> float:
        return mtbf * math.expm1((interval + save) / mtbf) / interval

    numerical = min(range(100, 7200), key=wall)
    assert daly(Costs(1, save, mtbf, 10**6)) == pytest.approx(numerical, rel=0.01)


def test_the_estimate_agrees_with_simulated_failures(rng: random.Random) -> None:
    """Fail at exponential times, go back to the last save, restart: the mean is what was estimated."""
    costs = Costs(step_seconds=10, save_seconds=20, mtbf_seconds=50_000, steps=2000, restart_seconds=60)
    totals = [_simulated(costs, 40, rng) for _ in range(1500)]
    mean = sum(totals) / len(totals)
    assert mean == pytest.approx(estimate(costs, 40).total_seconds, rel=0.01)


def _simulated(costs: Costs, every: int, rng: random.Random) -> float:
    """Seconds of one run."""
    total, saved, block = 0.0, 0, every * costs.step_seconds + costs.save_seconds
    fails_in = rng.expovariate(1 / costs.mtbf_seconds)
    while saved < costs.steps:
        if fails_in < block:
            total += fails_in + costs.restart_seconds
            fails_in = rng.expovariate(1 / costs.mtbf_seconds)
        else:
            total, fails_in, saved = total + block, fails_in - block, saved + every
    return total


def test_edges() -> None:
    free = Costs(10, 0, 1000, 100)
    assert best(free).every == 1  # saving costs nothing
    assert best(Costs(10, 5, 1e12, 100)).every == 100  # nothing ever fails
    behind = Costs(10, 95, 1e4, 100, stall_seconds=0)
    assert (behind.shortest, best(behind).every) == (10, 10)  # one save at a time
    assert best(Costs(10, 1e6, 1e9, 3, stall_seconds=0)).every == 3
    assert best(Costs(10, 5, 1000, 1)).every == 1
    assert Costs(10, 5, 1000, 1, stall_seconds=9).stall == 5  # no longer than the save itself


def test_the_comparison_holds_the_best_and_the_given_ones() -> None:
    costs = Costs(10, 20, 50_000, 2000)
    table = around(costs, 1000)
    assert best(costs) in table
    assert 1000 in [row.every for row in table]
    assert min(table, key=lambda row: row.total_seconds) == best(costs)
    assert [row.every for row in around(Costs(10, 0, 1000, 1))] == [1]


def test_intervals_in_steps_stay_within_the_run() -> None:
    costs = Costs(10, 20, 50_000, 30)
    assert [in_steps(costs, seconds) for seconds in (0, 14, 16, 1e9)] == [1, 1, 2, 30]


def test_senseless_costs_are_all_named() -> None:
    with pytest.raises(UsageError) as caught:
        Costs(0, -1, math.nan, 0, keep_last=0)
    for name in ("step_seconds", "save_seconds", "mtbf_seconds", "steps should be positive", "keep_last"):
        assert name in str(caught.value)
    with pytest.raises(UsageError, match="at least one step, found 0"):
        estimate(Costs(1, 1, 1, 1), 0)


def test_measuring_takes_medians_of_what_manifests_report(tmp_path: Path) -> None:
    for number, seconds in ((10, 30.0), (20, 50.0), (30, 1000.0)):
        report = {"save_seconds": seconds, "stall_seconds": 2, "step_seconds": seconds / 10}
        make_step(tmp_path, number, nbytes=number * 100, report=report)
    make_step(tmp_path, 40, report={"save_seconds": 1e9})
    (tmp_path / "global_step_40" / "actor" / "weights.bin").unlink()  # damaged: not counted
    found = measure(tmp_path)
    assert (found.steps, found.save_seconds, found.stall_seconds, found.step_seconds) == (3, 50.0, 2.0, 5.0)
    assert found.nbytes == 2000


def test_step_times_come_from_saves_where_no_manifest_has_them(tmp_path: Path) -> None:
    for number, minute in ((10, 0), (20, 2), (30, 4), (40, 59)):  # 120 s for 10 steps, and a long restart
        folder = make_step(tmp_path, number, report={"stall_seconds": 20, "save_seconds": "unknown"})
        text = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(text.replace("T03:04:05Z", f"T03:{minute:02d}:05Z"))
    steps.quarantine(tmp_path / "global_step_20", "still measured")
    found = measure(tmp_path)
    assert (found.step_seconds, found.save_seconds) == (10.0, None)


def test_one_step_without_reports_says_its_size_only(tmp_path: Path) -> None:
    make_step(tmp_path, 10)
    found = measure(tmp_path)
    assert (found.steps, found.nbytes, found.save_seconds, found.step_seconds) == (1, 1000, None, None)


def test_nothing_to_measure(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match="no committed step to measure"):
        measure(tmp_path)
