"""A source as the run that goes on keeps it: what ``--like`` says, a checkpoint that the trainer itself wrote.

Its experts, names and param groups, and a DCP folder's keys, are the run's own; how far training has come (masters, moments, steps,
learning rates, iteration) is the source's. What the run keeps and the source does not say is as there, by name: its loader stops at a key
that is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate, Item, Kind, Rule
from mcore_rlhf.errors import Lossy, Problems, Unsupported, UsageError
from mcore_rlhf.families.fsdp.groups import STEP, completed
from mcore_rlhf.families.fsdp.state import COUNTED, EPOCH, PARTS, RNG, VERSION, counted_at
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.options import RunOf
from mcore_rlhf.families.source import BASE_LRS, LAMBDAS, LAST_LRS, ParamGroup, Source, scheduled_groups

from .packing import is_in_memory, repacked
from .schedule import BATCHES, PER_GROUP, in_ticks, ticks
from .torchtitan import of_torchtitan, with_other_names

_OF_STEP = ("lr", STEP)
"""What of a param group is of the step that was reached; all else is the run's."""
_HAS = "as the run that goes on has it"

_OF_RUN: Rule[str] = Rule(
    Fate.NOTE, "keys, param groups and settings of the optimizer: those of the run that goes on, as in {found}", str
)
_OF_GROUPS: tuple[Rule[Mapping[tuple[str, str, str], int]], ...] = (
    Rule(Fate.CHANGED, "{key} of {count} parameters: {ours} → {theirs}, as the run has it",
         lambda changed: [{"key": key, "count": count, "ours": ours, "theirs": theirs, "of": [Item(Kind.GROUP, key)]}
                          for (key, ours, theirs), count in changed.items()]),
    Rule(Fate.DERIVED, _HAS, of=[Item(Kind.GROUP)], told=False),
)  # fmt: skip
"""Of how many parameters each setting changes, from what to what."""
_SCHEDULE: Rule[str] = Rule(Fate.DERIVED, "lr_scheduler: {found}", str, [Item(Kind.SCHEDULER)])
_LAMBDAS: Rule[object] = Rule(Fate.DERIVED, _HAS, of=[Item(Kind.SCHEDULER, LAMBDAS)], told=False)
_KEPT_BY_RUN: Rule[Mapping[str, str]] = Rule(
    Fate.DERIVED, "{key}: {how}", lambda said: [{"key": key, "how": how} for key, how in said.items()]
)


def with_experts_of(like: Source, source: Source, config: Mapping[str, object]) -> Source:
    """The source with experts as a run has them in memory: packed, or as transformers 4 has them, one by one.

    Args:
        like: A checkpoint of the run.
        source: Under a module's names.
        config: The model's ``config.json``.

    Raises:
        CheckpointError: See :func:`~.packing.repacked`.
    """
    has_packed, wants_packed = (is_in_memory(of.model.shapes, config) for of in (source, like))
    return source if has_packed == wants_packed else repacked(source, config, packs_experts=wants_packed)


def with_groups_of(like: Source, source: Source, config: Mapping[str, object]) -> Source:
    """The source with the experts, param groups and schedule of a run, whose loader finds a group's parameters by their place.

    Args:
        like: A checkpoint of the run.
        source: Under a module's names.
        config: The model's ``config.json``.

    Raises:
        UsageError: The run's checkpoint is not under a module's names.
        CheckpointError: See :func:`as_run`.
    """
    ModuleState.needed(like)
    source = with_experts_of(like, source, config)
    _check_same_model(source, like)
    return _in_groups_of_run(source, like, source.notes.copy())


def _in_groups_of_run(source: Source, like: Source, notes: Report) -> Source:
    """The source with a run's param groups and schedule, where both have an optimizer; what it becomes, the notes say."""
    state = source.state
    if source.optimizer is not None and like.state.groups:
        groups = _groups(source, like.state.groups, str(like.root), notes)
        state = replace(state, groups=groups, scheduler=_scheduler(source, like, groups, notes))
    return replace(source, notes=notes, state=state)


