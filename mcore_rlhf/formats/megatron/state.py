"""What a checkpoint holds besides tensors: iteration, scheduler, counters, loss scaler.

Source: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``generate_state_dict``, ``load_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_rlhf.core.account import Fate, Item, Kind, Report, same
from mcore_rlhf.families.inventory import state_dict_of
from mcore_rlhf.families.megatron.arguments import stored_arguments
from mcore_rlhf.families.megatron.folders import Located
from mcore_rlhf.families.megatron.state import COUNTER, OLD_RNG_KEYS, PER_RANK_KEYS, RNG_KEYS, SCHEDULER_KEYS
from mcore_rlhf.families.source import ParamGroup, TrainingState
from mcore_rlhf.storage.ptfile import StoredTensor

from .shards import MODEL_KEY, RankShard

_SMALL = 16 << 20
"""Unknown values are carried along up to this size; they are read at once."""

_KNOWN = {"args", "optimizer", *SCHEDULER_KEYS, *RNG_KEYS, *OLD_RNG_KEYS, *PER_RANK_KEYS}


def training_state(
    shards: Sequence[RankShard], located: Located, groups: tuple[ParamGroup, ...], notes: Report
) -> TrainingState:
    """The state that all ranks share, taken from the first.

    Values under keys that are not known are kept where all ranks agree, and otherwise said to be lost.
    """
    first = shards[0].top
    iteration = first.get("iteration", first.get("total_iters", located.iteration or 0))
    key = next((key for key in SCHEDULER_KEYS if first.get(key) is not None), SCHEDULER_KEYS[0])
    scheduler = state_dict_of(first.get(key), key, notes)
    return TrainingState(
        iteration=int(iteration) if isinstance(iteration, int) else located.iteration or 0,
        release=located.release,
        args=stored_arguments(first),
        groups=groups,
        scheduler=shards[0].pt.materialize(scheduler) if scheduler is not None else None,
        grad_scaler=shards[0].pt.materialize(_grad_scaler(first.get("optimizer"))),
        other=_other(shards, notes),
    )


def _grad_scaler(optimizer: object) -> object | None:
    members = optimizer if isinstance(optimizer, list) else [optimizer]
    return next((m["grad_scaler"] for m in members if isinstance(m, dict) and "grad_scaler" in m), None)


def _other(shards: Sequence[RankShard], notes: Report) -> dict[str, object]:
    kept: dict[str, object] = {}
    for key, value in {key: value for shard in reversed(shards) for key, value in shard.top.items()}.items():
        if key in _KNOWN or MODEL_KEY.fullmatch(str(key)):
            continue
        if key == COUNTER:
            kept[key] = max(_number(shard.top.get(key)) for shard in shards)  # each rank counts for itself
        elif _tensor_bytes(value) > _SMALL or not all(_equal_content(shards[0], shard, key) for shard in shards[1:]):
            notes.add(
                Fate.LOST,
                f"{key}: not a key of Megatron's, and not equal on all ranks, or made of large tensors",
                Item(Kind.VALUE, str(key)),
            )
        else:
            kept[key] = shards[0].pt.materialize(value)
    return kept


def _number(value: object) -> float:
    return value if isinstance(value, int | float) else 0


def _equal_content(a: RankShard, b: RankShard, key: str) -> bool:
    return same(a.pt.materialize(a.top.get(key)), b.pt.materialize(b.top.get(key)))


def _tensor_bytes(value: object) -> int:
    if isinstance(value, dict):
        return sum(map(_tensor_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_tensor_bytes, value))
    return value.record.nbytes if isinstance(value, StoredTensor) else 0
