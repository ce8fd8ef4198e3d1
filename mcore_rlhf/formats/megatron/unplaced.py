"""What a legacy checkpoint's optimizers and ranks have beside what is read of them.

Source: megatron-core 0.16.1, ``optimizer/optimizer.py``, ``optimizer/distrib_optimizer.py`` (``state_dict``,
``get_parameter_state_dp_zero``).
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_rlhf.families.megatron.groups import look_at_optimizer
from mcore_rlhf.families.megatron.state import SCHEDULER_KEYS
from mcore_rlhf.families.unplaced import Unplaced
from mcore_rlhf.storage.ptfile import PtFile

from .flat_state import is_flat
from .shards import RankShard

_OF_BUFFERS = ("buckets_coalesced", "per_bucket_numel", "per_bucket_numel_unpadded", "numel_unpadded")
"""Sizes and marks, which follow from the parameters."""


def unplaced_of(shards: Sequence[RankShard], *, with_optimizer: bool) -> tuple[str, ...]:
    """What is found in the files of all ranks.

    Args:
        shards: The ranks.
        with_optimizer: Whether the optimizer is read at all.
    """
    found, first = Unplaced(), _scheduler(shards[0])
    for shard in shards:
        found.compare(shard.pt.file, _scheduler(shard), first)
        if with_optimizer:
            look_at_optimizer(found, shard.pt.file, shard.top.get("optimizer"))
        if with_optimizer and shard.distrib is not None:
            _look_flat(found, shard.distrib)
    return found.names


def _scheduler(shard: RankShard) -> dict[str, object]:
    return {key: shard.materialize(shard.top[key]) for key in SCHEDULER_KEYS if key in shard.top}


def _look_flat(found: Unplaced, distrib: PtFile) -> None:
    """Members with buffers by number, each of them by pair of dtypes; a state is one flat tensor, or one per bucket."""
    for member in distrib.tree if isinstance(distrib.tree, list) else [distrib.tree]:
        buffers = {number: of for number, of in (member or {}).items() if isinstance(number, int)}
        found.look(distrib.file, member, dict.fromkeys((*_OF_BUFFERS, *map(str, buffers))))
        for number, by_dtype in buffers.items():
            for states in by_dtype.values():
                flat = [str(state) for state, value in states.items() if is_flat(value)]
                found.look(distrib.file, states, dict.fromkeys((*_OF_BUFFERS, *flat)), f"buffer {number}")