def as_run(source: Source, like: Source, config: Mapping[str, object]) -> Source:
    """The source with the experts, names, keys, param groups and further values of a run.

    Args:
        source: Under a module's names.
        like: A checkpoint of the run.
        config: The model's ``config.json``, for torchtitan's names; may be empty.

    Raises:
        UsageError: That is no DCP folder; or it has other names, and nobody says how many heads the model has.
        Unsupported: It trains other parameters, or they have other shapes.
        Lossy: Parameters that the run has in one param group have several learning rates, or have made several numbers of steps.
    """
    laid_out = ModuleState.needed(like).laid_out
    if not laid_out:
        raise UsageError(
            f"--like: {like.root} is of the format {like.format}\nGive a DCP folder that the trainer itself wrote."
        )
    source = with_experts_of(like, source, config)
    ours, theirs = of_torchtitan(source), of_torchtitan(like)
    if ours and ours != theirs:
        source = with_other_names(source, dict(config))
    if theirs and ours != theirs:
        source = with_other_names(source, dict(config), theirs)
    _check_same_model(source, like)
    notes = source.notes.copy()
    notes.through([_OF_RUN], str(like.root))
    source = _in_groups_of_run(source, like, notes)
    state = replace(source.state, other=_other(source, like, notes))
    return replace(source, state=state, family=replace(ModuleState.needed(source).base(), laid_out=laid_out))


def _check_same_model(source: Source, like: Source) -> None:
    ours, theirs, problems = source.model.shapes, like.model.shapes, Problems()
    for name in [name for name in dict.fromkeys([*theirs, *ours]) if ours.get(name) != theirs.get(name)][:5]:
        have, want = (str(list(of[name])) if name in of else "not there" for of in (ours, theirs))
        text = f"--like: {name} is {want} in {like.root}, and {have} in {source.root}"
        problems.add(Unsupported, text, "Give a checkpoint of the same model; --vocab-size cuts a padded vocabulary.")
    problems.raise_if_any()


def in_groups_of(run: RunOf, source: Source) -> Source:
    """The source in the param groups that a trainer makes whatever its run is: a setting is that of most of a group's parameters.

    Args:
        run: Says which parameters are in the second.
        source: Under a module's names, with an optimizer.

    Raises:
        Lossy: Parameters that come into one group have several learning rates, or have made several numbers of steps.
    """
    of = {name: group for group in source.state.groups for name in group.params}
    order = dict.fromkeys([spec.name for spec in source.model.params if spec.name in of] + [*of])
    shares = _shares(run, [*order])
    if {frozenset(names) for names in shares} == {frozenset(group.params) for group in source.state.groups}:
        return source
    notes = source.notes.copy()
    notes.add(Fate.NOTE, f"param groups: dealt anew, {len(shares)} as {run.name} makes them")
    wanted = [replace(_most(names, of), expert=False, params=tuple(names)) for names in shares]
    groups = _groups(source, tuple(wanted), run.name, notes)
    return replace(source, notes=notes, state=replace(source.state, groups=groups))


def _shares(run: RunOf, names: list[str]) -> list[list[str]]:
    """The parameters of each group that a trainer makes."""
    apart = {name for name in names if any(part in name for part in run.second_group or ())}
    found = [[name for name in names if name not in apart], [name for name in names if name in apart]]
    return [share for share in found if share]


def _most(names: list[str], of: Mapping[str, ParamGroup]) -> ParamGroup:
    """The group that most of some parameters are in."""
    ((number, _),) = Counter(id(of[name]) for name in names).most_common(1)
    return next(of[name] for name in names if id(of[name]) == number)


def _groups(source: Source, run: tuple[ParamGroup, ...], whose: str, notes: Report) -> tuple[ParamGroup, ...]:
    """The run's param groups, at the learning rates and steps that the source has come to."""
    of = {name: group for group in source.state.groups for name in group.params}
    made, changed, problems = list[ParamGroup](), dict[tuple[str, str, str], int](), Problems()
    for number, group in enumerate(run):
        reached = {repr(_reached(of[name])): of[name] for name in group.params if name in of}
        if len(reached) > 1:
            text = f"{source.root}: the run has {group.params[0]} and others in one param group, and they are at {', '.join(reached)}"
            problems.add(Lossy, text, "--no-optimizer converts the weights alone.")
        for name in group.params:
            for key, ours, theirs in _different(of[name], group) if name in of else ():
                changed[key, ours, theirs] = changed.get((key, ours, theirs), 0) + 1
        at = _reached(next(iter(reached.values()))) if reached else {}
        counted = (STEP,) if STEP in at and STEP not in group.fields else ()
        scalars = tuple(key for key in group.scalars if key in at) or counted
        settings = {key: value for key, value in group.fields.items() if key not in group.scalars}
        made.append(ParamGroup({**settings, **at}, group.expert, group.params, scalars))
        if not reached and group.params:
            problems.add(Unsupported, f"{source.root}: nothing says how far param group {number} of {whose} is trained")
    problems.raise_if_any()
    notes.through(_OF_GROUPS, changed)
    return tuple(made)


def _reached(group: ParamGroup) -> dict[str, object]:
    """How far a group's training has come."""
    return {key: group.fields[key] for key in (*_OF_STEP, *group.scalars) if key in group.fields}


