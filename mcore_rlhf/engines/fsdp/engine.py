"""The engine of an FSDP trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate
from mcore_rlhf.engines.stateful import live_source
from mcore_rlhf.errors import CheckpointError, Unsupported, UsageError
from mcore_rlhf.families.options import ReadOptions, WriteOptions
from mcore_rlhf.families.passes import crossed
from mcore_rlhf.families.source import Source
from mcore_rlhf.formats.dcp import FORMAT
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.dcp import METADATA_FILE
from mcore_rlhf.storage.paths import ReadablePath

from ..base import LiveState, LoadRequest
from ..load import Load
from ..optimizers import say_what_is_unknown
from ..stateful import Stateful
from ..until_step import UntilStep
from .files import KEYS, LiveTable, StatesByParam, Table, add_module, add_optimizer, live_state, states_of
from .geometry import FlatParams, Meshes
from .load import FsdpHooks, Matching, ShardedOptimizerLoad, extra_states_of, others_of, schedules_of
from .model import LocalShard, ShardedModule, ShardedOptimizer, state_tensors

Others = Mapping[str, object]


class FsdpEngine:
    """A model wrapped by FSDP2 (``fully_shard``) or FSDP1, and what trains it; every rank makes one.

    Saving: every rank writes its own parts into ``<role>/dcp_checkpoint/__R_0.distcp``, and the first rank ``.metadata``,
    under the names that RLinf uses (``fsdp_checkpoint.model.…``). Nothing is gathered: what lies on other ranks follows from
    the meshes. ``torch.distributed.checkpoint.load`` reads it at any number of ranks.

    Loading takes that at any number of ranks, bit for bit, and every other checkpoint under a module's own names (DCP of
    other trainers, DeepSpeed, universal, Hugging Face), straight into the live parts.

    * FSDP2: any mesh of ``Shard`` and ``Replicate`` axes (HSDP writes one replica), with tensor parallelism where it divides
      evenly, mixed precision, CPU offload.
    * FSDP1: ``use_orig_params=True`` with ``FULL_SHARD`` or ``SHARD_GRAD_OP``. With an optimizer, each save gathers the names
      (not the values) of its states, since no rank has them all.
    * Refused, with advice: FSDP1's flat parameters, hybrid and no sharding; optimizers with a ``state_dict`` of their own;
      tensor subclasses, such as those of 8-bit optimizers.

    Random states are the manager's, of every rank; a DCP would keep one rank's. RLinf's own resume asks for them all the
    same: ``others=lambda: {"rng": get_rng_state()}`` puts them in.

    Args:
        module: The wrapped model. Wrappers of activation checkpointing and ``torch.compile`` leave no trace in names.
        optimizer: Any ``torch.optim.Optimizer`` with torch's own ``state_dict``, made after wrapping; None for a frozen model.
        lr_scheduler: One scheduler or several.
        others: Further values of the training script, which go beside ``model``; a function is called at each save. Only the
            first rank's are kept.

    Attributes:
        loaded_others: Those of the checkpoint that was loaded.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Stateful | Sequence[Stateful] | None = None,
        others: Others | Callable[[], Others] | None = None,
    ) -> None:
        self.module, self.optimizer = module, optimizer
        if optimizer is not None:
            say_what_is_unknown("FsdpEngine", optimizer)  # what it trains besides the module is refused
        self.schedulers: tuple[Stateful, ...] = (
            tuple(lr_scheduler)
            if isinstance(lr_scheduler, Sequence)
            else ((lr_scheduler,) if lr_scheduler is not None else ())
        )
        self.loaded_others: dict[str, object] = {}
        self._others = others
        self.world = ShardedWorld.of(module)
        self._made: dict[tuple[str, ...], bytes] = {}
        self._ranks = RankGroup.of(self.ranks)
        check_same_model(self._ranks, lambda: self._sharded()[0])

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that the model is dealt out to; the first gives what belongs to all."""
        return self.world.ranks

    @property
    def layout(self) -> str:
        """How the model is cut: ``FSDP8``, or ``FSDP2×4`` on a mesh of two axes."""
        return self.world.layout

    def live(self, step: int) -> LiveState:
        """Describe this rank's ``.distcp``, and on the first rank ``.metadata``.

        Ranks tell each other a checksum of what they describe, so that no ``.metadata`` is written that is not the files'.

        Args:
            step: The step; nothing depends on it.

        Raises:
            Unsupported: Something cannot be saved; all of it is named.
        """
        del step
        states: list[StatesByParam] = []
        if self.world.version == FSDP1 and self.optimizer is not None:
            _, gathered = self._ranks.all_gather(self._sharded, lambda sharded: states_of(sharded[1]))
            states = cast("list[StatesByParam]", gathered)
        table, gathered = self._ranks.all_gather(
            lambda: self._table(states), lambda table: table.table.digest(table.rank)
        )
        table.table.digests = cast("list[str]", gathered)
        state = live_state(table, self.layout)
        return replace(state, state_tensors=tuple(state_tensors(state, *self._sharded(), dist.get_rank(), self.ranks)))

    def until_step(self) -> UntilStep | None:
        """See :class:`~..until_step.Steps`; what is gathered for a pass lies elsewhere than the parts that are saved."""
        params = [one for one in self._sharded()[0].tensors if isinstance(one.whole, torch.nn.Parameter)]
        return UntilStep.of([self.module], self.optimizer, ((one.name, one.local) for one in params))

    def _table(self, states: Sequence[StatesByParam]) -> LiveTable:
        """All that is saved, and this rank's memory of it.

        Args:
            states: What each rank has of the optimizer, where they differ.
        """
        module, optimizer = self._sharded()
        table = LiveTable(Table(self.ranks, made=self._made), dist.get_rank())
        add_module(table, module)
        if optimizer is not None:
            add_optimizer(table, optimizer, states)
        if self.schedulers:
            table.add_tree((*KEYS.rest, "lr_schedulers"), [scheduler.state_dict() for scheduler in self.schedulers])
        table.add_tree((*KEYS.rest, "fsdp_version"), self.world.version)
        for key, value in (self._others() if callable(self._others) else self._others or {}).items():
            table.add_tree((*KEYS.rest, key), value)
        return table

    def prepare_load(self, request: LoadRequest) -> Load[LocalShard]:
        """Open a checkpoint, check that it fits this rank's parts, and plan the load.

        Raises:
            CheckpointError: It does not fit: all differences, with shapes.
        """
        options = ReadOptions(role=request.role, step=request.step, optimizer=request.optimizer)
        source = live_source(crossed(open_checkpoint(request.folder, options), FORMAT, WriteOptions()))
        module, optimizer = self._sharded()
        trained = optimizer if request.optimizer else None
        matching = Matching.of(source, module, trained, dist.get_rank(), self.ranks)
        load = matching.load(self._opened(source), wanted=trained is not None)
        handed = self._schedules(source, load.report) if request.optimizer else []
        extra = [(module.extra[name], value) for name, value in extra_states_of(source, module.extra).items()]

        def done() -> None:
            self.loaded_others = others_of(source)

        return load.checked(FsdpHooks(source.root, ShardedOptimizerLoad.of(matching, load), handed, extra, done))

    def _sharded(self) -> tuple[ShardedModule, ShardedOptimizer | None]:
        meshes = Meshes(self.ranks[0])
        module = ShardedModule.of(self.module, meshes)
        return module, ShardedOptimizer.of(self.optimizer, module, meshes) if self.optimizer is not None else None

    def _schedules(self, source: Source, report: Report) -> list[tuple[Stateful, dict[str, object]]]:
        """Every scheduler with its state."""
        stored = schedules_of(source)
        if self.schedulers and len(stored) != len(self.schedulers):
            text = f"learning-rate schedules: {len(stored)} in the checkpoint, {len(self.schedulers)} in this run"
            report.add(Fate.LOST, f"{text}; this run's are left as they are")
            return []
        return list(zip(self.schedulers, stored, strict=True)) if self.schedulers else []

    def _opened(self, source: Source) -> list[ReadablePath]:
        """Files that were read to plan the load; the first rank speaks for those that nobody copies from."""
        if dist.get_rank() == self.ranks[0]:
            return [source.root / file.path for file in source.files]
        return [source.root / file.path for file in source.files if file.path.endswith(METADATA_FILE)]


FSDP1, FSDP2 = "fsdp", "fsdp2"
"""What RLinf stores as ``fsdp_version`` (``rlinf/hybrid_engines/fsdp/utils.py``, ``FSDPVersion``)."""


@dataclass(frozen=True, slots=True)
class ShardedWorld:
    """The ranks of a model.

    Args:
        ranks: Global ranks, in order.
        layout: How it is cut, for people, and by which random states are told apart.
        version: What has wrapped it: :data:`FSDP1` or :data:`FSDP2`.
    """

    ranks: tuple[int, ...]
    layout: str
    version: str

    @classmethod
    def of(cls, module: torch.nn.Module) -> ShardedWorld:
        """Look at a model.

        Raises:
            UsageError: Nothing of it is sharded.
            Unsupported: FSDP1 has wrapped it in a way that is not supported.
        """
        flat = FlatParams.of(module).ranks()
        meshes = {param.device_mesh._get_root_mesh() for param in module.parameters() if isinstance(param, DTensor)}
        if not dist.is_initialized() or not (flat or meshes):
            raise UsageError(
                f"FsdpEngine: no parameter of this {type(module).__name__} is sharded\n"
                "Wrap it with fully_shard (or FSDP1) first; a model that is whole on every rank is a TorchEngine's."
            )
        ranks = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()} | set(flat)
        widest = max((tuple(mesh.mesh.shape) for mesh in meshes), key=len, default=(len(flat),))
        return cls(tuple(sorted(ranks)), f"FSDP{'×'.join(map(str, widest))}", FSDP1 if flat else FSDP2)


def check_same_model(ranks: RankGroup, look: Callable[[], ShardedModule]) -> None:
    """See that all ranks have the same model: each describes the parts of all others by its own. Collective.

    Args:
        ranks: All that the model is dealt out to.
        look: Gives this rank's tensors.

    Raises:
        Unsupported: RankGroup have other tensors, as under pipeline parallelism.
    """
    _, shapes = ranks.all_gather(look, lambda module: [(one.name, one.split.global_shape) for one in module.tensors])
    for rank, other in zip(ranks.ranks, shapes, strict=True):
        if other != shapes[0]:
            raise Unsupported(
                f"FsdpEngine: rank {rank} has other tensors than rank {ranks.ranks[0]}\n"
                "Every rank must hold a part of the same model; pipeline parallelism is not supported."
            )


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Failed:
    text: str


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks that a model is dealt out to, as a group.

    Args:
        ranks: Global ranks, in order.
        group: Their process group; None for that of all.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, ranks: tuple[int, ...]) -> RankGroup:
        """A group of these ranks, each of which calls."""
        whole = len(ranks) == dist.get_world_size()
        return cls(ranks, None if whole else dist.new_group(list(ranks), use_local_synchronization=True))

    def all_gather(self, action: Callable[[], T], tell: Callable[[T], object]) -> tuple[T, list[object]]:
        """Do something on every rank, and tell the others of it; what fails on one, fails on all. Collective.

        Args:
            action: What to do.
            tell: What the others hear of its result.

        Returns:
            The result, and what each rank described, in the order of the ranks.

        Raises:
            Unsupported: It failed on another rank.
        """
        failure: Exception | None = None
        described: object
        try:
            result = action()
            described = tell(result)
        except Exception as error:  # whatever it is, the others wait for this rank
            failure, described = error, _Failed(str(error) if isinstance(error, CheckpointError) else repr(error))
        everyone: list[object] = [None] * len(self.ranks)
        dist.all_gather_object(everyone, described, self.group)
        if failure is not None:
            raise failure
        for rank, other in zip(self.ranks, everyone, strict=True):
            if isinstance(other, _Failed):
                raise Unsupported(f"rank {rank}: {other.text}")
        return result, everyone
