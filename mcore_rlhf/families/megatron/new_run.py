"""What a new Megatron checkpoint is, whichever of Megatron's formats it is in: its arguments and random states, and the report of
what became of everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.catalog import BFLOAT16, FLOAT32, MASTER, PARAM, DType, TensorName
from mcore_rlhf.core.chunks import Chunks
from mcore_rlhf.core.facts import Inventory, Kind
from mcore_rlhf.core.shares import EITHER, FROM_MASTERS
from mcore_rlhf.errors import LayoutMismatch, Lossy, UsageError
from mcore_rlhf.families.inventory import state_items
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.storage.torch_values import torch_dtype

from .arguments import BY_LAYOUT, DISTRIBUTED, LAYER_WISE, Arguments, arguments_for, stored_arguments
from .complete import refuse_part
from .folders import FileRank
from .groups import CLASSES, Membership, without_classes
from .new_layout import NewLayout, choose, same_coordinates
from .remainders import has_remainders, kept_remainders
from .schedule import counted_as
from .state import LAID_OUT, SCHEDULER_KEYS, MegatronState, RankValues, RngMaker, saved_rng

_PRECISE = "use_precision_aware_optimizer"
_OF_PRECISE = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Without that optimizer Megatron wants them to be fp32. Source: megatron-core 0.19.2, ``optimizer/optimizer_config.py``."""
_FSDP = ("use_megatron_fsdp", "use_torch_fsdp2")
"""Runs with the first load ``fsdp_dtensor`` alone, those with the second not Megatron's ``torch`` format."""
_FULLY = "dist_ckpt_optim_fully_reshardable"
"""How Megatron-core's ``torch_dist`` stores the distributed optimizer: what we write loads at any layout, unless the user wants another."""
RngStates = Sequence[Mapping[str, object]]


