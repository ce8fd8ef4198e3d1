"""When to save, for :class:`~mcore_rlhf.ManagerOptions`: what a script imports."""

from __future__ import annotations

from .run.policies import (
    AnyOf,
    AtEnd,
    BeforeDeadline,
    Deadline,
    EveryMinutes,
    EverySteps,
    OnSignal,
    SavePoint,
    SavePolicy,
)

__all__ = [
    "AnyOf",
    "AtEnd",
    "BeforeDeadline",
    "Deadline",
    "EveryMinutes",
    "EverySteps",
    "OnSignal",
    "SavePoint",
    "SavePolicy",
]
