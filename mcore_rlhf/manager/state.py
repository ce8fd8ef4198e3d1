"""State that RLHF needs: what one imports to describe it, and to extend it by controllers and schedules of one's own."""

from __future__ import annotations

from .rlhf.controls import (
    KL_CONTROLLERS,
    SCHEDULES,
    AdaptiveKL,
    ConstantSchedule,
    CosineSchedule,
    FixedKL,
    KLController,
    LinearSchedule,
    Schedule,
)
from .rlhf.pieces import BestMetric, Buffer, InFlightPrompt, RunningStatistics, merged
from .rlhf.state import RlhfState, tensor_file_stems

__all__ = [
    "KL_CONTROLLERS",
    "SCHEDULES",
    "AdaptiveKL",
    "BestMetric",
    "Buffer",
    "ConstantSchedule",
    "CosineSchedule",
    "FixedKL",
    "InFlightPrompt",
    "KLController",
    "LinearSchedule",
    "RlhfState",
    "RunningStatistics",
    "Schedule",
    "merged",
    "tensor_file_stems",
]
