"""Which steps lie in a root: what a script imports."""

from __future__ import annotations

from .run.quarantine import quarantine, release
from .run.steps import Step, committed, is_committed, listed, newest, newest_first

__all__ = [
    "Step",
    "committed",
    "is_committed",
    "listed",
    "newest",
    "newest_first",
    "quarantine",
    "release",
]