@dataclass
class NewRun:
    """A checkpoint that is to be written.

    Args:
        source: What it is made of.
        family: Megatron's view of the source.
        choices: The new layout.
        options: What the user asked for.
        report: Told what becomes of everything.
        ckpt_format: Megatron's name of the format: ``torch`` or ``torch_dist``.
    """

    source: Source
    family: MegatronState
    choices: NewLayout
    options: WriteOptions
    report: Report
    ckpt_format: str = "torch"

    @classmethod
    def of(cls, source: Source, options: WriteOptions, to: str, ckpt_format: str) -> NewRun:
        """Decide the layout of the checkpoint that holds what a source has.

        Args:
            source: An opened checkpoint.
            options: What the user asked for.
            to: What the command line calls the target's format.
            ckpt_format: What Megatron calls it.

        Raises:
            CheckpointError: It cannot be done.
        """
        family = MegatronState.needed(source, to)
        refuse_part(source, family.args, to)
        choices = _without_ranks(choose(source, family.args, options), family, options)
        if family.unknown and choices.parallel.tp > 1:
            raise LayoutMismatch(
                f"{len(family.unknown)} parameters are in no table, and with one tensor-parallel rank their copies cannot be "
                f"compared: {', '.join(family.unknown[:5])}\n"
                "Say how they are cut with --rules rules.yaml (pattern → replicated, column, row, …)."
            )
        _check_own_copies(source, choices.parallel.tp, ckpt_format)
        report = source.notes.for_target()
        parts = options.run_of.parts
        by_steps = parts is not None and parts.scheduler != SCHEDULER_KEYS[0]
        source = counted_as(source, options.global_batch_size, report, by_steps=by_steps)
        if ckpt_format == "torch_dist":
            report.through(CLASSES, source.state.groups)
            source = replace(source, state=replace(source.state, groups=without_classes(source.state.groups)))
        return cls(source, family, choices, options, report, ckpt_format)

    @property
    def sharding(self) -> str:
        """How ``torch_dist`` has a distributed optimizer's states: as asked, or as the trainer's loader takes them, or for any layout."""
        parts = self.options.run_of.parts
        usual = parts.sharding if parts is not None and self.choices.optimizer == DISTRIBUTED else "fully_reshardable"
        return self.options.optimizer_sharding or usual

    @property
    def tracker(self) -> str:
        """The content of the tracker file."""
        return "release" if self.iteration is None else str(self.iteration)

    @property
    def iteration(self) -> int | None:
        """The iteration that the files say, None for a release."""
        if self.source.state.release:
            return None
        return self.source.state.iteration if self.options.run_of.counts else 0

    @cached_property
    def view(self) -> Chunks:
        """The source's tensors as the target wants them."""
        from_masters = self.choices.dtype is not None and MASTER in self.source.states
        stored = kept_remainders(self.source.catalog) if self.keeps_remainders else self.source.catalog
        states = stored.states(FROM_MASTERS if from_masters else EITHER)
        return states.rows(self.source.model.with_vocabulary(self.choices.padded_vocab_size))

    @cached_property
    def had_remainders(self) -> bool:
        """Whether a precision-aware optimizer stored remainders in the place of the masters."""
        return self.source.computed is not None and has_remainders(self.source)

    @property
    def keeps_remainders(self) -> bool:
        """Whether the target has them too: in flat buckets Megatron keeps their type, and elsewhere it cannot load what it wrote.

        Source: megatron-core 0.19.2, ``optimizer/distrib_optimizer.py`` (``load_parameter_state_from_dp_reshardable``; what
        ``load_parameter_state_from_dp_zero`` and ``…_from_fully_reshardable`` hand on is fp32); Transformer Engine 2.9,
        ``pytorch/optimizers/fused_adam.py`` (``set_scaled_state``, which asserts 16-bit integers).
        """
        in_buckets = self.ckpt_format == "torch_dist" and self.sharding == "dp_reshardable"
        kept = self.choices.optimizer == DISTRIBUTED and self.choices.dtype in (None, BFLOAT16)
        return in_buckets and kept and self.had_remainders

    @property
    def needs(self) -> str:
        """For which runs the masters are as they are written, in brackets; empty where any run takes them."""
        args = Arguments(self.arguments(None))
        if self.choices.optimizer != DISTRIBUTED or MASTER not in self.source.states:
            return ""
        if self.keeps_remainders:
            return " (for runs with --use-precision-aware-optimizer and Transformer Engine from 2.1 on)"
        if self.had_remainders:
            return " (for runs without --use-precision-aware-optimizer; MegatronEngine takes it with it, too)"
        if args.flag(_PRECISE) and not args.has_narrow_params and not args.flag("optimizer_cpu_offload"):
            return " (for runs that keep fp32 masters: store_param_remainders off, or Transformer Engine before 2.1)"
        return ""

    @property
    def membership(self) -> Membership:
        """Decides which param group a parameter is in."""
        return Membership(self.family.args, self.options.rules)

    @cached_property
    def same_ranks(self) -> bool:
        """Whether what belongs to a rank can stay with it."""
        return bool(self.family.shards) and same_coordinates(self.source.parallel, self.choices.parallel)

    @property
    def same_world(self) -> bool:
        """Whether all ranks stay what they are."""
        return self.same_ranks and self.source.parallel.world_size == self.choices.parallel.world_size

    def shard_of(self, at: FileRank) -> RankValues:
        """The source's rank that has the same folder."""
        return next(shard for shard in self.family.shards if shard.at.folder == at.folder)

    def arguments(self, at: FileRank | None) -> dict[str, object]:
        """The arguments of a rank; for None those that all ranks share."""
        if not self.source.state.args:
            return {}
        dtype, old, rank = self.choices.dtype, self.source.state.args, None if at is None else at.rank
        if at is not None and self.same_world:
            own = stored_arguments(self.shard_of(at).top)
            old, rank = (own, None) if own else (old, rank)
        new = arguments_for(
            old, self.choices.parallel, self.choices.split, rank=rank,
            padded_vocab_size=self.choices.padded_vocab_size, params_dtype=dtype, optimizer=self.choices.optimizer,
            ckpt_format=self.ckpt_format,
        )  # fmt: skip
        if self.ckpt_format == "torch_dist" and self.choices.optimizer in (DISTRIBUTED, LAYER_WISE) and _FULLY in new:
            new[_FULLY] = self.sharding != "dp_reshardable"
        if self.choices.optimizer == LAYER_WISE and self.family.by_size and BY_LAYOUT in new:
            new[BY_LAYOUT] = False
        new.pop(LAID_OUT, None)
        new.update(self.options.run_of.arguments)
        for wrapped in _FSDP:
            if new.get(wrapped):
                new[wrapped] = False
        if new.get(_PRECISE) and self.had_remainders and not self.keeps_remainders:
            new[_PRECISE] = False  # masters are written whole: who takes them for remainders has others
            new.update({name: _single(new[name]) for name in _OF_PRECISE if name in new})
        if self.options.no_optimizer:
            new["no_save_optim"] = True  # what a run says that saved no optimizer
        if dtype is not None:
            new["params_dtype"] = torch_dtype(dtype.name)
        return new

    @cached_property
    def states_of(self) -> Mapping[str, tuple[str, ...]]:
        """The optimizer's states of every parameter, without the masters: Muon keeps others than Adam beside it."""
        found: dict[str, list[str]] = {}
        for name in self.source.catalog:
            if name.state not in (PARAM, MASTER):
                found.setdefault(name.param, []).append(name.state)
        return {param: tuple(states) for param, states in found.items()}

    @cached_property
    def state_dtypes(self) -> Mapping[str, DType]:
        """Element types of the optimizer's states, as the first parameter that has them has them."""
        first = {MASTER: next((spec.name for spec in self.source.model.params if spec.trainable), None)}
        for param, states in reversed(list(self.states_of.items())):
            first.update(dict.fromkeys(states, param))
        found: dict[str, DType] = {}
        for state in self.source.states:
            entry = self.source.catalog.get(TensorName(self.source.role, str(first.get(state)), state))
            if entry is not None:
                found[state] = entry.dtype
        return found

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the optimizer's states, without the masters."""
        return tuple(state for state in self.source.states if state != MASTER)

    @cached_property
    def rng(self) -> RngMaker:
        """Maker of random states."""
        saved = saved_rng(self.family.shards[0]) if self.family.shards else []
        seed = self.family.args.integer("seed", 1234)
        return RngMaker(saved[0] if saved else None, self.source.state.iteration, seed)

    def rng_states(self, at: FileRank) -> RngStates | None:
        """One state, or one per data-parallel rank in a run with ``--data-parallel-random-init``; None to store none."""
        wanted = self.choices.parallel.dp if self.family.args.flag("data_parallel_random_init") else 1
        kept = saved_rng(self.shard_of(at))[:wanted] if self.choices.rng == "keep" else []
        if self.choices.rng == "keep" and not kept:
            return None
        make = self.rng.fresh if self.choices.rng == "drop" else self.rng.derived
        return [*kept, *(make(at, dp_rank) for dp_rank in range(len(kept), wanted))]

    def holds(self) -> Inventory:
        """Everything that is carried, with its value."""
        state = replace(self.source.state, args=self.arguments(None))
        kept = {**self.family.inventory(), **dict(state_items(state))}
        if self.choices.rng != "keep":
            kept = {item: value for item, value in kept.items() if item.kind is not Kind.RNG}
        return kept

    @property
    def own_rng_ranks(self) -> int:
        """Data-parallel ranks that have random states of their own in the target."""
        if self.ckpt_format != "torch":
            return self.choices.parallel.dp * self.choices.parallel.cp
        # one for each folder, of which expert-parallel ranks have their own
        return (
            self.choices.parallel.dp if self.family.args.flag("data_parallel_random_init") else self.choices.parallel.ep
        )


