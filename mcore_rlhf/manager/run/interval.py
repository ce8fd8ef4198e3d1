"""How often to save: what the steps of a run have cost so far, what an interval of N steps costs, and which N costs least."""

from __future__ import annotations

import calendar
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

from mcore_rlhf.errors import NotACheckpoint, UsageError
from mcore_rlhf.storage.manifest import Manifest

from . import steps


@dataclass(frozen=True, slots=True)
class Costs:
    """What a run costs, measured or guessed.

    Args:
        step_seconds: Time of one training step.
        save_seconds: Time from the start of a save until it is committed.
        mtbf_seconds: Mean time between failures of the whole job.
        steps: Length of the run.
        stall_seconds: For how long a save keeps training waiting; None where all of it does.
        restart_seconds: From a failure until training goes on: queueing, starting, loading.
        step_nbytes: Bytes of one saved step.
        keep_last: How many steps are kept at a time; None keeps all.

    Raises:
        UsageError: A number is negative, not finite, or zero where that has no meaning; all such are named.
    """

    step_seconds: float
    save_seconds: float
    mtbf_seconds: float
    steps: int
    stall_seconds: float | None = None
    restart_seconds: float = 0.0
    step_nbytes: int = 0
    keep_last: int | None = None

    def __post_init__(self) -> None:
        positive = {"step_seconds", "mtbf_seconds", "steps", "keep_last"}
        given = {item.name: getattr(self, item.name) for item in fields(self) if getattr(self, item.name) is not None}
        wrong = [
            f"{name} should be {'positive' if name in positive else 'at least 0'}, found {value}"
            for name, value in given.items()
            if not math.isfinite(value) or value < 0 or (name in positive and value == 0)
        ]
        if wrong:
            raise UsageError("; ".join(wrong))

    @property
    def stall(self) -> float:
        """Seconds that one save takes from training."""
        return self.save_seconds if self.stall_seconds is None else min(self.stall_seconds, self.save_seconds)

    @property
    def training(self) -> float:
        """Seconds of training alone."""
        return self.steps * self.step_seconds

    @property
    def failures(self) -> float:
        """How many failures are to be expected."""
        return self.training / self.mtbf_seconds

    @property
    def shortest(self) -> int:
        """The least interval, in steps, at which one save is committed before the next begins."""
        behind = self.save_seconds - self.stall
        return min(self.steps, max(1, math.ceil(behind / self.step_seconds)))


@dataclass(frozen=True, slots=True)
class Estimate:
    """What saving every ``every`` steps is expected to cost.

    Args:
        every: The interval, in steps.
        saves: How often is saved.
        saving_seconds: Training time that the saves take.
        lost_seconds: Time that is trained again, and restarts.
        total_seconds: Expected time of the whole run.
        overhead: What saves and failures add to training, as a share of it.
        disk_nbytes: Bytes that the kept steps occupy; while one is written, one more.
    """

    every: int
    saves: float
    saving_seconds: float
    lost_seconds: float
    total_seconds: float
    overhead: float
    disk_nbytes: int


def estimate(costs: Costs, every: int) -> Estimate:
    """What saving every ``every`` steps is expected to cost.

    What is written behind the training is not safe yet: a failure then also loses what was trained meanwhile.

    Raises:
        UsageError: ``every`` is not positive.
    """
    if every < 1:
        raise UsageError(f"the interval should be at least one step, found {every}")
    saves = costs.steps / every
    saving = saves * costs.stall
    behind = costs.save_seconds - costs.stall
    lost = costs.failures * (every / 2 * costs.step_seconds + behind + costs.restart_seconds)
    kept = saves if costs.keep_last is None else min(saves, costs.keep_last)
    added = saving + lost
    return Estimate(
        every, saves, saving, lost, costs.training + added, added / costs.training, round(kept * costs.step_nbytes)
    )


def best(costs: Costs) -> Estimate:
    """The cheapest interval, of equals the longest: found exactly, because the cost falls up to one N and rises after it.

    It is not shorter than :attr:`Costs.shortest`, nor longer than the run.
    """
    low, high = costs.shortest, costs.steps
    while low < high:  # the least N after which the cost rises
        middle = (low + high) // 2
        if _gain(costs, middle) >= 0:
            low = middle + 1
        else:
            high = middle
    return estimate(costs, low)


def _gain(costs: Costs, every: int) -> float:
    """What is saved by an interval one step longer: fewer saves, less what a failure then costs more."""
    fewer_saves = costs.steps * costs.stall / (every * (every + 1))
    return fewer_saves - costs.failures * costs.step_seconds / 2


def young(costs: Costs) -> float:
    """Young's optimum, in seconds of training between two saves."""
    return math.sqrt(2 * costs.stall * costs.mtbf_seconds)


def daly(costs: Costs) -> float:
    """Daly's optimum, in seconds of training between two saves."""
    save, mtbf = costs.stall, costs.mtbf_seconds
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def in_steps(costs: Costs, seconds: float) -> int:
    """An interval in steps, at least one and at most the run."""
    return min(costs.steps, max(1, round(seconds / costs.step_seconds)))


def around(costs: Costs, *also: int) -> list[Estimate]:
    """Estimates to compare: the best interval, fractions and multiples of it, and the given ones; shortest first."""
    middle = best(costs).every
    intervals = {max(1, round(middle * factor)) for factor in (0.25, 0.5, 1, 2, 4)} | set(also)
    return [estimate(costs, every) for every in sorted(intervals) if every <= max(costs.steps, *also, 1)]


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians over the committed steps of a root; None where no manifest says it.

    Args:
        steps: Over how many steps.
        nbytes: Bytes of a step.
        save_seconds: From the start of a save until it was committed.
        stall_seconds: For how long a save kept training waiting.
        step_seconds: Time of one training step: as reported, or from the times of consecutive saves.
    """

    steps: int
    nbytes: int
    save_seconds: float | None
    stall_seconds: float | None
    step_seconds: float | None


def measure(root: Path) -> Measured:
    """Read what the steps of a root cost.

    Raises:
        NotACheckpoint: No step in it is committed.
        CheckpointError: See :func:`~.steps.listed`.
    """
    found = steps.committed(root, quarantined=True)
    if not found:
        raise NotACheckpoint(
            f"{root}: no committed step to measure\nGive --step-seconds, --save-seconds and --size instead."
        )
    manifests = [steps.read_manifest(step.path) for step in found]
    stall = _median(_reported(manifests, "stall_seconds"))
    step = _median(_reported(manifests, "step_seconds")) or _median(_between(manifests, stall or 0.0))
    nbytes = statistics.median_low(sum(entry.nbytes for entry in manifest.files.values()) for manifest in manifests)
    return Measured(len(found), nbytes, _median(_reported(manifests, "save_seconds")), stall, step)


def _reported(manifests: Sequence[Manifest], name: str) -> Iterator[float]:
    for manifest in manifests:
        value = manifest.report.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            yield float(value)


def _between(manifests: Sequence[Manifest], stall: float) -> Iterator[float]:
    """Seconds per step between consecutive saves. Waiting for a restart makes single ones long; the median forgets them."""
    times = [(manifest.step, _seconds(manifest)) for manifest in manifests]
    known = [(step, seconds) for step, seconds in times if step is not None and seconds is not None]
    for (first, began), (second, ended) in pairwise(known):
        seconds = (ended - began - stall) / (second - first)
        if seconds > 0:
            yield seconds


def _seconds(manifest: Manifest) -> int | None:
    try:
        return calendar.timegm(time.strptime(str(manifest.provenance.get("time")), "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return None


def _median(values: Iterator[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None
