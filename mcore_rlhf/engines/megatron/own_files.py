"""Loading where the rank's local tensors are the stored ones: every rank opens its own files only, and copies runs of bytes.

The data-parallel size, buckets and the kind of optimizer may differ: a parameter's states lie somewhere in the rank's
files, and this rank needs a flat range of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import MASTER, PARAM, Box, Chunk, TensorEntry, TensorName, dtype_of, row_major
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.engines.stateful import torch_values
from mcore_rlhf.errors import CheckpointError, Incomplete, Problem
from mcore_rlhf.families.megatron.arguments import Arguments
from mcore_rlhf.families.megatron.folders import FileRank, FoundIteration, file_ranks, model_file
from mcore_rlhf.families.megatron.remainders import are_remainders
from mcore_rlhf.families.megatron.state import NAMES, is_timeless
from mcore_rlhf.formats.megatron.optimizer import OptimizerReading, read_optimizer
from mcore_rlhf.formats.megatron.reader import training_state
from mcore_rlhf.formats.megatron.shards import RankFiles, RankShard
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.pipeline import ModelChunk, model_chunks
from mcore_rlhf.models.spec import Rules
from mcore_rlhf.storage.stored import StoredTensor
from mcore_rlhf.storage.urls import open_files

from ..load import Load, Slot, planned_locally
from .load import LocalPart, MegatronStored, slots_of, states_apart
from .model import LiveModel
from .optimizers import ChainMember
from .parallel_state import ParallelRank
from .precision import note_precision


@dataclass(frozen=True, slots=True)
class OwnFiles:
    """This rank's files of a checkpoint whose local tensors are the live ones.

    Args:
        located: The checkpoint.
        args: Its arguments.
        parallel: Its degrees.
        chunks: Its model chunks.
        shards: This rank's shard, and behind it the one that has the dense optimizer state, where that is another.
    """

    located: FoundIteration
    args: Arguments
    parallel: ParallelConfig
    chunks: tuple[ModelChunk, ...]
    shards: tuple[RankShard, ...]

    @classmethod
    def find(cls, located: FoundIteration, place: ParallelRank, model: LiveModel, optimizer: bool) -> OwnFiles | None:
        """The files, or None where the local tensors are others.

        Raises:
            CheckpointError: A file of this rank is damaged.
        """
        if model_file(located.folder, place.folder) is None:
            return None
        files = RankFiles(located, optimizer=optimizer)
        args = Arguments(files.first_arguments([place.folder])[1])
        if not args.values or not _same_degrees(args.parallel(), place.parallel):
            return None
        parallel, chunks = args.parallel(), _stored_chunks(args)
        ranks = _ranks(parallel, place)
        if not ranks or not _same_chunks(chunks, place, model):
            return None
        shards = tuple(files.shards(ranks))
        return cls(located, args, parallel, chunks, shards) if _same_tensors(shards[0], model) else None

    def load(
        self, model: LiveModel, chain: Sequence[ChainMember | None], live: ParallelConfig
    ) -> tuple[Load[LocalPart], MegatronStored] | None:
        """Plan the load.

        Returns:
            None where remainders are stored in the place of masters, and this run keeps masters: they are joined in a plan.

        Raises:
            CheckpointError: The optimizer's state is missing or does not fit.
        """
        reading, report, own = OptimizerReading(), Report(), self.shards[0]
        if chain:
            reading = read_optimizer(self.shards, self.chunks, self.args, self.parallel, Rules())
        states = tuple(state for state in reading.states if state != MASTER)
        trained, stored = chain if reading.kind is not None else (), self._stored(reading)
        names = {param: (chunk.vpp_rank, name) for chunk in model.chunks for name, param in chunk.parameters().items()}
        apart = states_apart(trained, states, lambda param, state: (*names[param], state) in stored)
        keeps = any(member.keeps_remainders for member in trained if member is not None)
        has = (keeps or self.args.flag("use_precision_aware_optimizer")) and self._has_remainders(stored)
        if trained and has and not keeps:
            return None
        found = slots_of(model, trained, states, apart, own=has)
        plan = planned_locally(
            found, lambda one: stored.get((one.owner.vpp_rank, one.owner.name, one.state)), self._missing
        )
        state = training_state(self.shards, self.located, reading.groups, report)
        report.add(Fate.KEPT, "parameters: this rank's own, bit for bit")
        note_precision(report, trained, self.args, cut=self.parallel.dp != live.dp, masters=not has)
        opaque = {part.vpp_rank: torch_values(own.pt.materialize(part.opaque)) for part in own.parts}
        besides = MegatronStored(
            torch_values(state), states, reading.kind, torch_values(reading.scalars), opaque, apart
        )
        return Load(self.located.root, found, plan, report, [self.located.root / own.pt.file], self._rng()), besides

    def _has_remainders(self, stored: Mapping[tuple[int, str, str], StoredTensor]) -> bool:
        """Whether a precision-aware optimizer stored remainders of this rank's parameters in the place of their masters."""
        pairs = (
            (_flat(tensor, MASTER), _flat(stored[vpp_rank, name, PARAM], PARAM))
            for (vpp_rank, name, state), tensor in stored.items()
            if state == MASTER and (vpp_rank, name, PARAM) in stored
        )
        with open_files(self.located.root) as files:
            return are_remainders(pairs, files)

    def _missing(self, slot: Slot[LocalPart]) -> Problem:
        text = f"{self.shards[0].pt.file}: no {slot.state} of {slot.owner.name}, which this run trains; was it frozen?"
        return Problem(Incomplete, text, "Load with optimizer=False to begin with fresh optimizer states.")

    def _rng(self) -> Mapping[str, object] | None:
        """What Megatron-LM restores, whatever the data-parallel rank: the first entry, unless every rank began anew, or it is no step's."""
        own = self.shards[0]
        stored = own.top.get("rng_state")
        if (
            not isinstance(stored, list)
            or not stored
            or self.args.flag("data_parallel_random_init")
            or is_timeless(own.pt.tree)
        ):
            return None
        first = torch_values(self.shards[0].pt.materialize(stored[0]))
        complete = isinstance(first, dict) and all(name in first for name in NAMES.values())
        return {ours: first[theirs] for ours, theirs in NAMES.items()} if complete else None

    def _stored(self, reading: OptimizerReading) -> Mapping[tuple[int, str, str], StoredTensor]:
        """By (chunk, name, state), where a local tensor lies; an fp32 parameter is its own master."""
        found: dict[tuple[int, str, str], StoredTensor] = {}
        for part in self.shards[0].parts:
            for name, tensor in part.tensors.items():
                found[part.vpp_rank, name, PARAM] = found[part.vpp_rank, name, MASTER] = tensor
        for shard in reversed(self.shards):
            for (folder, vpp_rank, name), states in reading.places.items():
                if folder == shard.at.folder:
                    found.update(((vpp_rank, name, state), tensor) for state, tensor in states.items())
        return found


