"""How FSDP cuts a tensor into one part for each rank."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_rlhf.core.catalog import Box, Shape


def cut(shape: Shape, parts: int) -> Iterator[Box]:
    """Cut a tensor along its first dimension as FSDP does: ``ceil(rows / parts)`` rows each, the last fewer.

    Ranks without rows store one empty part together, behind the last row.
    Source: torch 2.13.0, ``torch.chunk``, which ``distributed/tensor/placement_types.py`` (``Shard``) follows; empty parts as FSDP2
    wrote them.
    """
    rows, inner = -(-shape[0] // parts), shape[1:]
    count = -(-shape[0] // rows) if rows else 0
    for start in range(0, shape[0], rows or 1):
        yield Box((start, *(0,) * len(inner)), (min(rows, shape[0] - start), *inner))
    if count < parts:
        yield Box((shape[0], *(0,) * len(inner)), (0, *inner))
