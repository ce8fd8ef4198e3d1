"""Param groups of a source as the run has them that is to load the rank files: as many, each with all fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate, Rule, Values, same
from mcore_rlhf.errors import LayoutMismatch, Lossy, Problems
from mcore_rlhf.families.crossing.schedule import PER_GROUP
from mcore_rlhf.families.fsdp.groups import completed, torch_class
from mcore_rlhf.families.fsdp.state import EPOCH, MADE, scheduler_state
from mcore_rlhf.families.module import USE_MUON
from mcore_rlhf.families.sidecar import STATE
from mcore_rlhf.families.source import ParamGroup, Source

from .manner import Manner

_OF_RUN = ("foreach", "fused", "capturable", "differentiable")
"""What changes no value, and is the run's own. Source: torch 2.13.0, ``optim/adam.py`` (``Adam``)."""

_DEALT: Rule[Values] = Rule(
    Fate.CHANGED, f"param groups: {{had}} become {{has}}, {{how}}; the source's own wait in {STATE}", dict
)


def as_run_has(source: Source, manner: Manner, report: Report) -> tuple[ParamGroup, ...]:
    """The groups of a source as verl's optimizer has them, which stops at another number.

    Args:
        source: The source.
        manner: How the run has them: in one group, where nobody said.
        report: Told of what becomes of several.

    Raises:
        LayoutMismatch: The run has several, and another number of them than the source.
    """
    groups, wanted = source.state.groups, manner.groups
    count = 1 if wanted is None else len(wanted)
    if manner.members is not None and (manner.items is not None or count > 1):
        return _dealt(source, manner.members, wanted or (), report)
    if len(groups) == count:
        return tuple(_with(group, wanted[n] if wanted else {}) for n, group in enumerate(groups))
    if count > 1:
        raise LayoutMismatch(
            f"{source.root}: has {len(groups)} param groups, and the run that --like names has {count}\n"
            "Which parameters are in which of them, its files do not say: --no-optimizer writes the weights alone."
        )
    return (_with(_merged(source, report), wanted[0] if wanted else {}),)


def _dealt(
    source: Source, members: Sequence[Sequence[str]], wanted: Sequence[Mapping[str, object]], report: Report
) -> tuple[ParamGroup, ...]:
    """Groups whose members the run's own files name; each has the settings of the source's that most of them are in.

    Raises:
        LayoutMismatch: The run trains other parameters.
    """
    groups, known = source.state.groups, {spec.name for spec in source.model.params}
    listed, trained = {n for names in members for n in names}, {n for group in groups for n in group.params}
    problems = Problems()
    for name in sorted(trained - listed)[:5]:
        problems.add(
            LayoutMismatch, f"{source.root}: trains {name}, which is in no param group of the run that --like names"
        )
    for name in sorted(listed - known)[:5]:
        problems.add(LayoutMismatch, f"{source.root}: has no {name}, which the run that --like names trains")
    problems.raise_if_any()
    made, apart = [], list[str]()
    for fields, names in zip(wanted, members, strict=True):
        most = max(groups, key=lambda group: len({*group.params} & {*names}))
        apart += [name for name in names if name in trained and name not in most.params]
        made.append(_with(replace(most, params=tuple(names)), fields))
    if apart or len(made) != len(groups):
        more = f"; {apart[0]} gets the settings of the others in its group" if apart else ""
        report.through([_DEALT], {"had": len(groups), "has": len(made), "how": f"as the run has them{more}"})
    return tuple(made)


def _with(group: ParamGroup, fields: Mapping[str, object]) -> ParamGroup:
    """A group with the fields of the run's own that it lacks, and with those that say how its optimizer computes the same."""
    more = {key: value for key, value in fields.items() if key not in group.fields and key not in group.scalars}
    own = {key: fields[key] for key in _OF_RUN if key in fields}
    return replace(group, fields={**more, **group.fields, **own})


def _merged(source: Source, report: Report) -> ParamGroup:
    """One group of all; of settings that differ, those of the group with the most elements.

    Raises:
        Lossy: Several optimizers train them, of which verl has one.
    """
    groups = source.state.groups
    kinds = {(torch_class(of.fields), of.fields.get(USE_MUON) is True, "betas" in of.fields) for of in groups}
    if len(kinds) > 1:
        one, other = (", ".join(map(str, of.fields)) for of in (groups[0], groups[-1]))
        raise Lossy(
            f"{source.root}: {len(kinds)} kinds of optimizer train it, one with the settings {one}, another with {other}; verl's optimizer "
            "is one for all\n--no-optimizer converts the weights alone."
        )
    shapes = source.model.shapes
    first = max(groups, key=lambda group: sum(prod(shapes[name]) for name in group.params if name in shapes))
    seen = [completed(group.fields, ()) for group in groups]
    keys = dict.fromkeys(key for group in groups for key in group.fields if key not in group.scalars)
    chosen = completed(first.fields, ())
    apart = {key: [of.get(key) for of in seen if not same(of.get(key), chosen.get(key))] for key in keys}
    others = [f"{key} {chosen.get(key)!r}, not {values[0]!r}" for key, values in apart.items() if values]
    more = f", with the settings of the largest: {'; '.join(others)}" if others else "; all are alike"
    report.through([_DEALT], {"had": len(groups), "has": "one", "how": f"as verl's optimizer has them{more}"})
    return replace(first, params=tuple(name for group in groups for name in group.params), expert=False)


def _rates_of(scheduler: Mapping[str, object], groups: Sequence[ParamGroup]) -> dict[str, object]:
    """A scheduler's state with a value for each group in its lists: those of the first group where there were more."""
    count = len(groups)
    return {
        key: list(value)[:1] * count if key in PER_GROUP and isinstance(value, list) and len(value) != count else value
        for key, value in scheduler.items()
    }


def scheduler_of(
    source: Source, manner: Manner, groups: Sequence[ParamGroup], optimizer: bool, report: Report
) -> Mapping[str, object] | None:
    """That of a LambdaLR; None, which verl passes over, where there are no groups whose rates it could have.

    Args:
        source: The source.
        manner: How the run has its files.
        groups: The groups as it has them.
        optimizer: Whether the optimizer is written.
        report: Told how it was made.
    """
    if not optimizer:
        stored = source.state.scheduler
        if manner.strategy:  # whose loader takes a state in any case, and the run's own rates with this one
            at = source.state.iteration
            return {"lr_lambdas": [None], EPOCH: at, "_step_count": at + 1}
        return dict(stored) if stored is not None and "base_lrs" in stored else None
    dealt = replace(source, state=replace(source.state, groups=tuple(groups)))
    report.through([MADE], dealt)
    state = scheduler_state(dealt)
    return {**manner.scheduler, **_rates_of(state, groups)}
