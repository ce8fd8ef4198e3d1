"""An optimizer that no plan can move, given back as it was saved: Muon beside Adam, dealt out to ranks, somebody's own.

A layer-wise optimizer deals whole parameters out to the data-parallel ranks, and each rank writes its own states into a file of
its own, ``mp_rank_…/layer_wise_optimizer_<dp_rank>.pt``; a plain chain lies in the model file; a distributed optimizer that is
chained to a layer-wise one in ``distrib_optim.pt``. None says which parameter a state belongs to: the order is that of the live
optimizer, and masters, which round to their parameters, prove it.

Sources: megatron-core 0.16.1 and 0.19.2, ``optimizer/layer_wise_optimizer.py`` (``save_state_dict_to_file``),
``optimizer/optimizer.py`` (``ChainedOptimizer.state_dict``), ``optimizer/__init__.py`` (``_get_megatron_emerging_optimizer``);
``megatron/training/checkpointing.py`` of both (``save_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from mcore_rlhf.core.catalog import MASTER
from mcore_rlhf.engines.stateful import torch_values
from mcore_rlhf.errors import CheckpointError, Incomplete, LayoutMismatch, Problems
from mcore_rlhf.families.megatron.arguments import DISTRIBUTED
from mcore_rlhf.families.megatron.folders import OPTIMIZER_FILE
from mcore_rlhf.families.megatron.groups import inner_state
from mcore_rlhf.formats.megatron.plain import masters_of
from mcore_rlhf.models.megatron import is_routed_expert
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.pt import PtFile, read_pt
from mcore_rlhf.storage.stored import StoredTensor

from ..load import Pair
from ..optimizers import OptimizerLoad, OwnLoad, SavedOptimizer, StockLoad, is_stock, matched
from ..stateful import Undo
from .files import shard_places
from .groups import alike, all_that_tells, describe
from .model import LiveModel
from .optimizers import PARAM_KEY, ChainMember, Owned, is_laid_out, rank_by_rank
from .own_files import OwnFiles
from .parallel_state import ParallelRank

_ADVICE = "Go on at the layout that was saved, or load the weights alone: load(optimizer=False)."
Fields = Mapping[str, object]


@dataclass(slots=True)
class WholeOptimizer:
    """The stored states of a chain, as this rank saved them.

    Args:
        own: This rank's files, of the same layout but for the data-parallel size.
        place: This rank.
        pt: The file that holds them.
        chain: The live members, without stubs.
        names: Chunk and local name of every live parameter.
        weights: Where each stored parameter lies, by the same.
        files: All that are read.
        loads: How each is given back.
        masters: Where each live master lies in the file.
        scalers: The members' stored loss scalers.
    """

    own: OwnFiles
    place: ParallelRank
    pt: PtFile
    chain: tuple[ChainMember, ...]
    names: Mapping[torch.nn.Parameter, tuple[int, str]]
    weights: Mapping[tuple[int, str], StoredTensor]
    files: list[ReadablePath] = field(default_factory=list)
    loads: list[OptimizerLoad] = field(default_factory=list)
    masters: list[Pair] = field(default_factory=list)
    scalers: list[object] = field(default_factory=list)

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
            own: This rank's files, which :func:`fits` its chain.
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
        if rank_by_rank(chain):
            pt = _read(own, place.folder, place.layer_wise_file)
            stored = pt.tree
        members = stored if isinstance(stored, list) else [stored]
        if len(members) != len(chain) or not all(isinstance(one, Mapping) for one in members):
            text = f"{pt.root / pt.file}: {len(members)} chained optimizers, this run has {len(chain)}"
            problems.add(LayoutMismatch, text, _ADVICE)
            return None
        names = {param: (chunk.vpp_rank, name) for chunk in model.chunks for name, param in chunk.parameters().items()}
        parts = own.shards[0].parts
        weights = {(part.vpp_rank, name): one for part in parts for name, one in part.tensors.items()}
        found = cls(own, place, pt, tuple(filter(None, chain)), names, weights, [pt.root / pt.file])
        for member, content in zip(chain, members, strict=True):
            if member is not None:
                found._add(member, content, problems)
        return found

    def _add(self, member: ChainMember, stored: Fields, problems: Problems) -> None:
        where = f"{self.files[0]}: {member.label}"
        self.scalers.append(stored.get("grad_scaler"))
        if member.opaque:
            self.loads.append(OwnLoad(member.optimizer, self.pt, stored))
            return
        stored_groups = inner_state(stored).get("param_groups")
        groups = [one for one in stored_groups if isinstance(one, Mapping)] if isinstance(stored_groups, list) else []
        for live, group in zip(member.groups, groups, strict=False):
            others = [one for one in groups if one is not group and all_that_tells(one) == all_that_tells(live)]
            if not alike(live, group) or (others and all_that_tells(group) != all_that_tells(live)):
                text = f"{where}: a param group with {describe(group)} stands where this run's has {describe(live)}"
                problems.add(LayoutMismatch, text, _ADVICE)
        if member.kind == DISTRIBUTED:
            self._add_flat(member, groups, where, problems)
        else:
            self._add_plain(member, stored, where, problems)

    def _add_plain(self, member: ChainMember, stored: Fields, where: str, problems: Problems) -> None:
        try:
            saved = SavedOptimizer.parse(inner_state(stored), None, where)
        except LayoutMismatch as error:
            problems.add_error(error)
            return
        order = matched(member.inner, None, saved, where, problems)
        self.loads.append(
            StockLoad(member.inner, self.pt, saved, order)
            if is_stock(member.inner)
            else OwnLoad(member.inner, self.pt, inner_state(stored))
        )
        params = [param for group in getattr(member.optimizer, "float16_groups", []) for param in group]
        places = [place for group in masters_of(stored) or [] for place in group]
        if len(params) != len(places):
            text = f"{where}: has {len(places)} fp32 masters, this run has {len(params)}"
            problems.add(LayoutMismatch, text, _ADVICE)
            return
        for param, place in zip(params, places, strict=True):
            name = self.names[param][1]
            if place.shape != tuple(param.shape):
                text = f"{where}: the master of {name} has shape {place.shape}, the parameter {tuple(param.shape)}"
                problems.add(LayoutMismatch, text, _ADVICE)
            elif not (self.place.trains_experts_twice and is_routed_expert(name)) and not self._rounds(
                self.pt, place, param
            ):
                problems.add(LayoutMismatch, f"{where}: {_other_order(name)}", _ADVICE)
            self.masters.append((place, param.main_param))

    def _add_flat(self, member: ChainMember, groups: Sequence[Fields], where: str, problems: Problems) -> None:
        """A distributed optimizer in the chain: this rank's shards lie in the file of the first data-parallel rank."""
        first = dist.get_process_group_ranks(member.optimizer.data_parallel_group)[0]
        pt = _read(self.own, self.place.folder_of(first), OPTIMIZER_FILE)
        self.files.append(pt.root / pt.file)
        trees = pt.tree if isinstance(pt.tree, list) else [pt.tree]
        tree = trees[member.number] if member.number < len(trees) else None
        buffers = [*_buffers(tree)]
        numels = [int(buffer.numel_unpadded) for buffer in member.optimizer.buffers]
        if [one.get("numel_unpadded") for one in buffers] != numels or len(groups) != len(member.groups):
            have = [one.get("numel_unpadded") for one in buffers]
            text = f"{where}: {len(groups)} param groups and buffers of {have} elements, this run has {len(member.groups)} and {numels}"
            problems.add(LayoutMismatch, text, _ADVICE)
            return
        load = FlatLoad(member, groups, buffers)
        for state, place, owned in load.places():
            if state == MASTER and not self._rounds(pt, place, owned.param, owned.start, owned.stop):
                text = f"{pt.root / pt.file}: {member.label}: {_other_order(self.names[owned.param][1])}"
                problems.add(LayoutMismatch, text, _ADVICE)
        self.loads.append(load)

    def _rounds(
        self, pt: PtFile, place: StoredTensor, param: torch.nn.Parameter, start: int = 0, stop: int | None = None
    ) -> bool:
        """Whether a stored master, or a part of one, rounds to the stored parameter; one that does not is another's."""
        weight = torch_values(self.own.shards[0].pt.load(self.weights[self.names[param]])).flatten()[start:stop]
        return torch.equal(torch_values(pt.load(place)).flatten().to(weight.dtype), weight)

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


