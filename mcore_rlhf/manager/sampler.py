"""The prompt sampler: what a script imports."""

from __future__ import annotations

from .rlhf.sampler import Cursor, PromptSampler

__all__ = [
    "Cursor",
    "PromptSampler",
]
