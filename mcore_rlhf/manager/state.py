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
from .rlhf.state import RlhfState, tensor_file_stems
from .rlhf.statistics import BestMetric, RunningStatistics, merged
from .rlhf.tensors import Buffer, InFlightPrompt

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
