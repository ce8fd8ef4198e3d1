"""The engine of a Megatron-core trainer."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from mcore_rlhf.engines.stateful import torch_values
from mcore_rlhf.errors import CheckpointError, Lossy, Unsupported
from mcore_rlhf.families.megatron.folders import TRACKER, FileRank, locate
from mcore_rlhf.families.megatron.state import LAID_OUT, NAMES, RngMaker, RngState
from mcore_rlhf.families.options import ReadOptions
from mcore_rlhf.families.source import TrainingState
from mcore_rlhf.formats.megatron import FORMAT
from mcore_rlhf.formats.registry import open_checkpoint
from mcore_rlhf.storage.stored import NAMESPACES, Namespace, Stub

from ..base import Engine, HasRng, LiveFile, LiveState, LoadRequest
from ..load import Load
from ..save import MemoryRanges
from ..until_step import UntilStep
from .arguments import described
from .by_size import BySize
from .files import Counting, LiveFiles
from .load import LocalPart, MegatronHooks, MegatronMatching, MegatronStored
from .model import LiveModel
from .optimizers import ChainMember, is_laid_out, is_whole, members
from .own_files import OwnFiles
from .parallel_state import ParallelRank, current_rank
from .whole import WholeOptimizer, fits, lies_by_size

Arguments = argparse.Namespace | Mapping[str, object]
Further = Mapping[str, object]


class MegatronEngine:
    """A live Megatron-core trainer as a source and a target of checkpoints; every rank makes one.

    Args:
        chunks: Model chunks of this rank, in Megatron's DDP or bare; several with virtual pipeline stages.
        optimizer: Megatron's optimizer (plain, distributed or chained); None for a frozen model, which is saved as
            weights alone.
        scheduler: Megatron's ``OptimizerParamScheduler``, or None.
        args: Megatron-LM's ``args``, stored in every model file so that Megatron-LM and the converter can read it. A
            mapping (``{"vocab_size": …, "consumed_train_samples": …}``) adds to what the live objects tell, for trainers
            without such ``args``. A function that gives either is called at each save, for the counters of the moment.
        further: More top-level values of the model file, such as ``num_floating_point_operations_so_far``, or a function
            that gives them.

    Attributes:
        loaded: What the checkpoint that was loaded holds besides tensors.
        loaded_args: The stored ``args`` of the checkpoint that was loaded, by name (``consumed_train_samples``, …),
            without those that are objects of Megatron's.
        loaded_iteration: Its iteration; 0 for a release.

    Raises:
        Unsupported: Megatron's ``torch`` format cannot hold the layout.
        UsageError: There is no model.
    """

    def __init__(
        self,
        chunks: torch.nn.Module | Sequence[torch.nn.Module],
        optimizer: Any | None = None,
        scheduler: Any | None = None,
        *,
        args: Arguments | Callable[[], Arguments] | None = None,
        further: Further | Callable[[], Further] | None = None,
    ) -> None:
        self.model = LiveModel.of(chunks)
        self.optimizer = optimizer
        self.chain = members(optimizer)
        self.scheduler = scheduler
        self.place: ParallelRank = current_rank(len(self.model.chunks), moe=self.model.num_experts > 0)
        self.place.check()
        self._args, self._further = args, further
        self.loaded: TrainingState | None = None
        self.loaded_args: dict[str, object] = {}
        self.loaded_iteration = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks: Megatron's groups span the whole world."""
        return tuple(range(dist.get_world_size()))

    @property
    def layout(self) -> str:
        """How the model is cut: ``TP2×PP1×DP4``."""
        return str(self.place.parallel)

    def live(self, step: int) -> LiveState:
        """Describe Megatron's own files of an iteration.

        Args:
            step: The iteration.
        """
        self.model.gather_parameters()
        by_size = BySize.of(self.place, self.model, self.chain)
        files = LiveFiles(self.place, self.model, self.chain, step, by_size)
        found: list[LiveFile] = []
        if self.place.writes_model:
            args = self._current_args()
            fresh = self._fresh(args) if self.optimizer is None and self.scheduler is None else None
            found.append(files.model_file({"args": Namespace(args)}, self._after(step, args), fresh))
        whole = MemoryRanges.of(found, files.trees)
        found += [*files.optimizer_files(), *files.layer_wise_files()]
        texts = {TRACKER: str(step)} if self.place.rank == self.ranks[0] else {}
        memory = MemoryRanges.of(found, files.trees)
        for tensor in files.converted:
            memory.put(tensor)
        alive = Counting(self.place, self.model, self.chain, self.optimizer, whole, memory).state_tensors()
        return LiveState(FORMAT.name, self.layout, tuple(found), texts, tuple(alive))

    def until_step(self) -> UntilStep | None:
        """See :class:`~..until_step.Steps`; parameters that are gathered late are, by now: see :meth:`.LiveModel.gather_parameters`."""
        return UntilStep.of([chunk.module for chunk in self.model.chunks], self.optimizer)

    def prepare_load(self, request: LoadRequest) -> Load[LocalPart]:
        """Open a checkpoint of any format that is known, check that it fits this rank, and plan the load.

        On an unchanged layout the rank opens its own files only.

        Raises:
            CheckpointError: It does not fit: all differences, with shapes.
        """
        chain = self.chain if request.optimizer else ()
        whole: WholeOptimizer | None = None
        if is_whole(chain):
            load, stored, whole = self._whole_load(request)
        else:
            load, stored = self._load(request, chain)

        def done() -> None:
            self.loaded = stored.state
            args = stored.state.args
            self.loaded_args = {name: value for name, value in args.items() if not isinstance(value, Stub)}
            self.loaded_iteration = stored.state.iteration

        hooks = MegatronHooks(
            load.root, self.model, self.chain, request.optimizer, self.scheduler, stored, load.report, done, whole
        )
        return load.checked(hooks)

    def _load(
        self, request: LoadRequest, chain: Sequence[ChainMember | None]
    ) -> tuple[Load[LocalPart], MegatronStored]:
        if FORMAT.detect(request.folder):
            located = locate(request.folder, request.step)
            own = OwnFiles.find(located, self.place, self.model, bool(chain))
            if own is not None and (not chain or not own.args.layer_wise):
                loaded = own.load(self.model, chain, self.place.parallel)
                if loaded is not None:
                    return loaded
        return self._through_a_plan(request, chain)

    def _through_a_plan(
        self, request: LoadRequest, chain: Sequence[ChainMember | None]
    ) -> tuple[Load[LocalPart], MegatronStored]:
        options = ReadOptions(role=request.role, step=request.step, optimizer=bool(chain))
        try:
            source = open_checkpoint(request.folder, options)
        except CheckpointError as error:
            by_optimizer = isinstance(error, Lossy) or "--no-optimizer" in str(error)
            advice = "\nIn a live run: load(optimizer=False)." if by_optimizer else ""
            raise type(error)(f"{error}{advice}") from error
        return MegatronMatching(source, self.place, self.model, chain).load()

    def _whole_load(self, request: LoadRequest) -> tuple[Load[LocalPart], MegatronStored, WholeOptimizer | None]:
        """For a chain of several kinds: this rank's own files, whole; and where they are another layout's or format's, a plan.

        Raises:
            Unsupported: No plan can move the states of an optimizer that is not known.
        """
        own = None
        if FORMAT.detect(request.folder):
            own = OwnFiles.find(locate(request.folder, request.step), self.place, self.model, optimizer=False)
        if own is not None and fits(own, self.place, self.chain):
            weights = own.load(self.model, (), self.place.parallel)
            assert weights is not None  # masters are of the optimizer
            load, stored = weights
            whole = WholeOptimizer.find(own, self.place, self.model, self.chain, load.plan.problems)
            if whole is not None:
                load = replace(load, opened=[*load.opened, *whole.files])
            return load, stored, whole
        if unknown := [member.label for member in self.chain if member is not None and member.opaque]:
            raise Unsupported(
                f"{request.folder}: {', '.join(unknown)}: states are kept whole, rank by rank, and resume at the layout that was "
                f"saved; this run is {self.place.parallel}\n"
                "Go on at that layout, or load the weights alone: load(optimizer=False)."
            )
        if own is not None and lies_by_size(own, self.place):
            dealt = OwnFiles.find(own.located, self.place, self.model, optimizer=True)
            assert dealt is not None  # as it was without the optimizer's files
            loaded = dealt.load(self.model, self.chain, self.place.parallel)
            if loaded is not None:
                return (*loaded, None)
        return (*self._through_a_plan(request, self.chain), None)

    def rng_states(self) -> dict[str, torch.Tensor]:
        """The states of Megatron's RNG tracker by name, copies on the CPU."""
        return tracker_states()

    def set_rng_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Restore what :meth:`rng_states` gave."""
        set_tracker_states(states)

    def derived_rng(self, first: Mapping[str, object], step: int) -> Mapping[str, object]:
        """Random states of this rank for a layout that was not saved: equal within a tensor-parallel group, apart from
        the tracker's model-parallel state.
        """
        apart = bool(self._current_args().get("data_parallel_random_init"))
        dp_rank = self.place.at.dp_rank if apart else 0
        return derived_state(first, step, self.place.file_rank, dp_rank)

    def _current_args(self) -> dict[str, object]:
        args = self._args() if callable(self._args) else self._args
        dealt = {LAID_OUT: True} if is_laid_out(self.chain) else {}
        if isinstance(args, NAMESPACES):
            return {**vars(args), **dealt}
        return {**described(self.model, self.chain, self.place), **(args or {}), **dealt}

    def _after(self, step: int, args: Mapping[str, object]) -> dict[str, object]:
        further = self._further() if callable(self._further) else self._further
        after: dict[str, object] = {}
        if self.scheduler is not None:
            after["opt_param_scheduler"] = self.scheduler.state_dict()
        return {**after, "rng_state": self._rng_list(step, args), **(further or {})}

    def _rng_list(self, step: int, args: Mapping[str, object]) -> list[object]:
        """This rank's state; where every data-parallel rank draws its own numbers, derived ones for the others as well.

        The manager keeps the true states of all ranks in a file of its own; Megatron would gather them here.
        """
        own, (_, *others) = megatron_state(), self._drawing(args)
        return [own, *(torch_values(RngMaker(own, step, 0).derived(self.place.file_rank, other)) for other in others)]

    def _fresh(self, args: Mapping[str, object]) -> list[object]:
        """The same at every step: the states of a start."""
        seed = args.get("seed")
        maker = RngMaker(megatron_state(), 0, seed if type(seed) is int else 0)
        return [torch_values(maker.fresh(self.place.file_rank, one)) for one in self._drawing(args)]

    def _drawing(self, args: Mapping[str, object]) -> range:
        """The data-parallel ranks that have states of their own in the file."""
        return range(self.place.parallel.dp if args.get("data_parallel_random_init") else 1)


if TYPE_CHECKING:

    def _keeps_the_seam(engine: MegatronEngine) -> tuple[Engine, HasRng]:
        return engine, engine


def tracker_states() -> dict[str, torch.Tensor]:
    """Copies of the tracker's states by name, on the CPU."""
    return {name: _tensor(state) for name, state in get_cuda_rng_tracker().get_states().items()}


