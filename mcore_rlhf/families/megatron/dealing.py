"""Which parameters are in which group of which chained optimizer, in the optimizer's own order; and, where whole parameters are dealt to
data-parallel ranks, which of them each rank has, and the files that they lie in.

Sources: megatron-core 0.16.1 and 0.19.2, ``optimizer/layer_wise_optimizer.py`` (``shard_params``, ``_shard_params_ping_pong``,
``save_state_dict_to_file``); Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``save_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from operator import itemgetter

from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.tensor import Shard
from mcore_rlhf.models.megatron import is_routed_expert

from .folders import FileRank, folder_name
from .groups import ChainedOptimizer, LocalParam, Membership

Dealt = list[list[list[LocalParam]]]
"""Parameters by chained optimizer, and by group of it."""
_SORTED = "default_config"
"""What megatron-core gives a group since 0.16, when it began to sort them."""


@dataclass(frozen=True, slots=True)
class Dealing:
    """Who trains what.

    Args:
        chained: The chained optimizers.
        groups: The param groups of each.
        membership: Decides which group a parameter is in.
        apart: Whether experts are trained apart from all else.
    """

    chained: tuple[ChainedOptimizer, ...]
    groups: Sequence[Sequence[ParamGroup]]
    membership: Membership
    apart: bool

    def whole(self, params: Sequence[LocalParam]) -> Dealt:
        """All parameters of a model-parallel rank, each group's in registration order.

        Args:
            params: In registration order.

        Raises:
            LayoutMismatch: A parameter fits no group, or several.
        """
        dealt: Dealt = [[[] for _ in groups] for groups in self.groups]
        for member, inside, groups in zip(self.chained, dealt, self.groups, strict=True):
            for param in params:
                if member.owns(param, self.apart):
                    inside[self._group(param, groups)].append(param)
        return dealt

    def _group(self, param: LocalParam, groups: Sequence[ParamGroup]) -> int:
        """The position of a parameter's group; an optimizer of both has groups of experts and others."""
        positions = list(range(len(groups)))
        if len({group.expert for group in groups}) > 1:
            expert = self.apart and is_routed_expert(param.name)
            positions = [number for number in positions if groups[number].expert == expert]
        chosen = [groups[number] for number in positions]
        return positions[self.membership.index(param.name, len(param.shape), chosen)]

    def as_met(self, params: Sequence[LocalParam], *, always: bool = False) -> Dealing:
        """The same, with the groups of each optimizer in the order in which a rank meets them; those that it does not meet come last.

        Releases before 0.16 make them so, and those before 0.14 load a distributed optimizer's by position: where a stage begins
        with a norm, its first group is the one that does not decay. Later ones sort them alike on all ranks, by a field that older ones
        do not give them, and it stays so. Sources: megatron-core 0.13.1, 0.15.3 and 0.16.1, ``optimizer/__init__.py``
        (``_get_param_groups``), ``optimizer/distrib_optimizer.py`` (``load_state_dict``).

        Args:
            params: All parameters of a model-parallel rank, in registration order.
            always: Even where later releases sort them, which find a distributed optimizer's by their fields: whichever release goes on
                with a run that was never Megatron's, takes them so.
        """
        if not always and any(_SORTED in group.fields for groups in self.groups for group in groups):
            return self
        order = {(param.vpp_rank, param.name): number for number, param in enumerate(params)}
        met = [
            [min((order[one.vpp_rank, one.name] for one in own), default=len(order)) for own in inside]
            for inside in self.whole(params)
        ]
        groups = [
            [group for _, group in sorted(zip(*both, strict=True), key=itemgetter(0))]
            for both in zip(met, self.groups, strict=True)
        ]
        return replace(self, groups=groups)

    def of_rank(self, params: Sequence[LocalParam], dense: Shard, expert: Shard) -> Dealt:
        """What one data-parallel rank has where whole parameters are dealt: by size, forwards and backwards in turn.

        Args:
            params: All parameters of its model-parallel rank, in registration order.
            dense: Its place among the data-parallel ranks.
            expert: Its place among the experts' own data-parallel ranks.
        """
        whole = self.whole(params)
        if dense.degree == 1:
            return whole
        kinds = [[group.expert for group in groups] for groups in self.groups]
        own: Dealt = [[[] for _ in groups] for groups in self.groups]
        for member, group, param, rank in dealt_out(whole, kinds, dense.degree, expert.degree):
            if rank == (expert if kinds[member][group] else dense).rank:
                own[member][group].append(param)
        return own


def dealt_out(
    whole: Dealt, experts: Sequence[Sequence[bool]], dense_ranks: int, expert_ranks: int
) -> Iterator[tuple[int, int, LocalParam, int]]:
    """Who has which of the parameters that are dealt by size, forwards and backwards in turn.

    Args:
        whole: All of them, each group's in registration order.
        experts: Of every group whether experts are in it, which are dealt among data-parallel ranks of their own.
        dense_ranks: How many data-parallel ranks there are; one alone has all in registration order.
        expert_ranks: How many of the experts.

    Yields:
        Chained optimizer, group, parameter and the rank among those it is dealt to, in the order of every rank's groups.
    """
    listed = [(m, g, p) for m, groups in enumerate(whole) for g, inside in enumerate(groups) for p in inside]
    if dense_ranks == 1:
        yield from ((*one, 0) for one in listed)
        return
    turns = {False: _there_and_back(dense_ranks), True: _there_and_back(expert_ranks)}
    for member, group, param in sorted(listed, key=lambda one: one[2].numel):
        yield member, group, param, next(turns[experts[member][group]])


def _there_and_back(ranks: int) -> cycle[int]:
    return cycle([*range(ranks), *reversed(range(ranks))])


@dataclass(frozen=True, slots=True)
class DealtFile:
    """The file of one data-parallel rank of a layer-wise optimizer.

    Args:
        name: In the folder of its model-parallel rank.
        dense: Its place among the data-parallel ranks.
        expert: Its place among the experts' own data-parallel ranks.
    """

    name: str
    dense: Shard
    expert: Shard


def dealt_files(parallel: ParallelConfig, at: FileRank) -> list[DealtFile]:
    """The files in the folder of a rank; that rank's own is the first.

    Megatron names a file by the data-parallel rank alone, so that the ranks of a context-parallel group overwrite each other's;
    with ``_cp`` in their names they are this package's own.
    """
    found = []
    for place in range(parallel.stage_size):
        rank = parallel.coordinates(at.pp_rank * parallel.stage_size + place)
        if folder_name(rank.tp_rank, at.pp_rank, rank.ep_rank, parallel) == at.folder:
            dense = Shard(place // parallel.tp, parallel.dp * parallel.cp)
            name = f"layer_wise_optimizer_{rank.dp_rank}{f'_cp{rank.cp_rank}' if parallel.cp > 1 else ''}.pt"
            found.append(DealtFile(name, dense, Shard(rank.expert_dp_rank, parallel.expert_dp)))
    return found
