"""What a step's manifest says that was measured when it was saved."""

from __future__ import annotations

import math
from collections.abc import Mapping

from mcore_rlhf.storage.manifest import Manifest


def comparable(manifest: Manifest) -> dict[str, float]:
    """Metrics of which one is better than another: all that are numbers."""
    return {name: value for name, value in metrics_of(manifest).items() if not math.isnan(value)}


def live_of(manifest: Manifest) -> dict[str, dict[str, int]]:
    """How much state every role held when the step was saved: ``tensors`` and ``bytes``, by role; empty in older manifests."""
    stored = manifest.report.get("live")
    roles = stored.items() if isinstance(stored, Mapping) else ()
    return {
        str(role): {key: int(figures[key]) for key in ("tensors", "bytes")}
        for role, figures in roles
        if isinstance(figures, Mapping) and all(type(figures.get(key)) is int for key in ("tensors", "bytes"))
    }


def metrics_of(manifest: Manifest) -> dict[str, float]:
    """The metrics that a step was saved with; infinities and NaN stand in a manifest as text."""
    found = manifest.report.get("metrics")
    items = found.items() if isinstance(found, Mapping) else ()
    return {str(name): float(value) for name, value in items if _is_number(value)}


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        return value in ("nan", "inf", "-inf")
    return isinstance(value, int | float) and not isinstance(value, bool)
