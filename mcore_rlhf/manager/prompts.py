"""Prompts and each rank's part of them: what a script imports."""

from __future__ import annotations

from .rlhf.prompts import Prompt, shard

__all__ = [
    "Prompt",
    "shard",
]
