"""The files of a layer-wise optimizer that deals by layout: those of one that deals by size, which Megatron and every reader know.

Since 0.18 Megatron deals Muon's matrices so that they fit its buffers, and cuts everything else over the data-parallel ranks; its
own save of that in the torch format fails. What every rank has is put where the rank has it that would if parameters were dealt by
size, so that ``--no-use-layer-wise-param-layout`` loads it, and so that it can be reshaped. Each rank tells the others, once per
save, which parts it has; no value of a tensor is sent.

Sources: megatron-core 0.19.2, ``optimizer/layer_wise_optimizer.py`` (``_shard_params_from_layout``, ``_shard_params_ping_pong``,
``save_state_dict_to_file``), ``optimizer/optimizer.py`` (``Float16OptimizerWithFloat16Params.state_dict``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_rlhf.core.catalog import MASTER, dtype_of, row_major
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED
from mcore_rlhf.families.megatron.dealing import Dealt, dealt_out
from mcore_rlhf.families.megatron.folders import iteration_folder_name
from mcore_rlhf.families.megatron.groups import LocalParam
from mcore_rlhf.formats.megatron.plain import FACTORS
from mcore_rlhf.storage.pt import Pt
from mcore_rlhf.storage.stored import StoredTensor

from ..base import LiveFile, Segment
from ..optimizers import STEP, is_elementwise
from ..save import LiveTree
from .counting import counts_per_parameter
from .model import LiveModel
from .optimizers import ChainMember, Owned, is_laid_out
from .parallel_state import ParallelRank

At = tuple[int, str]
"""Model chunk and local name of a parameter."""
Fields = dict[str, object]
_EXPERT = "is_expert_parallel"


@dataclass(frozen=True, slots=True)
class ToldPart:
    """What a rank tells of a parameter, all or a part of whose states it has.

    Args:
        at: The parameter.
        member: The chained optimizer that trains it.
        group: Its param group there.
        states: Names and types of the states.
        numbers: What is no tensor of the parameter's shape: its count of steps.
    """

    at: At
    member: int
    group: int
    states: Mapping[str, torch.dtype]
    numbers: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ToldParam:
    """What a rank tells those that it shares dense parameters or experts with.

    Args:
        parts: What it has.
        groups: The fields of every group of every chained optimizer.
        whole: Whether each of its states has one value per element, so that it can lie with another rank.
    """

    parts: Sequence[ToldPart]
    groups: Sequence[Sequence[Fields]]
    whole: bool

    def expert(self, part: ToldPart) -> bool:
        """Whether a part is of an expert that other ranks share than dense parameters."""
        return bool(self.groups[part.member][part.group].get(_EXPERT))


@dataclass
class BySize:
    """One rank's files.

    Args:
        place: This rank.
        model: Its model.
        chain: Its optimizers.
        ranks: Those that told what they have: the data-parallel ranks of its model-parallel rank, and where experts are cut
            otherwise than dense parameters, so that other ranks share them, those of its pipeline stage.
        told: What each of them has.
    """

    place: ParallelRank
    model: LiveModel
    chain: Sequence[ChainMember]
    ranks: Sequence[int]
    told: Sequence[ToldParam]
    converted: list[torch.Tensor] = field(default_factory=list)
    """Live tensors that go into a file in another form."""

    @classmethod
    def of(cls, place: ParallelRank, model: LiveModel, chain: Sequence[ChainMember | None]) -> BySize | None:
        """Ask all ranks what they have; None where each has to write its own. Collective where the chain deals by layout.

        Args:
            place: This rank.
            model: Its model.
            chain: Its optimizers.
        """
        present = [member for member in chain if member is not None]
        apart = place.parallel.etp != place.parallel.tp
        kept_otherwise = any(one.opaque or one.keeps_remainders or one.scaler is not None for one in present)
        if not is_laid_out(chain) or len(present) != len(chain) or kept_otherwise or place.trains_experts_twice:
            return None
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        if apart:
            group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        ranks = dist.get_process_group_ranks(group)
        told: list[Any] = [None] * len(ranks)
        dist.all_gather_object(told, _told(model, present), group=group)
        return cls(place, model, present, ranks, told) if all(one.whole for one in told) else None

    def groups_alone(self) -> list[dict[str, object]]:
        """What the model file has of it: its groups. Megatron's repeats the states of one rank, and nobody reads them."""
        return [self._member({}, [(fields, []) for fields in self._fields(one)], []) for one in self.chain]

    def files(self, step: int) -> Iterator[tuple[LiveFile, LiveTree | None]]:
        """Every file to which this rank gives something, and the tree of its own.

        Args:
            step: The iteration.
        """
        for rank in self._sharing(self.place.rank):
            path = f"{iteration_folder_name(step)}/{self.place.folder_of(rank)}/{self.place.layer_wise_file_of(rank)}"
            givers = (giver for giver in self._sharing(rank) if rank in self._receivers[giver])
            writers = (rank, *(giver for giver in givers if giver != rank))
            segments = list(self._segments(rank))
            if rank == self.place.rank:
                live, labels = LiveTree(path), dict[str, str]()
                tree = live.placed(self._tree(live, labels))
                yield LiveFile(path, writers, [*live.segments, *segments], Pt.of(tree), labels), live
            elif segments:
                yield LiveFile(path, writers, segments), None

    @cached_property
    def _params(self) -> dict[At, torch.nn.Parameter]:
        return {(chunk.vpp_rank, name): p for chunk in self.model.chunks for name, p in chunk.parameters().items()}

    @cached_property
    def _known(self) -> dict[At, ToldPart]:
        """What was told of every parameter of this rank; other parameters of other ranks have the same names."""
        found: dict[At, ToldPart] = {}
        for rank, told in zip(self.ranks, self.told, strict=True):
            found.update(
                (one.at, one) for one in told.parts if rank in self._sharing(self.place.rank, told.expert(one))
            )
        return found

    @cached_property
    def _dealt(self) -> list[tuple[int, int, LocalParam, int]]:
        """Chained optimizer, group, parameter and which of those that share it has it in its file."""
        fields = [self._fields(member) for member in self.chain]
        whole: Dealt = [[[] for _ in groups] for groups in fields]
        for at, param in self._params.items():
            if (part := self._known.get(at)) is not None:
                local = LocalParam(at[1], at[0], tuple(param.shape), dtype_of(param.dtype), shared_embedding=False)
                whole[part.member][part.group].append(local)
        experts = [[bool(group.get(_EXPERT)) for group in groups] for groups in fields]
        dense, expert = (len(self._sharing(self.place.rank, kind)) for kind in (False, True))
        return list(dealt_out(whole, experts, dense, expert))

    @cached_property
    def _turns(self) -> dict[At, int]:
        return {(param.vpp_rank, param.name): turn for _, _, param, turn in self._dealt}

    @cached_property
    def _receivers(self) -> dict[int, set[int]]:
        """For every rank, in whose files something of it lies."""
        return {
            rank: {self._sharing(rank, told.expert(part))[self._turns[part.at]] for part in told.parts}
            for rank, told in zip(self.ranks, self.told, strict=True)
        }

    def _sharing(self, rank: int, expert: bool | None = None) -> list[int]:
        """The ranks that share a rank's experts, its dense parameters, or, for None, either; itself among them."""
        if expert is None:
            return sorted({*self._sharing(rank, False), *self._sharing(rank, True)})
        at = self.place.parallel.coordinates(rank)
        return self._groups[(expert, at.ep_rank, at.etp_rank) if expert else (expert, at.tp_rank)]

    @cached_property
    def _groups(self) -> dict[tuple[int, ...], list[int]]:
        """The ranks that share experts, by their coordinates, and those that share dense parameters."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in self.ranks:
            at = self.place.parallel.coordinates(rank)
            found.setdefault((False, at.tp_rank), []).append(rank)
            found.setdefault((True, at.ep_rank, at.etp_rank), []).append(rank)
        return found

    def _segments(self, rank: int) -> Iterator[Segment]:
        """What this rank has of the parameters in a rank's file."""
        names = {param: at for at, param in self._params.items()}
        for member in self.chain:
            for owned in member.owned():
                at, expert = names[owned.param], bool(member.groups[owned.group].get(_EXPERT))
                if self._sharing(self.place.rank, expert)[self._turns[at]] != rank:
                    continue
                for state, (tensor, dtype) in _states(member, owned).items():
                    if tensor is not None:
                        start = owned.start * dtype.itemsize
                        yield Segment(_label(at, state), start, tensor.to(dtype).contiguous())
                        self.converted.append(tensor)
                        self.converted.extend(member.kept_as(owned, state))
                self.converted += [*member.kept_as(owned, STEP), member.main_param(owned)]

    def _tree(self, live: LiveTree, labels: dict[str, str]) -> list[dict[str, object]]:
        """What this rank's file holds, in records that all ranks fill."""
        trees = []
        for member in self.chain:
            states: dict[int, Fields] = {}
            groups: list[tuple[Fields, list[int]]] = []
            masters: list[list[StoredTensor]] = []
            for number, fields in enumerate(self._fields(member)):
                sharing = self._sharing(self.place.rank, bool(fields.get(_EXPERT)))
                own = [
                    one
                    for m, g, one, turn in self._dealt
                    if (m, g) == (member.number, number) and sharing[turn] == self.place.rank
                ]
                groups.append((fields, [*range(len(states), len(states) + len(own))]))
                masters.append([])
                for param in own:
                    part = self._known[param.vpp_rank, param.name]
                    found = {name: _place(live, labels, param, name, dtype) for name, dtype in part.states.items()}
                    masters[-1] += [found.pop(MASTER)] if MASTER in found else []
                    states[len(states)] = {**part.numbers, **found}
            trees.append(self._member(states, groups, masters))
        return trees

    def _member(
        self,
        states: Mapping[int, Fields],
        groups: Sequence[tuple[Fields, list[int]]],
        masters: Sequence[Sequence[StoredTensor]],
    ) -> dict[str, object]:
        """A chained optimizer as Megatron's says it; a group that is empty on a rank has made no step there."""
        stored = [
            {**{key: value for key, value in fields.items() if params or key != STEP}, "params": params}
            for fields, params in groups
        ]
        inner = {"state": states, "param_groups": stored}
        return {"optimizer": inner, "fp32_from_fp16_params": [list(one) for one in masters]}

    def _fields(self, member: ChainMember) -> list[Fields]:
        """The groups of a member, each as a rank tells it that trains something of it."""
        found = [dict(fields) for fields in _group_fields(member)]
        for told in reversed(self.told):
            for part in told.parts:
                if part.member == member.number:
                    found[part.group] = told.groups[part.member][part.group]
        return found


