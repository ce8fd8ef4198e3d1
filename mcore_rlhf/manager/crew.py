"""Several worlds that save one step together: what a script imports."""

from __future__ import annotations

from .run.crew import Worlds

__all__ = [
    "Worlds",
]
