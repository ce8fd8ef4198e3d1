"""Which parameters lie in flat buckets, where some are frozen: nothing says so, but the values do.

Megatron lays out the parameters that it trains one behind the other, and their masters are they themselves before rounding. So a walk
through a buffer tells at each place whether a parameter lies there; what fits in one way alone is what was trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from mcore_rlhf.core.cast import differing_after_rounding
from mcore_rlhf.core.catalog import MASTER, PARAM, TensorEntry, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.computed import words_of
from mcore_rlhf.core.execute import SourceBytes
from mcore_rlhf.errors import LayoutMismatch
from mcore_rlhf.families.megatron.groups import ChainedOptimizer, LocalParam
from mcore_rlhf.families.megatron.layout import Blueprint, rules_of
from mcore_rlhf.families.megatron.ranks import RankLayout
from mcore_rlhf.families.megatron.remainders import sampled
from mcore_rlhf.layouts.flat import PARAM_ALIGNMENT, BufferFill, BufferParam

from .buckets import BufferPlace, FlatStates, Where, group_of, holds_first
from .objects import model_ranks

_COUNTED = "per_bucket_numel_unpadded"
"""Source: megatron-core 0.19.2, ``optimizer/distrib_optimizer.py`` (``sharded_param_state_dp_reshardable``): one for each buffer."""
_Chosen: TypeAlias = "tuple[LocalParam, _Chosen] | None"
"""A parameter, and those that lie before it."""


def trained_in(flat: FlatStates, blueprint: Blueprint, params: Chunks, files: SourceBytes) -> frozenset[str]:
    """Names of the parameters that lie in the buffers; none where that cannot be told.

    Args:
        flat: The buffers.
        blueprint: The model, all of it trained.
        params: The parameters.
        files: Their bytes.

    Raises:
        LayoutMismatch: They may be some or others.
    """
    parallel, found, walked = blueprint.choices.parallel, set[str](), set[tuple[int, int]]()
    for at in model_ranks(parallel):
        rank = RankLayout(blueprint, at, "")
        for number, member in enumerate(rank.chained):
            where = number, group_of(at, member, parallel)
            if not holds_first(at, member, parallel):
                continue
            walked.add(where)
            if at.tp_rank or at.etp_rank:  # what others train, these do
                continue
            names = _Walk(flat, rank, member, where, params, files).names()
            if names is None:
                return frozenset()
            found.update(names)
    is_all = walked >= {(key.member, key.group) for key in flat.folder.flat}  # otherwise they are of another layout
    return frozenset(found) if is_all else frozenset()


class _Walk:
    """A walk through the buffers of one chained optimizer on one rank."""

    def __init__(
        self, flat: FlatStates, rank: RankLayout, member: ChainedOptimizer, where: tuple[int, int], params: Chunks,
        files: SourceBytes,
    ) -> None:  # fmt: skip
        self.flat, self.rank, self.member, self.where = flat, rank, member, where
        self.params, self.files = params, files
        self.items = {(item.vpp_rank, item.item.name): item for item in rank.items}
        self.numel = sum(param.numel for param in rank.trained())

    def names(self) -> set[str] | None:
        """What lies there, under the catalogue's names; None where nothing fits.

        Raises:
            LayoutMismatch: Several ways fit.
        """
        found, index = set[str](), 0
        for candidates in self._kinds():
            ways = self._fitting(candidates, (*self.where, index))
            if len(ways) > 1:
                odd = sorted(ways[0] ^ ways[1])
                raise LayoutMismatch(
                    f"{self.flat.folder.located.folder}: some parameters were frozen, and which of {', '.join(odd)} cannot be told: their "
                    "values are the same\nMark those that were with 'trainable: false' in --rules."
                )
            for way in ways:
                found |= way
                index += 1
        return found if index == self._stored() else None

    def _stored(self) -> int:
        """How many buffers there are, as the checkpoint itself counts them: one that is gone is no frozen stage."""
        folder = self.flat.folder
        counted = folder.groups.get(self.where, {}).get(_COUNTED)
        stated = folder.value(counted) if counted is not None else []
        return len(stated) if isinstance(stated, list) else 0

    def _kinds(self) -> list[list[LocalParam]]:
        """The parameters that would share a buffer, buffer by buffer."""
        kinds: dict[tuple[int, str], list[LocalParam]] = {}
        apart = self.rank.blueprint.args.experts_apart(self.rank.blueprint.choices.parallel)
        for param in self.rank.trained():
            if self.member.owns(param, apart):
                kinds.setdefault((param.vpp_rank, param.dtype.name), []).append(param)
        return [kinds[kind] for kind in sorted(kinds, key=lambda kind: kind[0])]

    def _fitting(self, candidates: Sequence[LocalParam], where: Where) -> list[set[str]]:
        """The ways in which some of the parameters fill a buffer, two at most."""
        stored = self.flat.buffers.get((where, MASTER))
        if stored is None:
            return []
        blueprint, at = self.rank.blueprint, self.rank.at
        bucketed = at.pp_rank == 0 and candidates[0].vpp_rank == 0
        parallel, expert = blueprint.choices.parallel, bool(self.member.expert)
        rules = rules_of(blueprint.args, parallel, expert, self.numel, bucketed=bucketed)
        ways: dict[BufferFill, list[_Chosen]] = {BufferFill(): [None]}
        left = sum(param.numel + PARAM_ALIGNMENT for param in candidates)
        for param in reversed(candidates):
            ways = {filling: found for filling, found in ways.items() if filling.numel_unpadded + left >= stored.numel}
            left -= param.numel + PARAM_ALIGNMENT
            one = BufferParam(param.name, param.numel, param.shared_embedding)
            for filling, chosen in [(filling, tuple(found)) for filling, found in ways.items()]:
                lying, after = filling.placing(one, rules)
                place = BufferPlace(self.items[param.vpp_rank, param.name], where, lying.file_start, lying.numel)
                if stored.begins(place.start) and stored.ends(place.stop) and self._lies_at(place):
                    known = ways.setdefault(after, [])
                    known += [(param, way) for way in chosen][: 2 - len(known)]
        full = [way for filling, found in ways.items() if filling.numel_unpadded == stored.numel for way in found]
        return [set(self._named(way)) for way in full[:2]]

    def _named(self, way: _Chosen) -> Iterator[str]:
        while way is not None:
            param, way = way
            yield self.items[param.vpp_rank, param.name].item.stored_as

    def _lies_at(self, place: BufferPlace) -> bool:
        """Whether a parameter's masters, rounded, are what it begins with."""
        name = TensorName(self.rank.blueprint.role, place.item.item.stored_as, PARAM)
        param, chunks = self.params.get(name), tuple(self.flat.chunks_at(place, MASTER))
        if param is None or not chunks:
            return False
        master = TensorEntry(name._replace(state=MASTER), param.global_shape, chunks[0].record.dtype, chunks)
        box = sampled(chunks[0].box)
        masters, values = (words_of(one, box, one.dtype, self.files) for one in (master, param))
        return not differing_after_rounding(masters, values, master.dtype, param.dtype)
