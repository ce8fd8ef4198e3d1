"""The engine of a script of Megatron-LM: what its arguments ask for, and what its loading function returns.

Imports megatron-core; only imported once a script saves or loads.

Source: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``generate_state_dict``, ``load_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mcore_rlhf.engines.base import LoadRequest
from mcore_rlhf.engines.megatron.engine import MegatronEngine
from mcore_rlhf.engines.megatron.load import PreparedMegatronLoad
from mcore_rlhf.engines.megatron.slots import Origin

from .megatron_arguments import Trained


class ScriptEngine(MegatronEngine):
    """A :class:`~mcore_rlhf.engines.megatron.engine.MegatronEngine` with the arguments of a script.

    Args:
        trained: The live objects.
        args: Megatron-LM's ``get_args``.
        further: Top-level values of the model file, as they are at the moment of a save; None for an engine that loads.

    Attributes:
        origin: What was loaded; None before.
    """

    def __init__(
        self, trained: Trained, args: Callable[[], Any], further: Callable[[], Mapping[str, object]] | None = None
    ) -> None:
        saves = further is not None
        bare = saves and bool(getattr(args(), "no_save_optim", False))
        optimizer, scheduler = (None, None) if bare else (trained.optimizer, trained.scheduler)
        super().__init__(trained.chunks, optimizer, scheduler, args=args, further=further)
        self.origin: Origin | None = None

    def prepare_load(self, request: LoadRequest) -> PreparedMegatronLoad:
        """See :class:`~mcore_rlhf.engines.base.Engine`."""
        prepared = super().prepare_load(request)
        self.origin = prepared.origin
        return prepared

    def further(self, name: str, default: Any) -> Any:
        """A top-level value of the checkpoint that was loaded."""
        return default if self.origin is None else self.origin.state.other.get(name, default)