def _told(model: LiveModel, chain: Sequence[ChainMember]) -> ToldParam:
    names = {param: (chunk.vpp_rank, name) for chunk in model.chunks for name, param in chunk.parameters().items()}
    parts, whole = [], True
    for member in chain:
        for owned in member.owned():
            states = {name: dtype for name, (_, dtype) in _states(member, owned).items()}
            kept = member.inner.state.get(member.main_param(owned), {}) if member.stepped else {}
            numbers = {name: _number(value) for name, value in kept.items() if _number(value) is not None}
            whole &= member.kind == DISTRIBUTED or kept.keys() <= {*states, *numbers} - FACTORS
            parts.append(ToldPart(names[owned.param], member.number, owned.group, states, numbers))
    return ToldParam(parts, [_group_fields(member) for member in chain], whole)


def _states(member: ChainMember, owned: Owned) -> dict[str, tuple[torch.Tensor | None, torch.dtype]]:
    """What a rank has of a part and how it is stored; what a distributed optimizer has not made yet is zeros. An fp32 parameter has
    no master.
    """
    tensors = member.tensors(owned)
    if owned.param.dtype == torch.float32:
        tensors.pop(MASTER, None)
    if member.kind == DISTRIBUTED:
        names = [MASTER, *member.states()] if owned.param.dtype != torch.float32 else member.states()
        return {name: (tensors.get(name), torch.float32) for name in names}
    return {
        name: (tensor, tensor.dtype)
        for name, tensor in tensors.items()
        if name == MASTER or is_elementwise(name, tensor.shape, owned.param.shape)
    }


def _number(value: object) -> object | None:
    """A copy of what is one number, or no tensor at all; None for a tensor."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True) if not value.dim() else None
    return value


def _group_fields(member: ChainMember) -> list[Fields]:
    stored = member.state_dict()["optimizer"]["param_groups"] if member.kind == DISTRIBUTED else member.groups
    left_out = {"params", STEP} if counts_per_parameter(member.inner) else {"params"}
    return [{key: value for key, value in group.items() if key not in left_out} for group in stored]


def _place(live: LiveTree, labels: dict[str, str], param: LocalParam, state: str, dtype: torch.dtype) -> StoredTensor:
    record = live.record(dtype, param.numel)
    labels[_label((param.vpp_rank, param.name), state)] = record.key
    return StoredTensor(record, 0, param.shape, row_major(param.shape))


def _label(at: At, state: str) -> str:
    return f"{at[0]}/{at[1]}/{state}"
