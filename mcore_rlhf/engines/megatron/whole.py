"""Optimizers that no plan can move, such as Muon beside Adam: saved whole, as Megatron writes them, and given back at that layout.

A layer-wise optimizer deals whole parameters out to the data-parallel ranks, and each rank writes its own states into a file of
its own, ``mp_rank_…/layer_wise_optimizer_<dp_rank>.pt``; a plain chain lies in the model file. Neither says which parameter a
state belongs to: the order is that of the live optimizer, and masters, which round to their parameters, prove it.

Sources: megatron-core 0.16.1, ``optimizer/layer_wise_optimizer.py`` (``save_state_dict_to_file``), ``optimizer/optimizer.py``
(``ChainedOptimizer.state_dict``); Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``save_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mcore_rlhf.errors import CheckpointError, Incomplete, LayoutMismatch, Problems
from mcore_rlhf.families.megatron.groups import inner_state
from mcore_rlhf.formats.megatron.optimizer import masters_of
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.ptfile import PtFile, StoredTensor, read_pt
from mcore_rlhf.storage.reading import OpenFiles

from ..load import copy_into
from ..optimizers import OptimizerLoad, OwnLoad, SavedOptimizer, StockLoad, is_stock, matched
from ..stateful import Undo
from .groups import describe, identity
from .model import LiveModel
from .optimizers import Member
from .own_files import OwnFiles
from .parallel_state import Place

_ADVICE = "Go on at the layout that was saved, or load the weights alone: load(optimizer=False)."


@dataclass(slots=True)
class WholeOptimizer:
    """The stored states of a chain, for this rank.

    Args:
        pt: The file that holds them.
        chain: The live members, without stubs.
        loads: How each is given back.
        masters: Where each live master lies in the file.
        scalers: The members' stored loss scalers.
    """

    pt: PtFile
    chain: tuple[Member, ...]
    loads: list[OptimizerLoad] = field(default_factory=list)
    masters: list[tuple[StoredTensor, torch.Tensor]] = field(default_factory=list)
    scalers: list[object] = field(default_factory=list)

    @property
    def file(self) -> ReadablePath:
        """The file that is read."""
        return self.pt.root / self.pt.file

    @classmethod
    def find(
        cls, own: OwnFiles, place: Place, model: LiveModel, chain: Sequence[Member | None], problems: Problems
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
        if any(member.dealt for member in chain if member is not None):
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
        found = cls(pt, tuple(filter(None, chain)))
        names = {param: (chunk.vpp_rank, name) for chunk in model.chunks for name, param in chunk.parameters().items()}
        for member, content in zip(chain, members, strict=True):
            if member is not None:
                found._add(member, content, own, names, problems)
        return found

    def _add(
        self,
        member: Member,
        stored: Mapping[str, object],
        own: OwnFiles,
        names: Mapping[torch.nn.Parameter, tuple[int, str]],
        problems: Problems,
    ) -> None:
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
        for text in self._masters(member, stored, own, names):
            problems.add(LayoutMismatch, f"{where}: {text}", _ADVICE)

    def _masters(
        self,
        member: Member,
        stored: Mapping[str, object],
        own: OwnFiles,
        names: Mapping[torch.nn.Parameter, tuple[int, str]],
    ) -> Iterator[str]:
        """Note where the live masters lie; what does not fit in words. A master that does not round to its parameter is another's."""
        params = [param for group in getattr(member.optimizer, "float16_groups", []) for param in group]
        places = [place for group in masters_of(stored) or [] for place in group]
        if len(params) != len(places):
            yield f"has {len(places)} fp32 masters, this run has {len(params)}"
            return
        weights = {(part.vpp_rank, name): one for part in own.shards[0].parts for name, one in part.tensors.items()}
        for param, place in zip(params, places, strict=True):
            at = names[param]
            weight = own.shards[0].pt.load(weights[at])
            if place.shape != tuple(param.shape):
                yield f"the master of {at[1]} has shape {place.shape}, the parameter {tuple(param.shape)}"
            elif not torch.equal(self.pt.load(place).to(weight.dtype), weight):
                yield f"what should be the master of {at[1]} does not round to it: the parameters are in another order"
            self.masters.append((place, param.main_param))

    def install(self, undo: Undo) -> None:
        """Hand every member its groups, states and loss scale."""
        for member, load, scaler in zip(self.chain, self.loads, self.scalers, strict=True):
            load.read()
            load.install(undo)
            if isinstance(scaler, dict) and member.scaler is not None:
                undo.handed(member.scaler, self.pt.materialize(scaler))

    def fill(self) -> None:
        """Copy states and masters into the live tensors."""
        for load in self.loads:
            load.fill()
        with OpenFiles(self.pt.root) as files, torch.no_grad():
            for place, target in self.masters:
                copy_into(files, place, target)

    def states(self) -> str:
        """The names of all states, for the report."""
        keys = {
            key
            for load in self.loads
            if isinstance(load, StockLoad)
            for one in load.saved.state.values()
            for key in _keys(one)
        }
        return ", ".join(sorted({*keys, *(["master"] if self.masters else [])})) or "its own"


def _keys(values: object) -> Sequence[str]:
    return [str(key) for key in values] if isinstance(values, Mapping) else []


def _own_file(own: OwnFiles, place: Place) -> PtFile:
    folder = own.located.folder / place.folder
    try:
        return read_pt(own.located.root, str((folder / place.layer_wise_file).relative_to(own.located.root)))
    except CheckpointError as error:
        raise Incomplete(
            f"{folder / place.layer_wise_file}: cannot be read, and this rank's part of the layer-wise optimizer lies in it: {error}"
        ) from error
