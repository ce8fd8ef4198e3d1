"""Megatron's two files of a rank, described: who writes which, and which bytes this rank puts into them.

No optimizer state is gathered: every data-parallel rank puts its own shards where Megatron's gathered tensor has them.

Sources: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``save_checkpoint``, ``generate_state_dict``);
megatron-core 0.16.1, ``optimizer/distrib_optimizer.py`` (``get_parameter_state_dp_zero``), ``optimizer/optimizer.py``
(``ChainedOptimizer.save_parameter_state``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from mcore_rlhf.core.catalog import MASTER
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED
from mcore_rlhf.families.megatron.folders import MODEL_FILES, OPTIMIZER_FILE, iteration_folder_name
from mcore_rlhf.families.megatron.state import timeless
from mcore_rlhf.storage.pt import Pt
from mcore_rlhf.storage.stored import StoredTensor

from ..base import LiveFile, Segment, StateTensor
from ..optimizers import STEP
from ..save import Alive, LiveTree, MemoryRanges, given_otherwise, of_module, of_optimizer, torch_optimizers
from .by_size import BySize
from .model import LiveModel
from .optimizers import PARAM_KEY, ChainMember, Owned, rank_by_rank
from .parallel_state import ParallelRank

CHECKPOINT_VERSION = 3.0
Tree = dict[object, object]


@dataclass(frozen=True, slots=True)
class LiveFiles:
    """Describes the files of one save.

    Args:
        place: This rank.
        model: Its model.
        chain: Its optimizers.
        step: The iteration.
        by_size: What the chain writes, where it deals by layout.
    """

    place: ParallelRank
    model: LiveModel
    chain: Sequence[ChainMember | None]
    step: int
    by_size: BySize | None = None
    trees: list[LiveTree] = field(default_factory=list)
    """Of the files that were described."""
    converted: list[torch.Tensor] = field(default_factory=list)
    """Live tensors that went into a file in another form: as fp32, or as one number of their param group."""

    def model_file(
        self, before: Mapping[str, object], after: Mapping[str, object], fresh: Sequence[object] | None = None
    ) -> LiveFile:
        """``model_optim_rng.pt`` of this rank's folder, for the rank that writes it.

        Args:
            before: Top-level values that stand before the model: ``args``.
            after: Those that stand after the optimizer: scheduler, random states, counters.
            fresh: Of a model that nothing trains, the random states of a start, which are the same at every step.
        """
        path = self._path(self.place.folder, MODEL_FILES[0])
        live = LiveTree(path)
        tree: dict[str, object] = {**before, "checkpoint_version": CHECKPOINT_VERSION, "iteration": self.step}
        tree.update((self.model.key(chunk), chunk.state()) for chunk in self.model.chunks)
        if any(self.chain):
            tree["optimizer"] = self._optimizer_state() if self.by_size is None else self.by_size.groups_alone()
        placed = live.placed({**tree, **after})
        self.trees.append(live)
        still = None if fresh is None else Pt.of(timeless(placed, fresh))
        return LiveFile(path, (self.place.rank,), tuple(live.segments), Pt.of(placed), timeless=still)

    def optimizer_files(self) -> list[LiveFile]:
        """The ``distrib_optim.pt`` files to which this rank contributes: its dense and its expert shards may go to two."""
        found: dict[int, list[ChainMember]] = {}
        for member in self._flat() if self.by_size is None else ():
            first = dist.get_process_group_ranks(member.optimizer.data_parallel_group)[0]
            found.setdefault(first, []).append(member)
        return [self._optimizer_file(first, present) for first, present in found.items()]

    def layer_wise_files(self) -> list[LiveFile]:
        """Where whole parameters are dealt out, every rank's own states, as Megatron's ``save_state_dict_to_file`` writes them.

        Megatron 0.19.2 cannot where a distributed optimizer is chained to a layer-wise one (the layout of 0.18 and later): see
        :mod:`.by_size`. States that cannot lie with another rank are in this file all the same, and the rest in ``distrib_optim.pt``.
        """
        if self.by_size is not None:
            described = list(self.by_size.files(self.step))
            self.converted.extend(self.by_size.converted)
            self.trees.extend(live for _, live in described if live is not None)
            return [file for file, _ in described]
        if not rank_by_rank(self.chain):
            return []
        path = self._path(self.place.folder, self.place.layer_wise_file)
        live, states = LiveTree(path), self._optimizer_state()
        for inner in (
            inner for one in self.chain if one is not None and one.opaque for inner in torch_optimizers(one.inner)
        ):
            self.converted.extend(given_otherwise(of_optimizer(inner, lambda _: "a parameter", own_form=True), states))
        placed = live.placed(states)
        self.trees.append(live)
        return [LiveFile(path, (self.place.rank,), tuple(live.segments), Pt.of(placed))]

    def _flat(self) -> list[ChainMember]:
        """The members with shards; of several instances of the distributed optimizer, all hold the same."""
        return [
            member
            for member in self.chain
            if member is not None
            and member.kind == DISTRIBUTED
            and not getattr(member.optimizer, "distributed_optimizer_instance_id", 0)
        ]

    def _optimizer_file(self, first: int, present: Sequence[ChainMember]) -> LiveFile:
        """The file of a first data-parallel rank: its dense state, its experts' state, or both."""
        path = self._path(self.place.folder_of(first), OPTIMIZER_FILE)
        others = set[int]().union(
            *(self.place.contributors(first, m.expert, m.optimizer.data_parallel_group.size()) for m in self._flat())
        )
        writers = (first, *sorted(others - {first}))
        segments = [segment for member in present for segment in self._segments(member)]
        if self.place.rank != first:
            return LiveFile(path, writers, segments)
        live = LiveTree(path)
        labels: dict[str, str] = {}
        trees = [None if m is None or m not in present else _buffers(m, live, labels) for m in self.chain]
        return LiveFile(path, writers, segments, Pt.of(trees if len(trees) > 1 else trees[0]), labels)

    def _segments(self, member: ChainMember) -> Iterator[Segment]:
        """This rank's shards, at their places in the gathered records.

        Moments that the optimizer has not made yet, because it never stepped, are left to read as zeros: what it would begin
        with. (Megatron itself cannot save before the first step.)
        """
        states = {MASTER, *member.states()}
        for index, owned, start in shard_places(member):
            for state, tensor in member.tensors(owned).items():
                if state in states:
                    yield Segment(_label(member, index, state), start * 4, tensor.to(torch.float32).contiguous())
                    self.converted.extend(member.kept_as(owned, state))
            self.converted.extend(member.kept_as(owned, STEP))

    def _optimizer_state(self) -> object:
        states = [{} if member is None else member.state_dict() for member in self.chain]
        return states if len(states) > 1 else states[0]

    def _path(self, folder: str, name: str) -> str:
        return f"{iteration_folder_name(self.step)}/{folder}/{name}"