def _single(value: object) -> object:
    """fp32, as an argument says it: by its name, or as torch's type."""
    return "fp32" if isinstance(value, str) else torch_dtype(FLOAT32.name)


def _check_own_copies(source: Source, tp: int, ckpt_format: str) -> None:
    """Copies that drifted apart cannot become one, nor can one become several; ``torch_dist`` has one.

    Raises:
        Lossy: The target has another number of them.
    """
    names, old = [spec.name for spec in source.model.params if spec.partition.own_copies], source.parallel.tp
    if names and (tp != old or ckpt_format == "torch_dist"):
        place = f"TP {tp}" if tp != old else "torch_dist"
        raise Lossy(
            f"{len(names)} parameters, such as {names[0]}, have {old} copies that differ, one for each tensor-parallel rank, as Megatron "
            f"trains them without sequence parallelism; {place} has no place for them\nKeep --to megatron and --tp {old}, or take rank "
            "0's: --rules with the pattern '*.out_norm.weight' and the partition 'replicated', and --trust-replicas."
        )


def _without_ranks(choices: NewLayout, family: MegatronState, options: WriteOptions) -> NewLayout:
    """Files that Megatron did not write have no ranks whose RNG could be kept, or derived from.

    Raises:
        UsageError: It was to be kept.
    """
    if family.shards:
        return choices
    if options.rng == "keep":
        raise UsageError(
            "--rng keep: the source has no RNG states of Megatron's\nLeave it out: fresh ones are written."
        )
    return replace(choices, rng="drop")
