"""FSDP1's flat parameters: which range of which original parameter this rank holds, and where.

Source: torch 2.13.0, ``distributed/fsdp/_flat_param.py`` (``FlatParameter``, ``FlatParamHandle``),
``distributed/fsdp/_common_utils.py`` (``_FSDPState``). Only attributes are read; nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from mcore_rlhf.errors import Unsupported

from .geometry import FlatSplit, Mesh, Split

_SHARDED = ("FULL_SHARD", "SHARD_GRAD_OP")


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    split: FlatSplit
    handle: Any


@dataclass(slots=True)
class FlatParams:
    """All original parameters of an FSDP1 model; empty for another."""

    _places: dict[int, _Place] = field(default_factory=dict)
    _kept: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, module: torch.nn.Module) -> FlatParams:
        """Look at a model.

        Raises:
            Unsupported: It was wrapped in a way that does not keep its parameters apart, or that shards nothing.
        """
        found = cls()
        for part in module.modules():
            if isinstance(part, FullyShardedDataParallel) and part._handle is not None:
                found._add(part, part._handle)
        return found

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an original parameter."""
        return id(tensor) in self._places

    def place(self, tensor: torch.Tensor) -> tuple[Split, torch.Tensor]:
        """How an original parameter is dealt out, and this rank's range, which shares its memory."""
        place, rank = self._places[id(tensor)], dist.get_rank()
        split, flat = place.split, place.handle.flat_param
        shard = getattr(
            flat, "_local_shard", flat
        ).detach()  # before the first forward, the flat parameter is the shard
        first, stop = split.span(rank)
        if first == stop:
            return split, shard[:0]
        at = split.start + first - split.share * split.mesh.at[rank][0]
        return split, shard[at : at + stop - first]

    def ranks(self) -> tuple[int, ...]:
        """Global ranks that hold parts, in order."""
        return tuple(sorted({rank for place in self._places.values() for rank in place.split.mesh.at}))

    def _add(self, part: FullyShardedDataParallel, handle: Any) -> None:
        flat = handle.flat_param
        if not handle._use_orig_params:
            raise Unsupported(
                "FSDP1 without use_orig_params keeps one flat parameter, and not the model's own\n"
                "Wrap with use_orig_params=True, or with fully_shard (FSDP2)."
            )
        if handle._sharding_strategy.name not in _SHARDED:
            raise Unsupported(
                f"FSDP1 with {handle._sharding_strategy.name}: only {' and '.join(_SHARDED)} are supported\n"
                "Wrap with fully_shard (FSDP2) on a mesh with a replicating axis, which is."
            )
        ranks = dist.get_process_group_ranks(handle.process_group)
        mesh = Mesh.of((len(ranks),), ranks)
        for param, shape, start in zip(flat._params, flat._shapes, _starts(flat), strict=True):
            split = FlatSplit(tuple(shape), start, int(flat._sharded_size.numel()), mesh)
            self._places[id(param)] = _Place(split, handle)
            self._kept.append(param)


def _starts(flat: Any) -> Iterator[int]:
    """First element of every original parameter in the flat one; paddings lie between them."""
    at = 0
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            yield at
        at += numel
