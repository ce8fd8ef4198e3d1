"""What DeepSpeed's own ``save_checkpoint`` would write, taken from it before it is written, and never gathered.

DeepSpeed makes its state dictionaries and hands them to a *checkpoint engine*, which writes them. Here one stands in that
only keeps them: so the files are DeepSpeed's own to the key, whatever its version puts into them.

Source: deepspeed 0.19.8, ``runtime/engine.py`` (``save_checkpoint``, ``_save_checkpoint``, ``_save_zero_checkpoint``).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from mcore_rlhf.errors import Unsupported

State = dict[str, Any]
_ATOMS = (str, int, float, bool, bytes, type(None), torch.dtype, torch.device, torch.Size)
RESERVED = frozenset({"checkpoint_parallel_dimensions"})
"""What DeepSpeed does not let a client state overwrite."""


@dataclass(slots=True)
class _Keeper:
    """Stands in for DeepSpeed's checkpoint engine."""

    saved: dict[str, State] = field(default_factory=dict)

    def save(self, state_dict: State, path: str) -> None:
        """Keep what is to be written."""
        self.saved[path] = state_dict

    def preserves_storage_sharing(self) -> bool:
        """As the one that calls ``torch.save``: DeepSpeed need not clone."""
        return False


def own_files(
    engine: Any, tag: str, client_state: Mapping[str, object], exclude_frozen: bool, *, trained: bool = True
) -> dict[str, State]:
    """The content of the files that this rank writes, by path below the folder that ``save_checkpoint`` is given.

    Tensors are the live ones. No collective is called: where stage 3 keeps small parameters whole between steps, their
    places in the module are emptied here, and not by partitioning them.

    Args:
        engine: DeepSpeed's engine.
        tag: Name of the checkpoint's folder.
        client_state: Goes to the top level, over DeepSpeed's own keys, as DeepSpeed has it.
        exclude_frozen: See ``save_checkpoint``.
        trained: Whether there is an optimizer. In bf16 without one DeepSpeed wraps a dummy, which its own save trips over.

    Raises:
        Unsupported: The client state has a key that DeepSpeed guards.
    """
    if clash := RESERVED & set(client_state):
        raise Unsupported(f"client_state: the key {min(clash)!r} is DeepSpeed's own\nGive it another name.")
    keeper = _Keeper()
    others: dict[str, object] = {} if trained else {"optimizer": None, "save_zero_checkpoint": False}
    others |= {"_get_param_fragment_func": _fragment, "_copy_recovery_script": _nothing}
    with _replaced(engine, checkpoint_engine=keeper, **others):
        engine._save_checkpoint("", tag, client_state=dict(client_state), exclude_frozen_parameters=exclude_frozen)
        if engine.save_zero_checkpoint:
            engine._save_zero_checkpoint("", tag)
    for path, state in keeper.saved.items():
        if path.endswith("model_states.pt") and engine.zero_optimization_partition_weights():
            _empty_sliced(engine, state)
    return {path: _settled(state) for path, state in keeper.saved.items()}


@contextmanager
def _replaced(engine: Any, **values: object) -> Iterator[None]:
    """Attributes of the engine that are others for a while."""
    own = vars(engine)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            del own[name]
        own.update(before)


def _fragment(param: Any) -> torch.Tensor:
    """A frozen parameter, or this rank's slice of it, without DeepSpeed's copy to the CPU."""
    found: torch.Tensor = (param.ds_tensor if hasattr(param, "ds_id") else param).detach()
    return found


def _nothing(save_path: str) -> None:
    """DeepSpeed copies two scripts beside the tag; this package reads such files without running any."""


def _empty_sliced(engine: Any, state: State) -> None:
    """Stage 3: all parameters are empty in the module, those too that are whole between steps just now."""
    sliced = {name for name, param in engine.module.named_parameters(remove_duplicate=False) if hasattr(param, "ds_id")}
    module = state["module"]
    state["module"] = type(module)(
        (name, torch.empty(0, dtype=value.dtype) if name in sliced else value) for name, value in module.items()
    )


def _settled(value: Any) -> Any:
    """The same nest with containers and objects of its own, so that training may go on; tensors are still the live ones."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        items = ((key, _settled(item)) for key, item in value.items())
        return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
    if isinstance(value, _ATOMS):
        return value
    if type(value) in (list, tuple):
        return type(value)(_settled(item) for item in value)
    return copy.deepcopy(value)
