"""A live Megatron-core trainer: its model chunks, optimizer and scheduler as Megatron's own checkpoint files.

:class:`MegatronEngine` is imported when first used, since it imports Megatron; the modules that only compute do not. Whatever
imports one of them has what Megatron's own import may lack (:mod:`.importing`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .importing import make_importable

if TYPE_CHECKING:
    from .engine import MegatronEngine as MegatronEngine

__all__ = ["MegatronEngine"]

make_importable()


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".engine", __name__), name)
