"""What to keep, for :class:`~mcore_rlhf.ManagerOptions`: what a script imports."""

from __future__ import annotations

from .run.retention import KeepBest, KeepEvery, KeepLast, KeepRule, Retention, SizeCap, apply, plan_deletions

__all__ = [
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepRule",
    "Retention",
    "SizeCap",
    "apply",
    "plan_deletions",
]