@dataclass(slots=True)
class FlatLoad:
    """A distributed optimizer's shards, from the records that all data-parallel ranks filled together.

    Args:
        member: The live one.
        groups: Its stored param groups.
        buffers: The stored records of each of its buffers, by state.
    """

    member: ChainMember
    groups: Sequence[Fields]
    buffers: Sequence[Fields]

    def install(self, undo: Undo) -> Sequence[Pair]:
        """Set its groups, and make its states."""
        undo.optimizer(self.member.inner)
        fields = [
            {key: torch_values(value) for key, value in group.items() if key != "params"} for group in self.groups
        ]
        self.member.load(fields, sorted(self.states() - {MASTER}), {})
        return [(place, self.member.tensors(owned)[state]) for state, place, owned in self.places()]

    def states(self) -> set[str]:
        """The names of all states."""
        return {
            MASTER if key == PARAM_KEY else key
            for one in self.buffers
            for key, value in one.items()
            if isinstance(value, StoredTensor)
        }

    def places(self) -> Iterator[tuple[str, StoredTensor, Owned]]:
        """(state, where it lies, part) of every shard that this rank owns."""
        for index, owned, start in shard_places(self.member):
            for key, whole in self.buffers[index].items():
                if isinstance(whole, StoredTensor):
                    place = StoredTensor(whole.record, whole.start + start, (owned.stop - owned.start,), (1,))
                    yield MASTER if key == PARAM_KEY else key, place, owned


