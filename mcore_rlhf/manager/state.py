"""State that RLHF needs: what one imports to describe it, and to extend it by controllers and schedules of one's own."""

from __future__ import annotations

from .rlhf.best import BestMetric
from .rlhf.kl import KL_CONTROLLERS, AdaptiveKL, FixedKL, KLController
from .rlhf.schedules import SCHEDULES, ConstantSchedule, CosineSchedule, LinearSchedule, Schedule
from .rlhf.state import RlhfState, tensor_file_stems
from .rlhf.statistics import RunningStatistics, merged
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
