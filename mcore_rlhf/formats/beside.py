"""What lies beside files of whole tensors: all of a run that is no tensor, ranks' random states included, or what is lost without it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, fields, replace

from mcore_rlhf.core.account import Report, named
from mcore_rlhf.core.facts import Fate, Inventory, Item, Kind, Reason, Rule
from mcore_rlhf.errors import Corrupt, LayoutMismatch, Unsupported, UsageError, shown
from mcore_rlhf.families.inventory import OF_OPTIMIZER, UNUSED, WAITING, inventory_of, random_states, state_items
from mcore_rlhf.families.megatron.folders import file_ranks
from mcore_rlhf.families.megatron.new_layout import same_coordinates
from mcore_rlhf.families.megatron.state import OF_RANKS, RNG_KEYS, MegatronState, RankValues, RngMaker, saved_rng
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import WriteOptions
from mcore_rlhf.families.sidecar import UNHELD, Sidecar
from mcore_rlhf.families.source import Family, Source
from mcore_rlhf.families.trainer_files import RankStates, new_states, of_ranks
from mcore_rlhf.layouts.parallel import ParallelConfig


def with_degrees(source: Source, options: WriteOptions, report: Report) -> Source:
    """The source as the target is to say it: with the degrees that are asked for, and random states of those ranks.

    Args:
        source: What is written.
        options: Degrees, and what becomes of random states.
        report: Told of that.

    Raises:
        UsageError: ``--rng keep`` of other ranks.
    """
    old = source.parallel
    if MegatronState.of(source) is None:
        old = ParallelConfig(dp=old.world_size // (old.tp * old.pp))  # how whole tensors were cut is nobody's matter
    tp, pp, dp = options.tp or old.tp, options.pp or old.pp, options.dp or old.dp
    new = replace(old, tp=tp, pp=pp, dp=dp, etp=tp if old.etp == old.tp else old.etp)
    if pp != old.pp:
        new = replace(new, vpp=1, pipeline_layout=None)
    if not (had := random_states(source)) and options.rng != "derive":
        return replace(source, parallel=new)
    kept = had and (same_coordinates(old, new) if MegatronState.of(source) else old.dp == new.dp)
    how = options.rng or ("keep" if kept else "derive")
    if how == "keep" and not kept:
        raise UsageError(
            f"--rng keep: {old} has states of other ranks than {new}\nLeave it out: new ones are derived then."
        )
    if how == "keep":
        return replace(source, parallel=new)
    report.through(_RANDOM, (how, new, had))
    return replace(source, parallel=new, family=_renewed(source, new, how == "derive"))


_RANDOM: Sequence[Rule[tuple[str, ParallelConfig, list[Item]]]] = [
    Rule(Fate.LOST, "rng: left out, as --rng drop asks", lambda f: f[0] == "drop" and {"of": f[2]}),
    Rule(Fate.DERIVED, "rng: new states of the ranks of {0[1]}", lambda f: f[0] == "derive" and {"of": f[2]}),
]  # fmt: skip


def _renewed(source: Source, new: ParallelConfig, derive: bool) -> Family:
    """What a source has besides, with random states of other ranks, or none."""
    at, family = source.state.iteration, source.family
    if isinstance(family, ModuleState):
        return replace(family, rng=new_states(at, new.dp) if derive else ())
    if not isinstance(family, MegatronState):
        return family
    saved = saved_rng(family.shards[0]) if family.shards else []
    maker = RngMaker(saved[0] if saved else None, at, family.args.integer("seed", 1234))
    ranks = [{RNG_KEYS[0]: [maker.derived(rank)]} for rank in file_ranks(new)] if derive else []
    return replace(family, shards=_shards(new, ranks))


def _shards(parallel: ParallelConfig, ranks: Sequence[RankStates]) -> list[RankValues]:
    return (
        [RankValues(at, top, [], lambda value: value) for at, top in zip(file_ranks(parallel), ranks, strict=True)]
        if ranks
        else []
    )


def beside_of(source: Source) -> tuple[Sidecar, Inventory]:
    """What lies beside the tensors, and the items that it holds, with their values.

    Args:
        source: What is written.
    """
    degrees = {} if source.parallel == ParallelConfig() else asdict(source.parallel)
    kind, origin = source.optimizer or "", source.origin
    if (module := ModuleState.of(source)) is not None:
        base = module.base()
        beside = Sidecar.of(
            source.state, base, source.model.params, origin, optimizer=kind, parallel=degrees, ranks=module.rng
        )
        held = {**base.inventory(), **dict(state_items(source.state))}
    else:
        family = MegatronState.of(source)
        state = source.state if family is None else replace(source.state, args=dict(family.args.values))
        ranks = () if family is None else _of_shards(family, source.parallel)
        beside = Sidecar(state=state, origin=origin, optimizer=kind, parallel=degrees, ranks=ranks)
        held = dict(state_items(state))
        stored, own = {} if family is None else family.inventory(), {OF_RANKS[key] for one in ranks for key in one}
        held |= {item: value for item, value in stored.items() if item in own}
    return beside, held | ({WAITING: origin} if origin else {})


def _of_shards(family: MegatronState, parallel: ParallelConfig) -> tuple[RankStates, ...]:
    """What is of single ranks and no parameter's, by rank; nothing where it is not one of each."""
    shards = {shard.at.folder: shard for shard in family.shards}
    if not shards or [*shards] != [at.folder for at in file_ranks(parallel)]:
        return ()
    return tuple({key: one.materialize(one.top[key]) for key in one.top if key in OF_RANKS} for one in shards.values())


