"""How FSDP cuts a tensor into one part for each rank."""

from __future__ import annotations

from mcore_rlhf.core.catalog import Box, Shape


def part(shape: Shape, dim: int, world: int, rank: int) -> Box:
    """A rank's part of a tensor that is cut along a dimension: ``ceil(size / world)`` each, the last fewer, then none.

    Source: torch 2.13.0, ``distributed/tensor/placement_types.py`` (``Shard``: as ``torch.chunk``), ``distributed/fsdp/_fully_shard/
    _fsdp_param.py`` (``_init_sharded_param``).
    """
    size = shape[dim]
    each = -(-size // world)
    first = min(rank * each, size)
    count = min(each, size - first)
    offset = tuple(first if at == dim else 0 for at in range(len(shape)))
    return Box(offset, tuple(count if at == dim else full for at, full in enumerate(shape)))


def cut(shape: Shape, parts: int) -> list[Box]:
    """The parts along the first dimension, as they are stored: ranks without rows store one empty part together, behind the last row.

    Source: DCP folders that FSDP2 wrote.
    """
    return list(dict.fromkeys(part(shape, 0, parts, rank) for rank in range(parts)))
