"""A live DeepSpeed engine of any ZeRO stage: its state as DeepSpeed's own files, and any of them into it.

:class:`DeepSpeedEngine` does not import DeepSpeed itself; it works with the engine that it is given.
"""

from .engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