def _buffers(tree: object) -> Iterator[Fields]:
    """What ``distrib_optim.pt`` has of each buffer of a member: its states by name."""
    content: Fields = tree if isinstance(tree, Mapping) else {}
    for number in range(len(content)):
        yield from content.get(number, {}).values()  # type: ignore[call-overload]


def _other_order(name: str) -> str:
    return f"what should be the master of {name} does not round to it: the parameters are in another order"


def fits(own: OwnFiles, place: ParallelRank, chain: Sequence[ChainMember | None]) -> bool:
    """Whether this rank's files hold what it saved, whole: those that are dealt out, or are not, as the live chain's.

    Args:
        own: This rank's files, of the same layout but for the data-parallel size.
        place: This rank.
        chain: The live optimizers.
    """
    if own.shards[0].top.get("optimizer") is None:
        return True
    if not rank_by_rank(chain):
        return not own.args.layer_wise
    if _has_flat_part(own) != is_laid_out(chain):
        return False
    same = (own.parallel.dp, own.parallel.cp) == (place.parallel.dp, place.parallel.cp)
    return same and (own.located.folder / place.folder / place.layer_wise_file).is_file()


def lies_by_size(own: OwnFiles, place: ParallelRank) -> bool:
    """Whether whole parameters were dealt by size, and the files of all that this rank trains lie in its own folder.

    Args:
        own: This rank's files, of the same layout but for the data-parallel size.
        place: This rank.
    """
    parallel = place.parallel
    return own.args.layer_wise and parallel.ep == 1 and parallel.etp == parallel.tp and not _has_flat_part(own)


def _has_flat_part(own: OwnFiles) -> bool:
    """Whether a part of a layer-wise optimizer's chain was cut, as by :func:`.optimizers.is_laid_out`."""
    return any((folder / OPTIMIZER_FILE).is_file() for folder in own.located.folder.iterdir())


def _read(own: OwnFiles, folder: str, name: str) -> PtFile:
    path = own.located.folder / folder / name
    try:
        return read_pt(own.located.root, str(path.relative_to(own.located.root)))
    except CheckpointError as error:
        raise Incomplete(
            f"{path}: cannot be read, and this rank's part of the optimizer lies in it: {error}"
        ) from error
