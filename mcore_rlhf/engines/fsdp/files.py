"""What a sharded trainer is on the disk: the nest of dictionaries that RLinf saves, as items of each rank's ``.distcp``.

``fsdp_checkpoint.model.<name>``, ``fsdp_checkpoint.optimizers.state.<name>.<key>``,
``fsdp_checkpoint.optimizers.param_groups.<i>.<field>`` with ``params`` as a list of names,
``fsdp_checkpoint.lr_schedulers.<i>.…`` and ``fsdp_checkpoint.fsdp_version``.

Source: RLinf, ``rlinf/hybrid_engines/fsdp/strategy/checkpoint.py`` (``Checkpoint.state_dict``; read, not run).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import prod

import torch

from mcore_rlhf.core.catalog import Box, DType, dtype_of
from mcore_rlhf.errors import LayoutMismatch, Unsupported
from mcore_rlhf.families.fsdp.groups import PARAMS
from mcore_rlhf.formats.dcp import FORMAT
from mcore_rlhf.formats.dcp.keys import RLINF, flattened, joined
from mcore_rlhf.storage.dcp import METADATA_FILE
from mcore_rlhf.storage.dcp.metadata import Path_
from mcore_rlhf.storage.dcp.writer import Distcp, Item, ObjectItem, TensorItem, dcp_metadata, saved

from ..base import LiveFile, LiveState, Segment
from ..stateful import no_bytes
from .geometry import Replicated, Split
from .model import LocalShard, OptimizerState, ShardedModule, ShardedOptimizer

KEYS = RLINF
FOLDER = "dcp_checkpoint"


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A tensor of the checkpoint; it holds no live value.

    Args:
        path: Where it stands in the nest of dictionaries.
        dtype: Element type.
        split: Which rank writes what.
    """

    path: Path_
    dtype: DType
    split: Split

    @property
    def fqn(self) -> str:
        """Its name in the checkpoint."""
        return joined(self.path)

    def items(self, rank: int) -> Iterator[TensorItem]:
        """What a rank writes of it."""
        shape, boxes = self.split.global_shape, self.split.written(rank)
        if not prod(shape) and rank == self.split.first:
            boxes = (Box.whole(shape),)  # an item all the same: who loads asks for it
        for box in boxes:
            yield TensorItem(self.fqn, self.dtype, box.offset, box.shape)


@dataclass(slots=True)
class Table:
    """Everything that the checkpoint holds, in order.

    Args:
        ranks: The ranks that write; the first writes what all have.
        tensors: On all ranks that have a file, and on the first, which describes the others' too.
        objects: What is no tensor, by its path: as ``torch.save`` writes it.
        digests: Every rank's own :meth:`digest`.
        made: The ``.metadata`` of the save before, by the digests of then: it changes with the model or the ranks only, and
            takes seconds where there are hundreds of ranks.
    """

    ranks: tuple[int, ...]
    tensors: list[LogicalTensor] = field(default_factory=list)
    objects: dict[Path_, bytes] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    made: dict[tuple[str, ...], bytes] = field(default_factory=dict)

    def items(self, rank: int) -> list[Item]:
        """What a rank's file holds."""
        found: list[Item] = [item for tensor in self.tensors for item in tensor.items(rank)]
        if rank == self.ranks[0]:
            found += [ObjectItem(joined(path), data) for path, data in self.objects.items()]
        return found

    def name(self, rank: int) -> str:
        """Name of a rank's file; torch's ranks count within the process group that saves."""
        return f"__{self.ranks.index(rank)}_0.distcp"

    def digest(self, rank: int) -> str:
        """A checksum of what a rank's file holds: what, and in which order."""
        digest = sha256()
        for item in self.items(rank):
            digest.update(repr((item.fqn, len(item.data)) if isinstance(item, ObjectItem) else item).encode())
        return digest.hexdigest()

    def metadata(self) -> bytes:
        """The content of ``.metadata``, for all ranks' files.

        Raises:
            LayoutMismatch: A rank writes other items than this one thinks.
        """
        key = tuple(self.digests)
        if key not in self.made:
            found = self._metadata()
            self.made.clear()
            self.made[key] = found
        return self.made[key]

    def _metadata(self) -> bytes:
        wrong = [rank for rank, found in zip(self.ranks, self.digests, strict=True) if found != self.digest(rank)]
        if wrong:
            raise LayoutMismatch(
                f"rank {wrong[0]} writes other parts than rank {self.ranks[0]} expects of it ({len(wrong)} ranks differ); the step "
                "is not saved\nDo all ranks train the same parameters, in the same param groups?"
            )
        shapes = {tensor.fqn: tensor.split.global_shape for tensor in self.tensors}
        files = {self.name(rank): items for rank in self.ranks if (items := self.items(rank))}
        paths = [*(tensor.path for tensor in self.tensors), *self.objects]
        return dcp_metadata(shapes, files, {joined(path): path for path in paths})