def _different(ours: ParamGroup, run: ParamGroup) -> list[tuple[str, str, str]]:
    """Settings of a parameter that both name, and that are not the same."""
    own, past = completed(ours.fields, ours.scalars), (*_OF_STEP, *ours.scalars, *run.scalars)
    both = ((key, own.get(key), run.fields[key]) for key in ours.fields if key in run.fields and key not in past)
    return [(key, str(a), str(b)) for key, a, b in both if a != (tuple(b) if isinstance(b, list) else b)]


def _scheduler(source: Source, like: Source, groups: tuple[ParamGroup, ...], notes: Report) -> dict[str, object] | None:
    """The run's scheduler where the source has come to; the source's own where it is torch's already."""
    run, at, times = like.state.scheduler, source.state.iteration, ticks(like.state.scheduler, like.state.iteration)
    own = source.state.scheduler
    if run is None:
        return own
    rates, count = [group.fields.get("lr") for group in groups], scheduled_groups(run) or 1
    if own is not None and own.keys() >= run.keys():
        return _in_groups(in_ticks(own, at, times if EPOCH in run else 0, notes), run, count, notes)
    if isinstance(counted := run.get(BATCHES), int) and EPOCH not in run:  # one of DeepSpeed's own
        where, made = f"step {at}", {**run, BATCHES: max(-1, counted + at - like.state.iteration)}
    else:
        where = f"last_epoch {at * times}, with the learning rates of the param groups"
        made = schedule_at(run, at * times, rates if len(rates) == count or PARTS in run else rates[:1] * count)
    notes.through([_SCHEDULE], f"the run's, at {where}")
    return made


def _in_groups(own: dict[str, object], run: Mapping[str, object], count: int, notes: Report) -> dict[str, object]:
    """The source's own scheduler with a value for each of the run's param groups, where all of its own are the same."""
    lambdas, theirs = own.get(LAMBDAS), run.get(LAMBDAS)
    if isinstance(lambdas, list) and isinstance(theirs, list) and not any(lambdas):
        own = {**own, LAMBDAS: theirs[:1] * len(lambdas)}  # functions have no state: None, or {}, as the run has it
        notes.through([_LAMBDAS], None)
    had = own.get(BASE_LRS)
    if (
        isinstance(had, list) and len(had) != count and all(rate == had[0] for rate in had)
    ):  # dealt otherwise on the way
        notes.through(
            [_SCHEDULE], f"its learning rates of {len(had)} param groups, all the same, become those of {count}"
        )
        fitting = {key: value[:1] * count for key, value in own.items() if key in PER_GROUP and isinstance(value, list)}
        return {**own, **fitting}
    return own


def schedule_at(state: Mapping[str, object], at: int, rates: list[object]) -> dict[str, object]:
    """A scheduler's state at another step; of one that is made of several, each is where it would be by then.

    Source: torch 2.13.0, ``optim/lr_scheduler.py`` (``SequentialLR.__init__``, ``step``: a part that has not begun is at -1;
    ``ChainedScheduler.step``: all go together).

    Args:
        state: Of one of torch's.
        at: The step.
        rates: Learning rates of the param groups then.
    """
    made: dict[str, object] = {**state, LAST_LRS: rates}
    made |= {key: value for key, value in ((EPOCH, at), ("_step_count", at + 1)) if key in state or PARTS not in state}
    parts, ends = state.get(PARTS), state.get("_milestones")
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        return made
    stops = [end for end in ends if isinstance(end, int)] if isinstance(ends, list) else []
    several = len(stops) == len(parts) - 1
    begins = [0, *stops] if several else [0] * len(parts)
    latest = [*(end - 1 for end in stops), at] if several else [at] * len(parts)
    made[PARTS] = [
        schedule_at(part, min(at, last) - begin, rates) if at >= begin else {**part, EPOCH: -1}
        for part, begin, last in zip(parts, begins, latest, strict=True)
    ]
    return made


def _other(source: Source, like: Source, notes: Report) -> dict[str, object]:
    """Counters, data and all else that the run keeps."""
    own, said = counted_at(source.state.other, source.state.iteration), dict[str, str]()
    said |= {key: f"step {source.state.iteration}" for key in COUNTED if own.get(key) != source.state.other.get(key)}
    for key, value in like.state.other.items():
        if key == VERSION:
            own[key] = value
        elif key not in own and key != RNG:
            how = f"as in {like.root}, at its step: the source does not say it"
            if key in COUNTED and isinstance(value, Mapping):
                rest = ", ".join(sorted(name for name in value if name != "step"))
                value = {**value, "step": source.state.iteration}
                how = f"step {source.state.iteration}; {rest or 'nothing else'} as in {like.root}"
            own[key], said[key] = value, how
    notes.through([_KEPT_BY_RUN], said)
    return own