def set_tracker_states(states: Mapping[str, torch.Tensor]) -> None:
    """Restore what :func:`tracker_states` gave."""
    tracker = get_cuda_rng_tracker()
    live = tracker.get_states()
    if any(isinstance(state, torch.Generator) for state in live.values()):  # CUDA graphs hold on to the generators
        for name, generator in live.items():
            generator.set_state(states[name])
        return
    tracker.set_states({name: state.clone() for name, state in states.items()})


def megatron_state() -> RngState:
    """All RNG states of this rank, as ``rng_state[0]`` of the model file holds them.

    Sources: Megatron-LM core_v0.16.1, ``megatron/training/checkpointing.py`` (``get_rng_state``); megatron-core 0.16.1,
    ``tensor_parallel/random.py``.
    """
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tracker_states(),
    }


def derived_state(first: Mapping[str, object], step: int, at: FileRank, dp_rank: int) -> dict[str, object]:
    """States of this rank for a layout that was not saved, under the manager's names.

    Args:
        first: What was saved of rank 0, under the manager's names.
        step: The step that was loaded; goes into the seeds.
        at: This rank.
        dp_rank: Its data-parallel rank in runs whose data-parallel ranks draw differently, otherwise 0.
    """
    saved = {NAMES[name]: value for name, value in first.items() if name in NAMES and value is not None}
    made = torch_values(RngMaker(saved, step, seed=0).derived(at, dp_rank))
    return {name: made[theirs] for name, theirs in NAMES.items()}


def _tensor(state: object) -> torch.Tensor:
    """Of a tracker that keeps generators instead of their states (CUDA graphs), the state."""
    tensor = state.get_state() if isinstance(state, torch.Generator) else state
    assert isinstance(tensor, torch.Tensor)
    return tensor.detach().to("cpu", copy=True)