_DEGREES = {
    place.name: (type(None), str) if place.default is None else (type(place.default),)
    for place in fields(ParallelConfig)
}
"""What types of values each of them has."""


def of_ranks_in(beside: Sidecar, family: Family, where: str) -> tuple[ParallelConfig, Family]:
    """The degrees of a run, and what is of its single ranks.

    Args:
        beside: What :func:`beside_of` made, or the format's own files say.
        family: What else there is.
        where: The folder.

    Raises:
        Corrupt: They are of no run, or not of all ranks.
        Unsupported: One of them is not known.
    """
    said = f"{where}: what is said of its degrees: "
    if unknown := sorted(beside.parallel.keys() - _DEGREES.keys()):
        raise Unsupported(f"{said}{', '.join(map(shown, unknown))} is not known; a newer release may have written it")
    wrong = [name for name, value in beside.parallel.items() if type(value) not in _DEGREES[name]]  # True is no 1
    try:
        if wrong:
            raise LayoutMismatch(", ".join(f"{name} is {shown(beside.parallel[name])}" for name in wrong))
        parallel = ParallelConfig(**beside.parallel)  # type: ignore[arg-type]
    except LayoutMismatch as error:
        raise Corrupt(f"{said}{error}\nCopy it again, or convert again.") from None
    if isinstance(family, MegatronState):
        if beside.ranks and len(beside.ranks) != (count := len(file_ranks(parallel))):
            raise Corrupt(
                f"{where}: has random states of {of_ranks(len(beside.ranks))}, and {parallel} are {of_ranks(count)} that store some\n"
                "Copy it again, or convert again."
            )
        return parallel, replace(family, shards=_shards(parallel, beside.ranks))
    if isinstance(family, ModuleState):
        return replace(parallel, dp=max(parallel.dp, len(beside.ranks))), replace(family, rng=beside.ranks)
    return parallel, family


def whole_sidecar(source: Source, report: Report) -> tuple[dict[str, str | bytes], Inventory]:
    """The files beside the tensors, by path, and the items that they hold; what is in none of them is reported.

    The arguments, or the model's description, are in them, by which a format of whole tensors knows what it reads.

    Args:
        source: What is written.
        report: What is lost.
    """
    beside, held = beside_of(source)
    texts, lost = beside.texts()
    report.through(_UNPLACED, inventory_of(source).keys() - held.keys())
    report.through(UNHELD, lost)
    of_state = dict(state_items(source.state))
    of_own = [item for item in held if item.kind is Kind.RNG and item not in of_state]
    report.through(_KEPT, [] if any(item.kind is Kind.RNG for item in report.said) else of_own)
    return texts, held


_KEPT: Sequence[Rule[list[Item]]] = [
    Rule(Fate.KEPT, "rng: of every rank its own", lambda of: {"of": of} if of else None)
]
_UNPLACED: Sequence[Rule[Collection[Item]]] = [
    Rule(Fate.LOST, "what is of single ranks, or of the source's own format ({what}): files of whole tensors have no place for it",
         lambda lost: {"of": lost, "what": named(sorted(lost))} if lost else None)
]  # fmt: skip


def told_run(source: Source) -> object:
    """All of a run that is no tensor, for a JSON of the format's own; :func:`run_of` reads it.

    Args:
        source: Whose it is.
    """
    return beside_of(source)[0].told()


def run_of(told: object, where: object = "") -> Sidecar:
    """From :func:`told_run`.

    Args:
        told: That, as the JSON has it.
        where: The file, for messages.

    Raises:
        CheckpointError: It is something else.
    """
    return Sidecar.of_told(told, f"{where}: ")


def weights_alone(source: Source, options: WriteOptions, report: Report) -> Inventory:
    """What files have that keep weights, and of a run nothing else: no item; what is lost by it is reported.

    Args:
        source: What is written.
        options: Whether the optimizer is left out anyway.
        report: What is lost.
    """
    report.through(_NO_PLACE, source)
    report.through(UNUSED if source.optimizer is None and not options.no_optimizer else (), source)
    return {}


_NO_PLACE: Sequence[Rule[Source]] = [
    Rule(Fate.LOST, "the optimizer: files of weights alone have no place for it", lambda s: s.optimizer is not None, OF_OPTIMIZER),
    Rule(Fate.LOST, "what the run had besides ({what}): files of weights alone have no place for it",
         lambda s: [{"what": named(of), "of": of}] if (of := _of_run(s)) else ()),
    Rule(Reason.NO_RUN, of=(Item(Kind.VALUE),)),
]  # fmt: skip


def _of_run(source: Source) -> list[Item]:
    """All but an optimizer's; a model that was never trained has nothing but a count of 0."""
    has = [item for item in inventory_of(source) if item.kind not in _OPTIMIZERS]
    return [] if has == [Item(Kind.VALUE, "iteration")] and not source.state.iteration else has


_OPTIMIZERS = frozenset(item.kind for item in OF_OPTIMIZER)
