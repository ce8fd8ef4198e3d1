"""The layout of a new Megatron checkpoint: what the user asked for, what the source has, and what follows from both."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mcore_rlhf.core.catalog import EXP_AVG, MASTER, DType, dtype_of
from mcore_rlhf.errors import LayoutMismatch, Problems, Unsupported, UsageError
from mcore_rlhf.families.module import config_in
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.source import Source
from mcore_rlhf.layouts.parallel import ParallelConfig, least_dp
from mcore_rlhf.layouts.pipeline import PipelineSplit, chunks_in_option, model_chunks, split_from_option
from mcore_rlhf.layouts.tensor import padded_vocab_size, repadded
from mcore_rlhf.models.huggingface.texts import text_of
from mcore_rlhf.models.hybrid import STAGE, heads_to_divide

from .arguments import DISTRIBUTED, LAYER_WISE, PATTERNS, PLAIN, Arguments

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


def choose(source: Source, args: Arguments, options: WriteOptions) -> NewLayout:
    """Decide the layout; what the user did not say is kept from the source, and what follows from it is said in :mod:`.rules`.

    Raises:
        CheckpointError: It contradicts itself or does not fit the model.
    """
    parallel = choose_parallel(source, options)
    split = _choose_split(source, args, options, parallel)
    parallel = replace(parallel, pipeline_layout=split.layout)
    _check_heads(args, parallel)
    _check_blocks(args, source.parallel, parallel)
    rng = options.rng or ("keep" if same_coordinates(source.parallel, parallel) else "derive")
    if rng == "keep" and not same_coordinates(source.parallel, parallel):
        raise UsageError(
            f"--rng keep: the RNG states of {source.parallel} belong to its ranks, and {parallel} has others\n"
            "Use --rng derive (the default for a changed layout) or --rng drop."
        )
    return NewLayout(
        parallel, split, choose_rows(source, args, options, parallel.tp),
        _choose_dtype(source, options), optimizers(source, args, options)[1], rng,
    )  # fmt: skip


def same_coordinates(a: ParallelConfig, b: ParallelConfig) -> bool:
    """Whether two layouts have the same model-parallel ranks, so that what belongs to a rank can stay with it."""
    return (a.tp, a.pp, a.ep, a.etp) == (b.tp, b.pp, b.ep, b.etp)


def choose_parallel(source: Source, options: WriteOptions) -> ParallelConfig:
    """The new degrees: as asked, otherwise the source's."""
    old = source.parallel
    tp, pp = options.tp or old.tp, options.pp or old.pp
    moe = source.model.num_experts > 0
    if not moe and ((options.ep or 1) > 1 or (options.etp or tp) != tp):
        raise UsageError("--ep and --etp are for models with experts, and this model has none\nLeave them out.")
    ep = options.ep or old.ep
    etp = options.etp or (tp if old.etp == old.tp else old.etp) if moe else tp
    if moe and source.model.num_experts % ep:
        raise LayoutMismatch(f"--ep {ep}: {source.model.num_experts} experts cannot be divided equally over {ep} ranks")
    vpp = options.vpp or _vpp_of_layout(options, pp) or (old.vpp if pp > 1 else 1)
    if vpp > 1 and pp == 1:
        raise UsageError(f"--vpp {vpp}: virtual pipeline stages need more than one pipeline stage (--pp)")
    dp = options.dp or default_dp(old, tp, pp, ep, etp)[0]
    return ParallelConfig(tp, pp, vpp, old.cp, ep, etp, dp)


def _vpp_of_layout(options: WriteOptions, pp: int) -> int | None:
    """Model chunks per stage that ``--pipeline-layout`` or the marks of a pattern imply, where it is a whole number of them."""
    pattern = options.hybrid_layer_pattern or ""
    if options.pipeline_layout is None and (pp == 1 or STAGE not in pattern):
        return None
    said = pattern.count(STAGE) + 1 if options.pipeline_layout is None else chunks_in_option(options.pipeline_layout)
    chunks, rest = divmod(said, pp)
    return None if rest else chunks


