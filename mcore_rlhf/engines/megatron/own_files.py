"""Loading where the rank's local tensors are the stored ones: every rank opens its own files only, and copies runs of bytes.

The data-parallel size, buckets and the kind of optimizer may differ: a parameter's states lie somewhere in the rank's
files, and this rank needs a flat range of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.core.catalog import MASTER, PARAM, dtype_of, row_major
from mcore_rlhf.engines.values import torch_values
from mcore_rlhf.errors import CheckpointError, Incomplete, LayoutMismatch, Problem, Problems
from mcore_rlhf.families.megatron.arguments import Arguments
from mcore_rlhf.families.megatron.folders import FileRank, Located, file_ranks, model_file
from mcore_rlhf.families.megatron.groups import inner_state
from mcore_rlhf.families.megatron.state import NAMES
from mcore_rlhf.formats.megatron.optimizer import OptimizerReading, read_optimizer
from mcore_rlhf.formats.megatron.plain import masters_of
from mcore_rlhf.formats.megatron.reader import training_state
from mcore_rlhf.formats.megatron.shards import RankFiles, RankShard
from mcore_rlhf.layouts.parallel import ParallelConfig
from mcore_rlhf.layouts.pipeline import ModelChunk, model_chunks
from mcore_rlhf.models.spec import Rules
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pt import PtFile, StoredTensor, read_pt

from ..load import Load, Pair, Slot, planned_locally
from ..optimizers import OptimizerLoad, OwnLoad, SavedOptimizer, StockLoad, is_stock, matched
from ..stateful import Undo
from .groups import describe, identity
from .load import LocalPart, MegatronStored, slots_of
from .model import LiveModel
from .optimizers import ChainMember
from .parallel_state import ParallelRank

_ADVICE = "Go on at the layout that was saved, or load the weights alone: load(optimizer=False)."


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

    located: Located
    args: Arguments
    parallel: ParallelConfig
    chunks: tuple[ModelChunk, ...]
    shards: tuple[RankShard, ...]

    @classmethod
    def find(cls, located: Located, place: ParallelRank, model: LiveModel, optimizer: bool) -> OwnFiles | None:
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

    def load(self, model: LiveModel, chain: Sequence[ChainMember | None]) -> tuple[Load[LocalPart], MegatronStored]:
        """Plan the load.

        Raises:
            CheckpointError: The optimizer's state is missing or does not fit.
        """
        reading, report, own = OptimizerReading(), Report(), self.shards[0]
        if chain:
            reading = read_optimizer(self.shards, self.chunks, self.args, self.parallel, Rules())
        states = tuple(state for state in reading.states if state != MASTER)
        found, stored = slots_of(model, chain if reading.kind is not None else (), states), self._stored(reading)
        plan = planned_locally(
            found, lambda one: stored.get((one.owner.vpp_rank, one.owner.name, one.state)), self._missing
        )
        state = training_state(self.shards, self.located, reading.groups, report)
        report.add(Fate.KEPT, "parameters: this rank's own, bit for bit")
        opaque = {part.vpp_rank: torch_values(own.pt.materialize(part.opaque)) for part in own.parts}
        besides = MegatronStored(torch_values(state), states, reading.kind, torch_values(reading.scalars), opaque)
        return Load(self.located.root, found, plan, report, [self.located.root / own.pt.file], self._rng()), besides

    def _missing(self, slot: Slot[LocalPart]) -> Problem:
        text = f"{self.shards[0].pt.file}: no {slot.state} of {slot.owner.name}, which this run trains; was it frozen?"
        return Problem(Incomplete, text, "Load with optimizer=False to begin with fresh optimizer states.")

    def _rng(self) -> Mapping[str, object] | None:
        """What Megatron-LM restores, whatever the data-parallel rank: the first entry, unless every rank began anew."""
        stored = self.shards[0].top.get("rng_state")
        if not isinstance(stored, list) or not stored or self.args.flag("data_parallel_random_init"):
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


@dataclass(slots=True)
class WholeOptimizer:
    """The stored states of a chain that no plan can move, such as Muon beside Adam: saved whole, as Megatron writes them.

    A layer-wise optimizer deals whole parameters out to the data-parallel ranks, and each rank writes its own states into a
    file of its own, ``mp_rank_…/layer_wise_optimizer_<dp_rank>.pt``; a plain chain lies in the model file. Neither says which
    parameter a state belongs to: the order is that of the live optimizer, and masters, which round to their parameters, prove
    it.

    Sources: megatron-core 0.16.1, ``optimizer/layer_wise_optimizer.py`` (``save_state_dict_to_file``), ``optimizer/optimizer.py``
    (``ChainedOptimizer.state_dict``); Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``save_checkpoint``).

    Args:
        own: This rank's files, of the same layout but for the data-parallel size.
        pt: The file that holds them.
        chain: The live members, without stubs.
        names: Chunk and local name of every live parameter.
        loads: How each is given back.
        masters: Where each live master lies in the file.
        scalers: The members' stored loss scalers.
    """

    own: OwnFiles
    pt: PtFile
    chain: tuple[ChainMember, ...]
    names: Mapping[torch.nn.Parameter, tuple[int, str]]
    loads: list[OptimizerLoad] = field(default_factory=list)
    masters: list[Pair] = field(default_factory=list)
    scalers: list[object] = field(default_factory=list)

    @property
    def file(self) -> ReadablePath:
        """The file that is read."""
        return self.pt.root / self.pt.file

    @classmethod
    def find(
        cls,
        own: OwnFiles,
        place: ParallelRank,
        model: LiveModel,
        chain: Sequence[ChainMember | None],
        problems: Problems,
    ) -> WholeOptimizer | None:
        """What the checkpoint has for this rank; None where it has no optimizer at all.

        Args:
            own: This rank's files, of the same layout but for the data-parallel size.
            place: This rank.
            model: Its model.
            chain: Its optimizers.
            problems: Told of all that does not fit.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        stored = own.shards[0].top.get("optimizer")
        if stored is None:
            return None
        pt = own.shards[0].pt
        if any(member.layer_wise for member in chain if member is not None):
            if (own.parallel.dp, own.parallel.cp) != (place.parallel.dp, place.parallel.cp):
                text = f"whole parameters are dealt out to data-parallel ranks: saved at {own.parallel}, now {place.parallel}"
                problems.add(LayoutMismatch, text, _ADVICE)
                return None
            pt = _own_file(own, place)
            stored = pt.tree
        members = stored if isinstance(stored, list) else [stored]
        if len(members) != len(chain) or not all(isinstance(one, Mapping) for one in members):
            text = f"{pt.root / pt.file}: {len(members)} chained optimizers, this run has {len(chain)}"
            problems.add(LayoutMismatch, text, _ADVICE)
            return None
        names = {param: (chunk.vpp_rank, name) for chunk in model.chunks for name, param in chunk.parameters().items()}
        found = cls(own, pt, tuple(filter(None, chain)), names)
        for member, content in zip(chain, members, strict=True):
            if member is not None:
                found._add(member, content, problems)
        return found

    def _add(self, member: ChainMember, stored: Mapping[str, object], problems: Problems) -> None:
        where, optimizer = f"{self.file}: optimizer {member.number}", member.optimizer.optimizer
        try:
            saved = SavedOptimizer.parse(inner_state(stored), None, where)
        except LayoutMismatch as error:
            problems.add_error(error)
            return
        for live, group in zip(member.groups, saved.groups, strict=False):
            if identity(live) != identity(group):
                text = f"{where}: a param group with {describe(group)} stands where this run's has {describe(live)}"
                problems.add(LayoutMismatch, text, _ADVICE)
        order = matched(optimizer, None, saved, where, problems)
        self.loads.append(
            StockLoad(optimizer, self.pt, saved, order)
            if is_stock(optimizer)
            else OwnLoad(optimizer, self.pt, inner_state(stored))
        )
        self.scalers.append(stored.get("grad_scaler"))
        for text in self._masters(member, stored):
            problems.add(LayoutMismatch, f"{where}: {text}", _ADVICE)

    def _masters(self, member: ChainMember, stored: Mapping[str, object]) -> Iterator[str]:
        """Note where the live masters lie; what does not fit in words. A master that does not round to its parameter is another's."""
        params = [param for group in getattr(member.optimizer, "float16_groups", []) for param in group]
        places = [place for group in masters_of(stored) or [] for place in group]
        if len(params) != len(places):
            yield f"has {len(places)} fp32 masters, this run has {len(params)}"
            return
        own = self.own.shards[0]
        weights = {(part.vpp_rank, name): one for part in own.parts for name, one in part.tensors.items()}
        for param, place in zip(params, places, strict=True):
            at = self.names[param]
            weight = torch_values(own.pt.load(weights[at]))
            if place.shape != tuple(param.shape):
                yield f"the master of {at[1]} has shape {place.shape}, the parameter {tuple(param.shape)}"
            elif not torch.equal(torch_values(self.pt.load(place)).to(weight.dtype), weight):
                yield f"what should be the master of {at[1]} does not round to it: the parameters are in another order"
            self.masters.append((place, param.main_param))

    def install(self, undo: Undo) -> Sequence[Pair]:
        """Hand every member its groups, states and loss scale."""
        pairs = list(self.masters)
        for member, load, scaler in zip(self.chain, self.loads, self.scalers, strict=True):
            pairs += load.install(undo)
            if isinstance(scaler, dict) and member.scaler is not None:
                undo.handed(member.scaler, torch_values(self.pt.materialize(scaler)))
        return pairs

    def states(self) -> set[str]:
        """The names of all states, for the report."""
        keys = {key for load in self.loads for key in load.states()}
        return keys | ({MASTER} if self.masters else set())


def _own_file(own: OwnFiles, place: ParallelRank) -> PtFile:
    folder = own.located.folder / place.folder
    try:
        return read_pt(own.located.root, str((folder / place.layer_wise_file).relative_to(own.located.root)))
    except CheckpointError as error:
        raise Incomplete(
            f"{folder / place.layer_wise_file}: cannot be read, and this rank's part of the layer-wise optimizer lies in it: {error}"
        ) from error
