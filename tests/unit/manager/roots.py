"""Roots with steps in them, written by hand: the manifest's text is spelled out here, not made by the library."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_rlhf.manager.run import steps


def make_step(
    root: Path,
    step: int,
    *,
    nbytes: int = 1000,
    roles: Sequence[str] = ("actor",),
    metrics: Mapping[str, object] | None = None,
    report: Mapping[str, object] | None = None,
) -> Path:
    """Make a committed step with one file of ``nbytes`` bytes per role."""
    folder, data = root / f"global_step_{step}", b"x" * nbytes
    for role in roles:
        (folder / role).mkdir(parents=True)
        (folder / role / "weights.bin").write_bytes(data)
    manifest = {
        "format": "mcore_rlhf",
        "version": 1,
        "step": step,
        "transaction": f"{step:013d}-0badcafe",
        "parts": [{"role": role, "format": "torch", "parallel": {}} for role in roles],
        "files": {f"{role}/weights.bin": {"bytes": nbytes, "crc32": zlib.crc32(data)} for role in roles},
        "lossless": None,
        "provenance": {"time": "2026-01-02T03:04:05Z"},
        "report": {"metrics": dict(metrics or {}), **(report or {})},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def states(root: Path) -> dict[int, str]:
    """The state of every step by number."""
    return {step.step: step.state for step in steps.listed(root)}
