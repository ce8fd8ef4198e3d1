"""A checkpoint of transformers' Trainer, or accelerate's, as it sees itself; its files' names are in
:mod:`mcore_rlhf.families.trainer_files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.families.trainer_files import ACCELERATE, TRANSFORMERS

SCALER = "scaler.pt"
"""Of both: torch's ``GradScaler``."""
ALIKE = (TRANSFORMERS.format, ACCELERATE.format)
"""Formats whose files have the same places."""


@dataclass(slots=True)
class HfRunState(ModuleState):
    """What such a checkpoint has besides.

    Args:
        scalars: What the optimizer keeps per parameter that is no tensor of its shape: ``step``.
        groups: The param groups as the file deals them; those of the source may be of another format that it was made of.
        schedule: The scheduler as the file has it; the same holds.
        within: What the weights' own format keeps besides; None where that is of no use to it.
    """

    groups: tuple[ParamGroup, ...] = ()
    schedule: Mapping[str, object] = field(default_factory=dict)
    within: ModuleState | None = None
    scalars: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
