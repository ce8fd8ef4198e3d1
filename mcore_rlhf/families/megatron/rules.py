"""What becomes of a source whose target is Megatron's, whichever of Megatron's formats it is in."""

from __future__ import annotations

from mcore_rlhf.core.catalog import MASTER
from mcore_rlhf.core.chunks import CUT_ROWS, new_rows
from mcore_rlhf.core.facts import Fate, Item, Kind, Rule, Values, same
from mcore_rlhf.families.inventory import COPIED_MASTERS, ELEMENTS, LEAVES_OUT
from mcore_rlhf.layouts.pipeline import PipelineSplit
from mcore_rlhf.models.megatron import OUTPUT

from .arguments import DISTRIBUTED, PATTERNS
from .new_layout import default_dp, optimizers, padded_otherwise
from .new_run import NewRun
from .state import OF_RANKS, PER_RANK_KEYS


def _dp(run: NewRun) -> Values | None:
    """What the data-parallel size follows from, where nobody said it."""
    old, new = run.source.parallel, run.choices.parallel
    found = None if run.options.dp else default_dp(old, new.tp, new.pp, new.ep, new.etp)
    return None if found is None or found[0] == old.dp else {"old": old.dp, "new": found[0], "why": found[1]}


def _split(run: NewRun) -> Values | None:
    args, new = run.family.args, run.choices.split
    if args.pattern is not None or run.options.pipeline_layout is not None or new == args.pipeline_split:
        return None
    return {"old": _describe(args.pipeline_split), "new": _describe(new)}


def _describe(split: PipelineSplit) -> str:
    parts = [f"layout {split.layout}"] if split.layout else []
    parts += [f"first stage {split.first}"] if split.first is not None else []
    parts += [f"last stage {split.last}"] if split.last is not None else []
    parts += ["embedding counted"] if split.count_embedding else []
    parts += ["loss counted"] if split.count_loss else []
    return ", ".join(parts) or "even"


def _pattern(run: NewRun) -> Values | None:
    """A hybrid model's pattern with other marks."""
    old = run.family.args.pattern
    if old is None or not isinstance(run.family.args.values.get(PATTERNS[0]), str):
        return None
    new = old.dealt(run.choices.split.counts)
    return None if str(old) == str(new) else {"old": old, "new": new}


def _optimizer(run: NewRun) -> Values | None:
    old, wanted = optimizers(run.source, run.family.args, run.options)
    return None if wanted == old else {"old": old, "wanted": wanted}


def _changed(run: NewRun) -> Values:
    """Arguments that describe the layout are made true for the new one; the run itself changes those again as it starts."""
    old, new = run.source.state.args, run.arguments(None)
    return {"of": [Item(Kind.ARGUMENT, name) for name, value in old.items() if not same(new.get(name), value)]}


def _rows(run: NewRun, *, more: bool) -> tuple[int, int] | None:
    """Rows of the embedding before and after, where there are more or fewer of them."""
    old, new = run.source.model.padded_vocab_size, run.choices.padded_vocab_size
    return (old, new) if old is not None and new is not None and old != new and (new > old) == more else None


def _cut(run: NewRun) -> Values | None:
    found = _rows(run, more=False)
    return found and {"first": found[1], "last": found[0] - 1}


def _apart(run: NewRun, *, more: bool) -> Values | None:
    """Data-parallel ranks that have random states of their own, where there are more or fewer of them now."""
    had, has = run.family.rng_ranks, run.own_rng_ranks
    there = run.choices.rng == "keep" and (1 < had < has if more else had > has)
    return {"had": had, "has": has, "count": abs(had - has)} if there else None


def _kept(run: NewRun) -> bool:
    return run.choices.rng == "keep" and not _apart(run, more=True) and not _apart(run, more=False)


def _batch(run: NewRun) -> Values | None:
    """Megatron asserts that the global batch divides into micro-batches of all data-parallel ranks."""
    args, dp = run.family.args, run.choices.parallel.dp
    micro, batch = args.optional("micro_batch_size"), args.optional("global_batch_size")
    return {"micro": micro, "batch": batch} if micro and batch and batch % (micro * dp) else None


