"""Several worlds that save one step together: what a script imports."""

from __future__ import annotations

from .run.world import Worlds

__all__ = [
    "Worlds",
]