@dataclass(slots=True)
class LiveTable:
    """A table in the making, and this rank's memory of what is in it.

    Args:
        table: The table.
        rank: This global rank.
        segments: What this rank writes.
    """

    table: Table
    rank: int
    segments: list[Segment] = field(default_factory=list)

    def add(self, path: Path_, split: Split, local: torch.Tensor) -> None:
        """Add a tensor of which this rank may hold a part.

        Args:
            path: Where it stands.
            split: Which rank holds what.
            local: This rank's memory: what :meth:`.geometry.Split.boxes` says, end to end.
        """
        tensor = LogicalTensor(path, dtype_of(local.dtype), split)
        self.table.tensors.append(tensor)
        flat, at = local.reshape(-1), 0
        for item in tensor.items(self.rank):
            count = prod(item.shape)
            if count:
                self.segments.append(Segment(item.key, 0, flat[at : at + count]))
            at += count

    def add_elsewhere(self, path: Path_, split: Split, dtype: DType) -> None:
        """Add a tensor of which other ranks have all."""
        self.table.tensors.append(LogicalTensor(path, dtype, split))

    def add_tree(self, path: Path_, tree: object) -> None:
        """Add a nest of dictionaries and lists that all ranks have.

        Raises:
            Unsupported: Something in it cannot be saved.
        """
        for at, value in flattened(tree, path):
            if isinstance(value, torch.Tensor):
                if why := no_bytes(value):
                    raise Unsupported(f"{joined(at)} {why}; only parameters and their states can be cut")
                self.add(at, Replicated(tuple(value.shape), self.table.ranks[0]), value.detach().contiguous())
            elif self.rank == self.table.ranks[0]:
                self.table.objects[at] = saved(value, joined(at))


def live_state(table: LiveTable, layout: str) -> LiveState:
    """What one rank has to save.

    Args:
        table: The table, complete.
        layout: How the model is cut.
    """
    whole, rank = table.table, table.rank
    items = whole.items(rank)
    file = LiveFile(f"{FOLDER}/{whole.name(rank)}", (rank,), table.segments, Distcp(items))
    texts = {f"{FOLDER}/{METADATA_FILE}": whole.metadata} if rank == whole.ranks[0] else {}
    return LiveState(FORMAT.name, layout, (file,) if items else (), texts)


def add_module(table: LiveTable, module: ShardedModule) -> None:
    """Add weights and buffers under all their names, and extra state.

    A tied tensor is stored once for every name, as torch does: who loads it asks for all of them.
    """
    named = {one.name: one for one in module.tensors}
    for name, one in [*named.items(), *((alias, named[owner]) for alias, owner in module.shared.items())]:
        table.add(KEYS.model_path(name), one.split, one.local)
    for name, part in module.extra.items():
        table.add_tree(KEYS.model_path(name), part.get_extra_state())


@dataclass(frozen=True, slots=True)
class StateInfo:
    """What a rank tells of a state.

    Args:
        dtype: Of a tensor; None for a value that is none.
        shape: Of a tensor that is not cut.
        elementwise: Whether it is cut as its parameter is.
        value: Of what is no tensor.
    """

    dtype: DType | None
    shape: tuple[int, ...] = ()
    elementwise: bool = False
    value: object = None

    def split(self, param: LocalShard) -> Split:
        """Which rank holds what of it."""
        return param.split if self.elementwise else Replicated(self.shape, param.split.first)


StatesByParam = dict[tuple[str, str], StateInfo]
"""By parameter and key."""


def states_of(optimizer: ShardedOptimizer | None) -> StatesByParam:
    """What this rank has of the optimizer."""
    if optimizer is None:
        return {}
    found = {(state.param, state.key): _tell(state) for state in optimizer.states}
    for param, values in optimizer.values.items():
        found |= {(param, key): StateInfo(None, value=value) for key, value in values.items()}
    return found


def _tell(state: OptimizerState) -> StateInfo:
    return StateInfo(dtype_of(state.local.dtype), state.split.global_shape, state.elementwise)


def add_optimizer(table: LiveTable, optimizer: ShardedOptimizer, everyone: Sequence[StatesByParam]) -> None:
    """Add states and param groups.

    Args:
        table: Takes them.
        optimizer: The live optimizer.
        everyone: What each rank has of it, where they differ: on FSDP1 a rank has no state of a parameter that it has no part
            of. Empty where they do not.
    """
    mine = {(state.param, state.key): state for state in optimizer.states}
    params = {param.name: param for _, params in optimizer.groups for param in params}
    found: StatesByParam = {}
    for states in everyone or [states_of(optimizer)]:
        found |= states
    order = {name: number for number, name in enumerate(params)}
    for (param, key), one in sorted(found.items(), key=lambda item: order[item[0][0]]):
        path, state = KEYS.state_path(param, key), mine.get((param, key))
        if state is not None:
            table.add(path, state.split, state.local)
        elif one.dtype is not None:
            table.add_elsewhere(path, one.split(params[param]), one.dtype)
        else:
            table.add_tree(path, one.value)
    for number, (fields, members) in enumerate(optimizer.groups):
        for key, value in {**fields, PARAMS: [param.name for param in members]}.items():
            table.add_tree(KEYS.group_path(number, key), value)