_OF_RNG = [Item(Kind.RNG)]
RULES: tuple[Rule[NewRun], ...] = (
    Rule(Fate.CHANGED, "virtual pipeline stages: {0.source.parallel.vpp} → {0.choices.parallel.vpp}, since there is one pipeline stage",
         lambda r: r.choices.parallel.vpp != r.source.parallel.vpp and r.options.vpp is None),
    Rule(Fate.CHANGED, "data-parallel size: {old} → {new} ({why})", _dp),
    Rule(Fate.CHANGED, "pipeline split: {old} → {new}", _split),
    Rule(Fate.CHANGED, PATTERNS[0] + ": {old} → {new}, which marks the new stages", _pattern),
    Rule(Fate.NOTE, "args.vocab_size would be padded to {found} rows at TP {0.source.parallel.tp}, the files have "
         "{0.source.model.padded_vocab_size}", lambda r: padded_otherwise(r.source, r.family.args, r.options)),
    *(rule.of_part(lambda r: r.options) for rule in LEAVES_OUT),
    Rule(Fate.CHANGED, "optimizer: {old} → {wanted}; param groups are dealt as Megatron derives them", _optimizer),
    Rule(Fate.DERIVED, "as a run at the new layout stores it", _changed, told=False),
    Rule(Fate.DERIVED, "the distributed optimizer counts it in its param groups",
         lambda r: r.choices.optimizer == DISTRIBUTED and {"of": [Item(Kind.OPTIMIZER, name) for name in r.family.scalars]}, told=False),
    Rule(Fate.CHANGED, "{found}; all others are kept", lambda r: (rows := _rows(r, more=True)) and new_rows(*rows), [ELEMENTS]),
    Rule(Fate.CHANGED, CUT_ROWS, _cut, [ELEMENTS]),
    Rule(Fate.LOST, "RNG states of {count} of {had} data-parallel ranks: the new layout has {has}; of the others they are kept",
         lambda r: _apart(r, more=False)),
    Rule(Fate.DERIVED, "RNG states of {count} more data-parallel ranks than the source has; of its own {had} they are kept",
         lambda r: _apart(r, more=True)),
    Rule(Fate.KEPT, "RNG states of every rank", lambda r: _kept(r) and r.rng.saved),
    Rule(Fate.NOTE, "the source has no RNG states", lambda r: _kept(r) and not r.rng.saved),
    Rule(Fate.DERIVED, "RNG states: seeded from the source's, since its ranks are not those of the new layout",
         lambda r: r.choices.rng == "derive", _OF_RNG),
    Rule(Fate.LOST, "RNG states: fresh ones from args.seed, as --rng drop asks",
         lambda r: r.choices.rng == "drop" and r.family.shards, _OF_RNG),
    Rule(Fate.DERIVED, "RNG states: fresh ones from args.seed, since Megatron did not write the source",
         lambda r: r.choices.rng == "drop" and not r.family.shards, _OF_RNG),
    Rule(Fate.DERIVED, COPIED_MASTERS, lambda r: r.choices.optimizer == DISTRIBUTED and MASTER not in r.source.states),
    Rule(Fate.DERIVED, "fp32 parameters are their own masters, and are kept",
         lambda r: r.choices.optimizer not in (None, DISTRIBUTED) and MASTER in r.source.states and r.choices.dtype is None,
         [Item(Kind.TENSOR, MASTER)], told=False),
    Rule(Fate.NOTE, "fp32 master parameters: remainders of 16 bits, as the source stores them{0.needs}",
         lambda r: r.needs and r.keeps_remainders),
    Rule(Fate.NOTE, "fp32 master parameters: written whole{0.needs}", lambda r: r.needs and not r.keeps_remainders),
    Rule(Fate.LOST, "rerun_state_machine: belongs to the ranks of the source; Megatron ignores it as well",
         lambda r: not r.same_world and any(key in shard.top for shard in r.family.shards for key in PER_RANK_KEYS),
         [OF_RANKS[key] for key in PER_RANK_KEYS]),
    Rule(Fate.NOTE, OUTPUT + ": left out; on one stage Megatron has no such weight, the embedding is tied",
         lambda r: OUTPUT in r.source.model.unused and r.choices.parallel.pp == 1),
    Rule(Fate.NOTE, "global_batch_size {batch} is not a multiple of micro_batch_size {micro} × DP {0.choices.parallel.dp}: Megatron will "
         "want another --dp, or other batch sizes", _batch),
)  # fmt: skip
"""What follows from the layout, and what becomes of the vocabulary's padding, random states, masters, and of what only fits one layout."""