def _buffers(member: ChainMember, live: LiveTree, labels: dict[str, str]) -> Tree:
    """What the file holds of a member: a flat fp32 record for every buffer and state."""
    tree: Tree = {"buckets_coalesced": True}
    for index, buffer in enumerate(member.optimizer.buffers):
        numel, states = int(buffer.numel_unpadded), dict[object, object]()
        for state in (MASTER, *member.states()):
            record = live.record(torch.float32, numel)
            labels[_label(member, index, state)] = record.key
            states[PARAM_KEY if state == MASTER else state] = StoredTensor(record, 0, (numel,), (1,))
        states["numel_unpadded"] = numel
        tree[index] = {(buffer.param_dtype, buffer.grad_dtype): states}
    return tree


def shard_places(member: ChainMember) -> Iterator[tuple[int, Owned, int]]:
    """(buffer, part, first element in the buffer's record) of every shard that this rank owns.

    The record has the buckets without the padding at their ends, one after the other.
    """
    optimizer: Any = member.optimizer
    by_param = {owned.param: owned for owned in member.owned()}
    for index, ranges in enumerate(optimizer.gbuf_ranges):
        starts = [0, *accumulate(bucket.numel_unpadded for bucket in optimizer.buffers[index].buckets)]
        for buckets in ranges.values():
            for bucket_start, bucket in zip(starts, buckets, strict=False):
                for param, place in bucket["param_map"].items():
                    yield index, by_param[param], bucket_start + place["gbuf_world_in_bucket"].start


def _label(member: ChainMember, buffer: int, state: str) -> str:
    return f"{member.number}/{buffer}/{state}"


@dataclass(frozen=True, slots=True)
class Counting:
    """Counts what is alive on this rank.

    Args:
        place: This rank.
        model: Its model.
        chain: Its optimizers.
        optimizer: What the chain was made of, or None.
        whole: What it writes into the model file.
        memory: What it writes at all: in fp32 its shards of masters are the parameters' own memory.
    """

    place: ParallelRank
    model: LiveModel
    chain: Sequence[ChainMember | None]
    optimizer: object
    whole: MemoryRanges
    memory: MemoryRanges

    def state_tensors(self) -> Iterator[StateTensor]:
        """All of it. Ranks with one folder have the same model, and of a plain optimizer the same states."""
        for chunk in self.model.chunks:
            yield from self.whole.counted(of_module(chunk.module, f"{self.model.key(chunk)}."), self.place.folder)
        known = {id(inner): one for one in filter(None, self.chain) for inner in torch_optimizers(one.optimizer)}
        for inner in torch_optimizers(
            self.optimizer
        ):  # asked for itself: a chain may have more than is understood of it
            member = known.get(id(inner))
            among = None if member is None else self._among(member)
            yield from (self.memory if member is not None else MemoryRanges()).counted(self._kept(inner, member), among)

    def _kept(self, inner: object, member: ChainMember | None) -> Iterator[Alive]:
        """What an optimizer keeps; masters are what it trains and the model does not have."""
        params = {id(p): f"{self.model.key(c)}.{name}" for c in self.model.chunks for name, p in c.parameters().items()}
        names, masters = dict(params), []
        if member is not None:
            for owned in member.owned():
                main = member.main_param(owned)
                names[id(main)] = params[id(owned.param)]
                masters += [main] if id(main) not in params and not member.converts else []
        own_form = member is not None and member.opaque
        return of_optimizer(inner, lambda main: names.get(id(main), "no parameter"), masters, own_form=own_form)

    def _among(self, member: ChainMember) -> str | None:
        """Which ranks have the same of a member; None where every one has a part of its own."""
        if member.kind != DISTRIBUTED:
            return None if member.layer_wise or member.opaque else self.place.folder
        if member.optimizer.ddp_config.num_distributed_optimizer_instances < 2:
            return None
        at, shard = self.place.at, dist.get_rank(member.optimizer.data_parallel_group)
        where = f"tp {at.tp_rank} pp {at.pp_rank}" + (f" ep {at.ep_rank} etp {at.etp_rank}" if member.expert else "")
        return f"shard {shard} of member {member.number} at {where}"
