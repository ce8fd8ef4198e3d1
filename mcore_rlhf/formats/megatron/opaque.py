"""Values of a state dict that are no parameters: ``_extra_state`` of Transformer Engine, and whatever else is there.

They are opaque bytes that belong to a tensor-parallel rank: kept where the tensor-parallel degree stays, otherwise set to
None, which Transformer Engine and megatron-core load as "nothing to restore".

Source: megatron-core 0.16.1, ``extensions/transformer_engine.py`` (``_get_extra_state``, ``_set_extra_state``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.families.inventory import OPAQUE
from mcore_rlhf.families.megatron.folders import FileRank
from mcore_rlhf.families.megatron.rank_layout import LocalItem, RankLayout
from mcore_rlhf.families.megatron.state import RankValues
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.megatron import expert_of, is_routed_expert


class OpaqueValues:
    """Finds the opaque values of the source's ranks for the ranks of a new layout.

    Args:
        shards: All ranks of the source.
        old: Its degrees.
        new: The new degrees.
    """

    def __init__(self, shards: Sequence[RankValues], old: ParallelConfig, new: ParallelConfig) -> None:
        self._old, self._new = old, new
        self._values: dict[tuple[str, int, int], tuple[RankValues, object]] = {}
        for shard in shards:
            for part in shard.parts:
                for name, value in part.opaque.items():
                    self._values.setdefault(_place(name, shard.at), (shard, value))

    def value_for(self, rank: RankLayout) -> Callable[[LocalItem], object]:
        """A function that gives the value of an opaque key on a rank of the new layout."""

        def value(item: LocalItem) -> object:
            found = self._values.get(_place(item.item.name, rank.at))
            if found is None or not self._kept(item.item.name):
                return None
            shard, stored = found
            return shard.materialize(stored)

        return value

    def note(self, report: Report) -> None:
        """Say which values are set to None."""
        lost = {name for (name, *_), (_, value) in self._values.items() if value is not None and not self._kept(name)}
        if lost:
            some = ", ".join(sorted(lost)[:2]) + (", …" if len(lost) > 2 else "")
            report.add(
                Fate.CHANGED,
                f"{len(lost)} opaque values ({some}) belong to tensor-parallel ranks of the source and are set to None",
                OPAQUE,
            )

    def _kept(self, name: str) -> bool:
        """Whether the ranks to which a value belongs are the same in both layouts."""
        if not is_routed_expert(name):
            return self._old.tp == self._new.tp
        same_experts = expert_of(name) is not None or self._old.ep == self._new.ep
        return self._old.etp == self._new.etp and same_experts


def _place(name: str, at: FileRank) -> tuple[str, int, int]:
    """A key and the ranks on which it has a value of its own: packed experts have one value for all of a rank."""
    if not is_routed_expert(name):
        return name, at.tp_rank, 0
    return name, at.etp_rank, at.ep_rank if expert_of(name) is None else 0
