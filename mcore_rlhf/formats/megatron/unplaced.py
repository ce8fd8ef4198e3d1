"""What a legacy checkpoint's optimizers and ranks have beside what is read of them.

Source: megatron-core 0.16.1, ``optimizer/optimizer.py``, ``optimizer/distrib_optimizer.py`` (``state_dict``,
``get_parameter_state_dp_zero``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mcore_rlhf.formats.unplaced import Unplaced, of_torch
from mcore_rlhf.storage.ptfile import PtFile

from .flat_state import is_flat
from .plain_state import inner_state
from .shards import RankShard
from .state import SCHEDULER_KEYS

_MEMBER = (
    "optimizer", "optimizer_state_dict", "param_groups", "state", "fp32_from_fp16_params", "fp32_from_fp16", "grad_scaler",
    "param_state_sharding_type",
)  # fmt: skip
_COMMON_STEP = "common_step"
"""One for all parameters. Source: megatron-core 0.16.1, ``optimizer/optimizer.py`` (``sharded_state_dict``)."""
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


def look_at_optimizer(found: Unplaced, file: str, stored: object) -> None:
    """Look at the optimizers of ``model_optim_rng.pt`` and ``common.pt``: one dictionary, or several that are chained.

    Args:
        found: Told of everything that is not read.
        file: The file.
        stored: What it has under ``optimizer``.
    """
    numbered = isinstance(stored, Mapping) and bool(stored) and all(isinstance(key, int) for key in stored)
    members = list(stored.values()) if isinstance(stored, Mapping) and numbered else stored
    for member in members if isinstance(members, list) else [members]:
        if isinstance(member, Mapping):
            inner = inner_state(member)
            known = of_torch(inner)
            found.look(file, member, dict.fromkeys(_MEMBER), "optimizer")
            states = {**(known["state"] or {}), _COMMON_STEP: None}
            found.look(
                file,
                inner,
                {**(dict.fromkeys(_MEMBER) if inner is member else known), "state": states},
                "optimizer.optimizer",
            )


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
