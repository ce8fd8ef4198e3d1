"""A checkpoint of transformers' Trainer, or accelerate's, as it sees itself; its files' names are in
:mod:`mcore_rlhf.families.trainer_files`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.families.trainer_files import ACCELERATE, TRANSFORMERS, RunFiles
from mcore_rlhf.formats.base import Format

SCALER = "scaler.pt"
"""Of both: torch's ``GradScaler``."""
HEAD_FILES = ("value_head.safetensors", "value_head.bin")
"""Where LLaMA-Factory keeps a value head, and in this order looks for it (0.9.5, ``model/model_utils/valuehead.py``)."""
ALIKE = (TRANSFORMERS.format, ACCELERATE.format)
"""Formats whose files have the same places."""


@dataclass(frozen=True, slots=True)
class OneModel:
    """A model of a step, which may have several.

    Args:
        files: What the files beside its weights are called.
        weights: The formats that these may have: a whole model's, an adapter's, and an FSDP run's, with its optimizer.
        number: Which it is, from 0.
    """

    files: RunFiles
    weights: Sequence[Format]
    number: int = 0


@dataclass(slots=True)
class HfRunState(ModuleState):
    """What such a checkpoint has besides.

    Args:
        scalars: What the optimizer keeps per parameter that is no tensor of its shape: ``step``.
        groups: The param groups as the file deals them; those of the source may be of another format that it was made of.
        schedule: The scheduler as the file has it; the same holds.
        within: What the weights' own format keeps besides; None where that is of no use to it.
        together: Whether it is one of several models of a step, which have one process's random states.
        whole: Whether it is an FSDP run's that has whole tensors in one file, and names in the optimizer's.
    """

    groups: tuple[ParamGroup, ...] = ()
    schedule: Mapping[str, object] = field(default_factory=dict)
    within: ModuleState | None = None
    scalars: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    together: bool = False
    whole: bool = False
