"""The engine of a script of Megatron-LM: what its arguments ask for, and what its loading function returns.

Imports megatron-core; only imported once a script saves or loads.

Source: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``generate_state_dict``, ``load_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mcore_rlhf.engines.megatron.engine import MegatronEngine

from .megatron_arguments import ScriptObjects


class ScriptEngine(MegatronEngine):
    """A :class:`~mcore_rlhf.engines.megatron.engine.MegatronEngine` with the arguments of a script.

    Args:
        trained: The live objects.
        args: Megatron-LM's ``get_args``.
        further: Top-level values of the model file, as they are at the moment of a save; None for an engine that loads.
    """

    def __init__(
        self, trained: ScriptObjects, args: Callable[[], Any], further: Callable[[], Mapping[str, object]] | None = None
    ) -> None:
        saves = further is not None
        bare = saves and bool(getattr(args(), "no_save_optim", False))
        optimizer, scheduler = (None, None) if bare else (trained.optimizer, trained.scheduler)
        super().__init__(trained.chunks, optimizer, scheduler, args=args, further=further)

    def further(self, name: str, default: Any) -> Any:
        """A top-level value of the checkpoint that was loaded."""
        return default if self.loaded is None else self.loaded.other.get(name, default)
