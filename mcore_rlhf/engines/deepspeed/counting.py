"""The live account of a DeepSpeed rank: the module's tensors, and what the optimizer keeps of its flat ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mcore_rlhf.core.names import PARAM
from mcore_rlhf.layouts.zero import FlatGroup

from ..account import HeldTensor
from ..inventory import BUFFER, Alive, Memory, of_optimizer
from .optimizers import Flat, LiveOptimizer
from .slots import Weight

_ASIDE = "muon_momentum_buffer_partitioned_groups_flat"
"""Where stage 3 keeps Muon's momentum, by number of the sub-group, with ``save_muon_momentum_buffer_in_memory``
(deepspeed 0.19.8, ``runtime/zero/stage3.py``)."""


def held(
    engine: Any, live: LiveOptimizer | None, weights: Sequence[Weight], memory: Memory, *, frozen: bool
) -> Iterator[HeldTensor]:
    """All that is alive on this rank.

    Args:
        engine: DeepSpeed's engine.
        live: Its optimizer, or None.
        weights: The module's tensors.
        memory: What this rank writes.
        frozen: Whether frozen parameters are saved; they are left out on request.
    """
    params = set(engine.param_names.values())
    replicas = f"the module of model-parallel rank {engine.mp_rank if engine.mp_world_size > 1 else 0}"
    for one in weights:
        if one.sliced is not None and one.trained:
            continue  # rounded from its master, which is counted
        if one.trained or frozen or one.name not in params:
            alive = Alive(one.name, PARAM if one.name in params else BUFFER, one.tensor)
            yield from memory.held([alive], None if one.sliced is not None else replicas)
    if live is not None:
        yield from memory.held(_kept(live), replicas if _is_whole(live) else None)


def _kept(live: LiveOptimizer) -> Iterator[Alive]:
    names = {id(flat.held): _named(flat) for flat in live.flats}
    masters = [flat.held for flat in live.flats] if live.masters else []
    yield from of_optimizer(live.inner, lambda held: names.get(id(held), "a tensor of no flat group"), masters)
    for number, tensor in getattr(live.wrapper, _ASIDE, {}).items():
        yield Alive(f"sub-group {number}", "momentum_buffer", tensor)


def _named(flat: Flat) -> str:
    return f"{flat.names[0]} …" if len(flat.names) > 1 else "".join(flat.names)


def _is_whole(live: LiveOptimizer) -> bool:
    """Whether every data-parallel rank has all of the optimizer: stage 0, unless it is dealt out all the same (bf16)."""
    return all(isinstance(flat.geometry, FlatGroup) and flat.geometry.dp == 1 for flat in live.flats)
