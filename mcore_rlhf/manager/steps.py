"""Which steps lie in a root: what a script imports."""

from __future__ import annotations

from .run.steps import Step, committed, is_committed, listed, newest, newest_first, quarantine, release

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
