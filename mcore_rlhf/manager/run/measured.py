"""What the steps of a run have cost so far, from their manifests."""

from __future__ import annotations

import calendar
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from mcore_rlhf.errors import NotACheckpoint
from mcore_rlhf.storage.manifest import Manifest

from . import steps


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
