"""Values of a state dict that are no parameters: ``_extra_state`` of Transformer Engine, and whatever else is there.

They are opaque bytes that belong to a tensor-parallel rank: kept where the tensor-parallel degree stays, otherwise set to
None, which Transformer Engine and megatron-core load as "nothing to restore".

Source: megatron-core 0.16.1, ``extensions/transformer_engine.py`` (``_get_extra_state``, ``_set_extra_state``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mcore_rlhf.formats.report import Fate, Report
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.models.megatron import is_routed_expert

from .rank_layout import LocalItem, RankLayout
from .shards import RankShard


class OpaqueValues:
    """Finds the opaque values of the source's ranks for the ranks of a new layout.

    Args:
        shards: All ranks of the source.
        old: Its degrees.
        new: The new degrees.
    """

    def __init__(self, shards: Sequence[RankShard], old: ParallelConfig, new: ParallelConfig) -> None:
        self._kept = {True: old.etp == new.etp, False: old.tp == new.tp}
        self._values: dict[tuple[str, int], tuple[RankShard, object]] = {}
        for shard in shards:
            for part in shard.parts:
                for name, value in part.opaque.items():
                    rank = shard.at.etp_rank if is_routed_expert(name) else shard.at.tp_rank
                    self._values.setdefault((name, rank), (shard, value))

    def value_for(self, rank: RankLayout) -> Callable[[LocalItem], object]:
        """A function that gives the value of an opaque key on a rank of the new layout."""

        def value(item: LocalItem) -> object:
            name = item.item.name
            routed = is_routed_expert(name)
            found = self._values.get((name, rank.at.etp_rank if routed else rank.at.tp_rank))
            if found is None or not self._kept[routed]:
                return None
            shard, stored = found
            return shard.pt.materialize(stored)

        return value

    def note(self, report: Report) -> None:
        """Say which values are set to None."""
        lost = {
            name
            for (name, _), (_, value) in self._values.items()
            if value is not None and not self._kept[is_routed_expert(name)]
        }
        if lost:
            some = ", ".join(sorted(lost)[:2]) + (", …" if len(lost) > 2 else "")
            report.add(
                Fate.CHANGED,
                f"{len(lost)} opaque values ({some}) belong to tensor-parallel ranks of the source and are set to None",
            )