def default_dp(old: ParallelConfig, tp: int, pp: int, ep: int, etp: int) -> tuple[int, str]:
    """The data-parallel size that follows from the other degrees, and why."""
    model_ranks = tp * pp * old.cp
    dp, rest = divmod(old.world_size, model_ranks)
    if dp and not rest and (tp * old.cp * dp) % (etp * ep) == 0:
        return dp, f"the source's {old.world_size} ranks ÷ {model_ranks}"
    why = f"the smallest that fits, since {old.world_size} ranks do not divide into TP {tp} × PP {pp} × CP {old.cp}"
    return least_dp(tp, old.cp, ep, etp), why


def _choose_split(source: Source, args: Arguments, options: WriteOptions, parallel: ParallelConfig) -> PipelineSplit:
    model = source.model
    if options.pipeline_layout is not None:
        said = split_from_option(options.pipeline_layout, model.num_layers, parallel.pp, parallel.vpp, model.mtp_layers)
        return said if args.pattern is None else _hybrid_split(args, source, parallel, said)
    old = args.pipeline_split
    same = (parallel.pp, parallel.vpp) == (source.parallel.pp, source.parallel.vpp)
    if args.pattern is not None:
        marked = args.pattern.counts
        fits = same and parallel.vpp == 1 if marked is None else len(marked) == parallel.pp * parallel.vpp
        return old if fits else _hybrid_split(args, source, parallel, PipelineSplit())
    if same or old.even:
        return old
    if parallel.pp == 1:
        return PipelineSplit()
    return PipelineSplit(count_embedding=old.count_embedding, count_loss=old.count_loss)


def _hybrid_split(args: Arguments, source: Source, parallel: ParallelConfig, wanted: PipelineSplit) -> PipelineSplit:
    """A hybrid model's stages are marked in its pattern, and no other argument may deal its layers.

    Source: megatron-core 0.19.2, ``megatron/training/arguments.py`` (``validate_args``), ``models/hybrid/hybrid_layer_allocation.py``
    (``select_pipeline_segment``); before 0.17 there are no marks, and all stages are equal.
    """
    model, old = source.model, args.pattern
    assert old is not None
    chunks = model_chunks(model.num_layers, parallel.pp, parallel.vpp, wanted, model.mtp_layers)
    counts = tuple(chunk.num_layers for chunk in chunks) if len(chunks) > 1 else None
    if not isinstance(args.values.get(PATTERNS[0]), str):
        if counts is not None and (parallel.vpp > 1 or len(set(counts)) > 1):
            raise LayoutMismatch(
                f"args.{PATTERNS[1]} {old} is that of a Megatron before 0.17, which deals a hybrid model's layers equally to stages, "
                f"and has no virtual ones; chunks of {', '.join(map(str, counts))} layers are wanted"
            )
        return PipelineSplit()
    return PipelineSplit(counts=counts)


def _check_heads(args: Arguments, parallel: ParallelConfig) -> None:
    """The divisions that Megatron's attention and the mixers of hybrid models assert.

    Sources: megatron-core 0.16.1, ``transformer/attention.py`` (``Attention.__init__``): with more tensor-parallel ranks
    than query groups, several ranks share a group; 0.19.2, ``ssm/mamba_mixer.py`` (``MambaMixer.__init__``).
    """
    heads = args.optional("num_attention_heads")
    problems = Problems()
    advice = "Choose a --tp that divides the heads, and divides the query groups or is a multiple of them."
    if heads is not None and heads % parallel.tp:
        problems.add(LayoutMismatch, f"--tp {parallel.tp}: {heads} attention heads cannot be divided equally", advice)
    groups = args.integer("num_query_groups", 1) if args.flag("group_query_attention") else 0
    if groups and groups % parallel.tp and parallel.tp % groups:
        problems.add(LayoutMismatch, f"--tp {parallel.tp}: {groups} query groups cannot be shared out", advice)
    mixed = args.pattern if parallel.tp > 1 else None
    for what, count in () if mixed is None else heads_to_divide(args.values, mixed.layers).items():
        if count % parallel.tp:
            text = f"--tp {parallel.tp}: {count} {what} cannot be divided equally"
            problems.add(LayoutMismatch, text, "Choose a --tp that divides the heads and groups of all layers.")
    problems.raise_if_any()


