"""The live account of a Megatron rank: its chunks, and what every optimizer of the chain keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from mcore_rlhf.core.names import EXP_AVG, EXP_AVG_SQ
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED

from ..account import HeldTensor
from ..inventory import Alive, Memory, of_module, of_optimizer
from .chunks import LiveModel
from .optimizers import Member
from .place import Place

_STEP = "step"
_CONVERTED = frozenset({EXP_AVG, EXP_AVG_SQ, "master_param"})
"""States of the precision-aware optimizer, which go into the file in another form."""


@dataclass(frozen=True, slots=True)
class Counting:
    """Counts what is alive on this rank.

    Args:
        place: This rank.
        model: Its model.
        chain: Its optimizers.
        whole: What it writes into the model file.
        memory: What it writes at all: in fp32 its shards of masters are the parameters' own memory.
    """

    place: Place
    model: LiveModel
    chain: Sequence[Member | None]
    whole: Memory
    memory: Memory

    def held(self) -> Iterator[HeldTensor]:
        """All of it. Ranks with one folder have the same model, and of a plain optimizer the same states."""
        for chunk in self.model.chunks:
            yield from self.whole.held(of_module(chunk.module, f"{self.model.key(chunk)}."), self.place.folder)
        for member in filter(None, self.chain):
            yield from self.memory.held(self._kept(member), self._among(member))

    def _kept(self, member: Member) -> Iterator[Alive]:
        """What a member keeps, apart from what goes into the file in another form: its count of steps, reduced precision."""
        params = {id(p): f"{self.model.key(c)}.{name}" for c in self.model.chunks for name, p in c.parameters().items()}
        names, masters = dict(params), []
        for owned in member.owned():
            held = member.held(owned)
            names[id(held)] = params[id(owned.param)]
            if id(held) not in params and not member.converts:
                masters.append(held)
        other_form = _CONVERTED if member.converts else frozenset[str]()
        for one in of_optimizer(member.optimizer.optimizer, lambda held: names.get(id(held), "no parameter"), masters):
            counted = member.kind == DISTRIBUTED and one.state == _STEP and not one.tensor.dim()
            if not counted and one.state not in other_form:
                yield one

    def _among(self, member: Member) -> str | None:
        """Which ranks have the same of a member; None where every one has a part of its own."""
        if member.kind != DISTRIBUTED:
            return None if member.dealt else self.place.folder
        if member.optimizer.ddp_config.num_distributed_optimizer_instances < 2:
            return None
        at, shard = self.place.at, dist.get_rank(member.optimizer.data_parallel_group)
        where = f"tp {at.tp_rank} pp {at.pp_rank}" + (f" ep {at.ep_rank} etp {at.etp_rank}" if member.expert else "")
        return f"shard {shard} of member {member.number} at {where}"