def _flat(tensor: StoredTensor, state: str) -> TensorEntry:
    """A stored tensor, flattened."""
    shape = (tensor.stop - tensor.start,)
    chunk = Chunk(Box.whole(shape), tensor.record, tensor.start, (1,))
    return TensorEntry(TensorName("", tensor.record.key, state), shape, tensor.record.dtype, (chunk,))


def _same_degrees(stored: ParallelConfig, live: ParallelConfig) -> bool:
    def degrees(p: ParallelConfig) -> tuple[int, ...]:
        return p.tp, p.pp, p.vpp, p.ep, p.etp

    return degrees(stored) == degrees(live)


def _stored_chunks(args: Arguments) -> tuple[ModelChunk, ...]:
    parallel = args.parallel()
    try:
        return model_chunks(args.integer("num_layers"), parallel.pp, parallel.vpp, args.pipeline_split, args.mtp_layers)
    except CheckpointError:
        return ()


def _ranks(stored: ParallelConfig, place: ParallelRank) -> tuple[FileRank, ...]:
    """The rank that wrote this rank's folder, and the one that wrote the dense optimizer state of its stage."""
    ranks, at = file_ranks(stored), place.at
    own = [
        one for one in ranks if one.folder == place.folder and (one.ep_rank, one.etp_rank) == (at.ep_rank, at.etp_rank)
    ]
    dense = [
        one for one in ranks if one.holds_dense_optimizer and (one.tp_rank, one.pp_rank) == (at.tp_rank, at.pp_rank)
    ]
    return tuple(dict.fromkeys([*own, *dense])) if own else ()


def _same_chunks(stored: Sequence[ModelChunk], place: ParallelRank, model: LiveModel) -> bool:
    by_number = {chunk.vpp_rank: chunk for chunk in stored if chunk.pp_rank == place.at.pp_rank}
    return len(by_number) == len(model.chunks) and all(
        by_number[live.vpp_rank].num_layers == live.num_layers
        and (not live.num_layers or by_number[live.vpp_rank].first_layer == live.first_layer)
        for live in model.chunks
    )


def _same_tensors(shard: RankShard, model: LiveModel) -> bool:
    """Whether names, shapes and types of all local tensors are those of the live model."""
    parts = {part.vpp_rank: part.tensors for part in shard.parts}
    for chunk in model.chunks:
        live = {name: (tuple(t.shape), dtype_of(t.dtype)) for name, t in chunk.tensors().items()}
        tensors = parts.get(chunk.vpp_rank, {})
        if live != {name: (t.shape, t.record.dtype) for name, t in tensors.items()}:
            return False
        if any(t.strides != row_major(t.shape) for t in tensors.values() if 0 not in t.shape):
            return False
    return len(parts) == len(model.chunks)
