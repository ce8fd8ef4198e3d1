"""The engine of a script of Megatron-LM: what its arguments ask for, and what its loading function returns.

Imports megatron-core; only imported once a script saves or loads.

Source: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``generate_state_dict``, ``load_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from mcore_rlhf.engines.base import LoadRequest
from mcore_rlhf.engines.megatron.engine import MegatronEngine
from mcore_rlhf.engines.megatron.origin import Origin
from mcore_rlhf.engines.megatron.prepared import PreparedMegatronLoad
from mcore_rlhf.manager.rng import put_back

from .megatron_session import Trained

_DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


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
        self._script = args

    def prepare_load(self, request: LoadRequest) -> PreparedMegatronLoad:
        """See :class:`~mcore_rlhf.engines.base.Engine`."""
        prepared = super().prepare_load(request)
        self.origin = prepared.origin
        return prepared

    def further(self, name: str, default: Any) -> Any:
        """A top-level value of the checkpoint that was loaded."""
        return default if self.origin is None else self.origin.state.other.get(name, default)

    def restore_megatrons_rng(self) -> str:
        """Put back the random states that Megatron's own file of this rank holds, as Megatron-LM does.

        Returns:
            What became of them, for people.
        """
        file, args = self._own_file(), vars(self._script())
        if file is None or any(self.loaded_args.get(name, 1) != args.get(name, 1) for name in _DEGREES):
            return "random states: those of this run; the layout is not the one that was saved"
        try:
            # Megatron has registered the harmless classes that its files name; anything else is refused
            states = torch.load(file, map_location="cpu", mmap=True, weights_only=True).get("rng_state")
        except (UnpicklingError, RuntimeError, OSError) as error:
            return f"random states: those of this run; {file} gives none: {str(error).partition(chr(10))[0]}"
        if not isinstance(states, list) or not states:
            return "random states: those of this run; the checkpoint has none"
        state = states[self.place.at.dp_rank if args.get("data_parallel_random_init") else 0]
        put_back({ours: state[theirs] for ours, theirs in _NAMES.items()}, self)
        return "random states: Megatron's own, those of the first data-parallel rank on each"

    def _own_file(self) -> Path | None:
        files = () if self.origin is None else self.origin.files
        return next((file for file in files if file.parent.name == self.place.folder), None)


_NAMES = {
    "python": "random_rng_state",
    "numpy": "np_rng_state",
    "torch": "torch_rng_state",
    "cuda": "cuda_rng_state",
    "tracker": "rng_tracker_states",
}
"""The manager's names, and Megatron's."""
