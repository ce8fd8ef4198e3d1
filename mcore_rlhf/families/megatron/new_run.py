"""What a new Megatron checkpoint is, whichever of Megatron's formats it is in: its layout, arguments and random states, and the report
of what became of everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mcore_rlhf.core.account import Fate, Inventory, Item, Kind, Report, same
from mcore_rlhf.core.catalog import Catalog
from mcore_rlhf.core.dtype import DType, dtype_of
from mcore_rlhf.core.names import MASTER, TensorName
from mcore_rlhf.core.views import EITHER, FROM_MASTERS, Rows, StateOrder
from mcore_rlhf.errors import LayoutMismatch, Problems, UsageError
from mcore_rlhf.families.inventory import ELEMENTS, LEFT_OUT, OF_OPTIMIZER, state_items
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.layouts.padding import padded_vocab_size, repadded
from mcore_rlhf.layouts.parallel import ParallelConfig, least_dp
from mcore_rlhf.layouts.pipeline import PipelineSplit, chunks_in_option, split_from_option
from mcore_rlhf.models.megatron import OUTPUT
from mcore_rlhf.models.spec import ModelSpec
from mcore_rlhf.storage.torch_values import torch_dtype

from .arguments import DISTRIBUTED, Arguments, arguments_for, stored_arguments
from .folders import FileRank
from .groups import Membership
from .state import OF_RANKS, PER_RANK_KEYS, MegatronState, RankValues, RngMaker, saved_rng

_FULLY = "dist_ckpt_optim_fully_reshardable"
"""How Megatron-core's ``torch_dist`` stores the distributed optimizer; what we write loads at any layout."""
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
        report = source.notes.for_target()
        choices = _without_ranks(choose(source, family.args, options, report), family, options)
        if family.unknown and choices.parallel.tp > 1:
            raise LayoutMismatch(
                f"{len(family.unknown)} parameters are in no table, and with one tensor-parallel rank their copies cannot be "
                f"compared: {', '.join(family.unknown[:5])}\n"
                "Say how they are cut with --rules rules.yaml (pattern → replicated, column, row, …)."
            )
        return cls(source, family, choices, options, report, ckpt_format)

    @property
    def tracker(self) -> str:
        """The content of the tracker file."""
        return "release" if self.source.state.release else str(self.source.state.iteration)

    @property
    def iteration(self) -> int | None:
        """The iteration, None for a release."""
        return None if self.source.state.release else self.source.state.iteration

    @cached_property
    def view(self) -> Catalog:
        """The source's tensors as the target wants them."""
        from_masters = self.choices.dtype is not None and MASTER in self.source.states
        states = StateOrder(self.source.catalog, FROM_MASTERS if from_masters else EITHER)
        return Rows(states, self.source.model.with_vocabulary(self.choices.padded_vocab_size))

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
        if self.ckpt_format == "torch_dist" and self.choices.optimizer == DISTRIBUTED and _FULLY in new:
            new[_FULLY] = True
        if self.options.no_optimizer:
            new["no_save_optim"] = True  # what a run says that saved no optimizer
        if dtype is not None:
            new["params_dtype"] = torch_dtype(dtype.name)
        return new

    @cached_property
    def state_dtypes(self) -> Mapping[str, DType]:
        """Element types of the optimizer's states, as the first trained parameter has them."""
        first = next((spec.name for spec in self.source.model.params if spec.trainable), None)
        found: dict[str, DType] = {}
        for state in self.source.states if first is not None else ():
            entry = self.source.catalog.get(TensorName(self.source.role, str(first), state))
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

    def note(self) -> None:
        """Say what becomes of the vocabulary's padding, random states, masters, and of what only fits one layout."""
        self._note_arguments()
        self._note_vocabulary()
        self._note_rng()
        if self.choices.optimizer == DISTRIBUTED and MASTER not in self.source.states:
            self.report.add(Fate.DERIVED, "fp32 master parameters: copies of the fp32 parameters")
        if self.choices.dtype is not None:
            kept = MASTER in self.source.states and self.choices.optimizer is not None
            self.report.add(
                Fate.DERIVED if kept else Fate.LOST,
                f"parameters: converted to {self.choices.dtype}"
                + (" from their fp32 masters, which are kept" if kept else ""),
            )
        if any(key in shard.top for shard in self.family.shards for key in PER_RANK_KEYS) and not self.same_world:
            self.report.add(
                Fate.LOST,
                "rerun_state_machine: belongs to the ranks of the source; Megatron ignores it as well",
                *(OF_RANKS[key] for key in PER_RANK_KEYS),
            )
        if OUTPUT in self.source.model.unused and self.choices.parallel.pp == 1:
            self.report.add(
                Fate.NOTE, f"{OUTPUT}: left out; on one stage Megatron has no such weight, the embedding is tied"
            )
        self._note_batch()

    def _note_arguments(self) -> None:
        """Arguments that describe the layout are made true for the new one; the run itself changes those again as it starts."""
        old, new = self.source.state.args, self.arguments(None)
        changed = [Item(Kind.ARGUMENT, name) for name, value in old.items() if not same(new.get(name), value)]
        self.report.settle(Fate.DERIVED, "as a run at the new layout stores it", *changed)
        if self.choices.optimizer == DISTRIBUTED:
            scalars = [Item(Kind.OPTIMIZER, name) for name in self.family.scalars]
            self.report.settle(Fate.DERIVED, "the distributed optimizer counts it in its param groups", *scalars)

    def _note_vocabulary(self) -> None:
        """Say which rows of the embedding are new, or cut."""
        rows, new = self.source.model.padded_vocab_size, self.choices.padded_vocab_size
        if rows is None or new is None or rows == new:
            return
        if new > rows:
            text = f"vocabulary rows {rows}–{new - 1} are new padding and repeat row {rows - 1}, in every state; all others are kept"
        else:
            text = f"vocabulary rows {new}–{rows - 1} are padding that the new layout does not have, and are cut"
        self.report.add(Fate.CHANGED, text, ELEMENTS)

    def _note_rng(self) -> None:
        fates = {
            "keep": (Fate.KEPT, "RNG states of every rank")
            if self.rng.saved
            else (Fate.NOTE, "the source has no RNG states"),
            "derive": (
                Fate.DERIVED,
                "RNG states: seeded from the source's, since its ranks are not those of the new layout",
            ),
            "drop": (Fate.LOST, "RNG states: fresh ones from args.seed, as --rng drop asks"),
        }
        if not self.family.shards:
            fates["drop"] = (
                Fate.DERIVED,
                "RNG states: fresh ones from args.seed, since Megatron did not write the source",
            )
        self.report.add(*fates[self.choices.rng], *([] if self.choices.rng == "keep" else [Item(Kind.RNG)]))

    def _note_batch(self) -> None:
        """Megatron asserts that the global batch divides into micro-batches of all data-parallel ranks."""
        args = self.family.args
        micro, batch = args.optional("micro_batch_size"), args.optional("global_batch_size")
        dp = self.choices.parallel.dp
        if micro and batch and batch % (micro * dp):
            self.report.add(
                Fate.NOTE,
                f"global_batch_size {batch} is not a multiple of micro_batch_size {micro} × DP {dp}: Megatron will want another --dp, "
                "or other batch sizes",
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


_DEFAULT_DIVISOR = 128  # Megatron's own default for --make-vocab-size-divisible-by


@dataclass(frozen=True, slots=True)
class NewLayout:
    """The layout of a new Megatron checkpoint.

    Args:
        parallel: Degrees.
        split: How layers are dealt to stages.
        padded_vocab_size: Rows of the embedding, or None where the model has no embedding.
        dtype: New element type of the parameters, or None to keep it.
        optimizer: ``distributed``, ``plain`` or None.
        rng: ``keep``, ``derive`` or ``drop``.
    """

    parallel: ParallelConfig
    split: PipelineSplit
    padded_vocab_size: int | None
    dtype: DType | None
    optimizer: str | None
    rng: str


def choose(source: Source, args: Arguments, options: WriteOptions, report: Report) -> NewLayout:
    """Decide the layout; what the user did not say is kept from the source, and what follows from it is reported.

    Raises:
        CheckpointError: It contradicts itself or does not fit the model.
    """
    parallel = choose_parallel(source, options, report)
    split = _choose_split(source, args, options, parallel, report)
    parallel = replace(parallel, pipeline_layout=split.layout)
    _check_heads(args, parallel)
    rng = options.rng or ("keep" if same_coordinates(source.parallel, parallel) else "derive")
    if rng == "keep" and not same_coordinates(source.parallel, parallel):
        raise UsageError(
            f"--rng keep: the RNG states of {source.parallel} belong to its ranks, and {parallel} has others\n"
            "Use --rng derive (the default for a changed layout) or --rng drop."
        )
    return NewLayout(
        parallel, split, choose_rows(source.model, source.parallel, args, options, parallel.tp, report),
        _choose_dtype(source, options), _choose_optimizer(source, options, report), rng,
    )  # fmt: skip


def same_coordinates(a: ParallelConfig, b: ParallelConfig) -> bool:
    """Whether two layouts have the same model-parallel ranks, so that what belongs to a rank can stay with it."""
    return (a.tp, a.pp, a.ep, a.etp) == (b.tp, b.pp, b.ep, b.etp)


def choose_parallel(source: Source, options: WriteOptions, report: Report) -> ParallelConfig:
    """The new degrees: as asked, otherwise the source's."""
    old = source.parallel
    tp, pp = options.tp or old.tp, options.pp or old.pp
    moe = source.model.num_experts > 0
    if not moe and ((options.ep or 1) > 1 or (options.etp or tp) != tp):
        raise UsageError("--ep and --etp are for models with experts, and this model has none")
    ep = options.ep or old.ep
    etp = options.etp or (tp if old.etp == old.tp else old.etp) if moe else tp
    if moe and source.model.num_experts % ep:
        raise LayoutMismatch(f"--ep {ep}: {source.model.num_experts} experts cannot be divided equally over {ep} ranks")
    vpp = options.vpp or _vpp_of_layout(options, pp) or (old.vpp if pp > 1 else 1)
    if vpp > 1 and pp == 1:
        raise UsageError(f"--vpp {vpp}: virtual pipeline stages need more than one pipeline stage (--pp)")
    if vpp != old.vpp and options.vpp is None:
        report.add(Fate.CHANGED, f"virtual pipeline stages: {old.vpp} → {vpp}, since there is one pipeline stage")
    dp = options.dp or _default_dp(old, tp, pp, ep, etp, report)
    return ParallelConfig(tp, pp, vpp, old.cp, ep, etp, dp)


def _vpp_of_layout(options: WriteOptions, pp: int) -> int | None:
    """Model chunks per stage that ``--pipeline-layout`` implies, where it says a whole number of them."""
    if options.pipeline_layout is None:
        return None
    chunks, rest = divmod(chunks_in_option(options.pipeline_layout), pp)
    return None if rest else chunks


def _default_dp(old: ParallelConfig, tp: int, pp: int, ep: int, etp: int, report: Report) -> int:
    model_ranks = tp * pp * old.cp
    dp, rest = divmod(old.world_size, model_ranks)
    if dp and not rest and (tp * old.cp * dp) % (etp * ep) == 0:
        why = f"the source's {old.world_size} ranks ÷ {model_ranks}"
    else:
        dp = least_dp(tp, old.cp, ep, etp)
        why = f"the smallest that fits, since {old.world_size} ranks do not divide into TP {tp} × PP {pp} × CP {old.cp}"
    if dp != old.dp:
        report.add(Fate.CHANGED, f"data-parallel size: {old.dp} → {dp} ({why})")
    return dp


def _choose_split(
    source: Source, args: Arguments, options: WriteOptions, parallel: ParallelConfig, report: Report
) -> PipelineSplit:
    model = source.model
    if options.pipeline_layout is not None:
        return split_from_option(options.pipeline_layout, model.num_layers, parallel.pp, parallel.vpp, model.mtp_layers)
    old = args.pipeline_split
    if (parallel.pp, parallel.vpp) == (source.parallel.pp, source.parallel.vpp) or old.even:
        return old
    if parallel.pp == 1:
        new = PipelineSplit()
    else:
        new = PipelineSplit(count_embedding=old.count_embedding, count_loss=old.count_loss)
    if new != old:
        report.add(Fate.CHANGED, f"pipeline split: {_describe(old)} → {_describe(new)}")
    return new


def _describe(split: PipelineSplit) -> str:
    parts = [f"layout {split.layout}"] if split.layout else []
    parts += [f"first stage {split.first}"] if split.first is not None else []
    parts += [f"last stage {split.last}"] if split.last is not None else []
    parts += ["embedding counted"] if split.count_embedding else []
    parts += ["loss counted"] if split.count_loss else []
    return ", ".join(parts) or "even"


def _check_heads(args: Arguments, parallel: ParallelConfig) -> None:
    """The divisions that Megatron's attention asserts.

    Source: megatron-core 0.16.1, ``transformer/attention.py`` (``Attention.__init__``): with more tensor-parallel ranks
    than query groups, several ranks share a group.
    """
    heads = args.optional("num_attention_heads")
    problems = Problems()
    advice = "Choose a --tp that divides the heads, and divides the query groups or is a multiple of them."
    if heads is not None and heads % parallel.tp:
        problems.add(LayoutMismatch, f"--tp {parallel.tp}: {heads} attention heads cannot be divided equally", advice)
    groups = args.integer("num_query_groups", 1) if args.flag("group_query_attention") else 0
    if groups and groups % parallel.tp and parallel.tp % groups:
        problems.add(LayoutMismatch, f"--tp {parallel.tp}: {groups} query groups cannot be shared out", advice)
    problems.raise_if_any()


def choose_rows(
    model: ModelSpec, old: ParallelConfig, args: Arguments, options: WriteOptions, tp: int, report: Report
) -> int | None:
    """Rows of the new embedding: Megatron's own rule, or what the user says.

    Raises:
        UsageError: The true vocabulary is not known and decides, or the size that was given does not fit.
    """
    rows = model.padded_vocab_size
    if rows is None:
        return None
    divisor = args.integer("make_vocab_size_divisible_by", _DEFAULT_DIVISOR) or _DEFAULT_DIVISOR
    words = options.vocab_size or _trusted_words(model, args, divisor, old.tp, rows, report)
    if options.padded_vocab_size is not None:
        new = options.padded_vocab_size
    elif tp == old.tp and options.vocab_size is None:
        new = rows
    elif words is not None:
        new = padded_vocab_size(words, divisor, tp)
    else:
        known = repadded(rows, divisor, old.tp, tp)
        if known is None:
            raise UsageError(
                f"the padded vocabulary has {rows} rows at TP {old.tp}; how many it has at TP {tp} depends on the true size, "
                "which args do not store\nGive --vocab-size (words of the tokenizer) or --padded-vocab-size (rows to write)."
            )
        new = known
    _check_rows(rows, new, words, tp)
    return new


def _trusted_words(model: ModelSpec, args: Arguments, divisor: int, tp: int, rows: int, report: Report) -> int | None:
    """The true vocabulary, unless Megatron's rule would not have made the stored rows of it: then it decides nothing."""
    words = model.vocab_size
    if words is None or words != args.vocab_size or padded_vocab_size(words, divisor, tp) == rows:
        return words
    report.add(
        Fate.NOTE,
        f"args.vocab_size would be padded to {padded_vocab_size(words, divisor, tp)} rows at TP {tp}, the files have {rows}",
    )
    return None


def _check_rows(rows: int, new: int, words: int | None, tp: int) -> None:
    if new % tp:
        raise UsageError(f"a padded vocabulary of {new} rows cannot be divided over {tp} tensor-parallel ranks")
    if words is not None and words > rows:
        raise UsageError(f"a vocabulary of {words} words does not fit the {rows} rows that the checkpoint has")
    if words is not None and new < words:
        raise UsageError(f"--padded-vocab-size {new} would cut words: the vocabulary has {words}")


def _choose_dtype(source: Source, options: WriteOptions) -> DType | None:
    if options.dtype is None:
        return None
    try:
        wanted = dtype_of(options.dtype)
    except ValueError as error:
        raise UsageError(f"--dtype: {error}") from None
    if wanted.name not in ("float32", "bfloat16", "float16"):
        raise UsageError(f"--dtype {wanted}: Megatron trains in float32, bfloat16 or float16")
    current = {spec.dtype for spec in source.model.params if spec.trainable}
    return None if current == {wanted} else wanted


def _choose_optimizer(source: Source, options: WriteOptions, report: Report) -> str | None:
    if options.no_optimizer:
        if options.optimizer:
            raise UsageError("--no-optimizer and --optimizer contradict each other")
        report.add(Fate.LOST, LEFT_OUT, *OF_OPTIMIZER)
        return None
    if options.optimizer and source.optimizer is None:
        raise UsageError(f"--optimizer {options.optimizer}: the source has no optimizer state")
    if options.optimizer and options.optimizer != source.optimizer:
        report.add(
            Fate.CHANGED,
            f"optimizer: {source.optimizer} → {options.optimizer}; param groups are dealt as Megatron derives them",
        )
    return options.optimizer or source.optimizer
