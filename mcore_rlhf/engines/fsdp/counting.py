"""The live account of a sharded rank: what another rank writes in its place, the table of all ranks says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from mcore_rlhf.core.names import PARAM

from ..account import HeldTensor
from ..base import LiveState
from ..inventory import BUFFER, Alive, Memory, of_optimizer
from .geometry import Everywhere, MeshSplit, Split
from .held import HeldModule
from .optimizers import HeldOptimizer


def held(
    state: LiveState, module: HeldModule, optimizer: HeldOptimizer | None, rank: int, ranks: Sequence[int]
) -> Iterator[HeldTensor]:
    """All that is alive on this rank, apart from what others write, as every rank knows of every other.

    Args:
        state: What is described of the step.
        module: The live module.
        optimizer: Its optimizer, or None.
        rank: This global rank.
        ranks: All that write.
    """
    memory, splits = Memory.of(state.files), dict[tuple[str, str], Split]()
    alive = list[Alive]()
    for one in module.tensors:
        kind = PARAM if isinstance(one.whole, torch.nn.Parameter) else BUFFER
        splits[one.name, kind] = one.split
        alive.append(Alive(one.name, kind, one.local))
    if optimizer is not None:
        splits |= {(kept.param, kept.key): kept.split for kept in optimizer.states}
        whole = {
            param.name for _, params in optimizer.groups for param in params if isinstance(param.split, Everywhere)
        }
        splits |= {(name, ""): Everywhere((1,), ranks[0]) for name in whole}
        alive += _states(optimizer)
    for found in memory.held(alive):
        split = splits.get((found.name, found.state)) or splits.get((found.name, ""))
        if found.here or split is None or not _is_written(split, rank, ranks):
            yield replace(found, among=_among(split, rank))


def _states(optimizer: HeldOptimizer) -> Iterator[Alive]:
    """What torch's optimizer itself has, whatever was described of it."""
    names = {id(param.whole): param.name for _, params in optimizer.groups for param in params}
    for one in of_optimizer(optimizer.optimizer, lambda held: names.get(id(held), f"{held!s:.40}")):
        tensor = one.tensor.to_local() if isinstance(one.tensor, DTensor) else one.tensor
        yield Alive(one.name, one.state, tensor)


def _among(split: Split | None, rank: int) -> str | None:
    """Under tensor parallelism, what is not cut by it lies on several meshes with equal parts: the ranks at one place are alike."""
    if not isinstance(split, MeshSplit) or rank not in split.mesh.at:
        return None
    return f"place {split.mesh.at[rank]} of a mesh {split.mesh.lengths}"


def _is_written(split: Split, rank: int, ranks: Sequence[int]) -> bool:
    """Whether other ranks write all that this one holds of a tensor."""
    if isinstance(split, Everywhere):
        return split.first in ranks
    written = {box for other in ranks for box in split.written(other)}
    return all(box in written for box in split.boxes(rank))