def _check_blocks(args: Arguments, old: ParallelConfig, new: ParallelConfig) -> None:
    """Gate and up that lie in turn, some rows of each, are not two halves that are cut one by one.

    Source: megatron-core 0.19.2, ``transformer/moe/experts.py`` (``_remove_glu_interleaving``), ``shared_experts.py``; Megatron's own
    torch_dist cuts such matrices in halves all the same (``apply_swiglu_sharded_factory``).
    """
    problems = Problems()
    for option, before, after in (("etp", old.etp, new.etp), ("tp", old.tp, new.tp)):
        name = "moe_mlp_glu_interleave_size" if option == "etp" else "moe_shared_expert_glu_interleave_size"
        if args.optional(name) and before != after:
            text = f"args: {name} is {args.optional(name)}: gate and up of experts lie in turn, and are not cut anew"
            problems.add(Unsupported, f"{text} for {option} {before} → {after}", f"Keep --{option} {before}.")
    problems.raise_if_any()


def choose_rows(source: Source, args: Arguments, options: WriteOptions, tp: int) -> int | None:
    """Rows of the new embedding: Megatron's own rule, or what the user says.

    Raises:
        UsageError: The true vocabulary is not known and decides, or the size that was given does not fit.
    """
    rows, old = source.model.padded_vocab_size, source.parallel
    if rows is None:
        return None
    divisor = _divisor(args)
    words = options.vocab_size or (None if padded_otherwise(source, args, options) else source.model.vocab_size)
    if options.padded_vocab_size is not None:
        new = options.padded_vocab_size
    elif options.run_of.parts is not None:
        new = _described_rows(source) or words or rows
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


def _described_rows(source: Source) -> int | None:
    """Rows of the model in the ``config.json`` that travels with it: a trainer that builds its model of that pads none."""
    found = text_of(config_in(source.carried)).get("vocab_size") if source.carried is not None else None
    return found if isinstance(found, int) else None


def _divisor(args: Arguments) -> int:
    return args.integer("make_vocab_size_divisible_by", _DEFAULT_DIVISOR) or _DEFAULT_DIVISOR


def padded_otherwise(source: Source, args: Arguments, options: WriteOptions) -> int | None:
    """Rows that Megatron's rule makes of the stored vocabulary, where the files have others: it decides nothing then."""
    words, rows = source.model.vocab_size, source.model.padded_vocab_size
    if words is None or rows is None or words != args.vocab_size or options.vocab_size:
        return None
    made = padded_vocab_size(words, _divisor(args), source.parallel.tp)
    return None if made == rows else made


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


def optimizers(source: Source, args: Arguments, options: WriteOptions) -> tuple[str | None, str | None]:
    """Which kind the source has, and which is written; none where it is left out.

    Beside Muon, ``--use-distributed-optimizer`` means the layer-wise one; the source's own is in its args.
    """
    if options.no_optimizer:
        if options.optimizer:
            raise UsageError("--no-optimizer and --optimizer contradict each other")
        return None, None
    if options.optimizer and source.optimizer is None:
        raise UsageError(f"--optimizer {options.optimizer}: the source has no optimizer state")
    old, wanted = source.optimizer, options.optimizer or source.optimizer
    if args.has_matrix_optimizer and old is not None:
        old = LAYER_WISE if args.layer_wise else PLAIN
        wanted = {None: old, DISTRIBUTED: LAYER_WISE}.get(options.optimizer, options.optimizer)
    if wanted == DISTRIBUTED != old and EXP_AVG not in source.states:
        kept = ", ".join(state for state in source.states if state != MASTER) or "no states"
        raise Unsupported(
            f"--optimizer distributed: Megatron's distributed optimizer keeps moments of Adam, and the source has {kept}\n"
            "Write --optimizer plain, or the weights alone with --no-optimizer."
        )
    return old, wanted
