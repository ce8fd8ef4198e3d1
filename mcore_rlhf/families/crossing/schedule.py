"""A scheduler of torch's keeps lists with a value for each param group; where a crossing deals the groups anew, they are dealt with them.

Source: torch 2.13.0, ``optim/lr_scheduler.py`` (``LRScheduler.state_dict``: ``base_lrs``, ``_last_lr``; ``LambdaLR``: ``lr_lambdas``;
``SequentialLR``: ``_schedulers``). Its ``step`` pairs them with the groups and stops where one of the two is longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isclose
from typing import cast

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate, Item, Kind, Rule, Values
from mcore_rlhf.families.fsdp.state import EPOCH
from mcore_rlhf.families.source import BASE_LRS, LAMBDAS, LAST_LRS, ParamGroup, Source

_INNER = "_schedulers"
COUNTED, BATCHES = "_step_count", "last_batch_iteration"
PER_GROUP = (BASE_LRS, LAST_LRS, LAMBDAS, "max_lrs", "min_lrs")
"""What torch's schedulers keep for each group."""


_UNKNOWN: Rule[Values] = Rule(
    Fate.LOST, "lr_scheduler: its learning rates of {had} param groups, [{base}]: which of the {has} groups has which, nobody can tell; "
    "its step alone is left", dict, [Item(Kind.SCHEDULER)],
)  # fmt: skip
_FITTING: Rule[Values] = Rule(
    Fate.DERIVED, "lr_scheduler: its learning rates of {had} param groups become those of {has}, each with that of the group it comes from",
    dict, [Item(Kind.SCHEDULER)],
)  # fmt: skip


def with_fitting_schedule(source: Source) -> Source:
    """A source with a value for each of its param groups in the lists of its scheduler; its step alone where nobody knows whose is which.

    Args:
        source: A source under a module's names, with other numbers of rates and of groups; :mod:`..passes` asks that.
    """
    scheduler, groups = source.state.scheduler or {}, source.state.groups
    base = cast(list[object], scheduler[BASE_LRS])
    notes, order = source.notes.copy(), _owners(scheduler, base, groups)
    notes.through([_FITTING if order else _UNKNOWN], {"base": base, "had": len(base), "has": len(groups)})
    dealt: dict[str, object] = {BATCHES: source.state.iteration - 1}
    if order is not None:
        dealt = _dealt(scheduler, len(base), order)
    return replace(source, state=replace(source.state, scheduler=dealt), notes=notes)


def ticks(scheduler: Mapping[str, object] | None, steps: int) -> int:
    """How often a scheduler counts in a step: under accelerate once for every process.

    Source: accelerate 1.15.0, ``scheduler.py`` (``AcceleratedScheduler.step``).

    Args:
        scheduler: Its state; None where there is none.
        steps: How many steps it has seen.
    """
    at = None if scheduler is None else scheduler.get(EPOCH)
    return at // steps if isinstance(at, int) and 0 < steps <= at and at % steps == 0 else 1


def in_ticks(scheduler: Mapping[str, object], steps: int, times: int, notes: Report) -> dict[str, object]:
    """A scheduler's state that counts as often in a step as that of the run which goes on.

    Args:
        scheduler: The source's.
        steps: How many steps it has seen.
        times: How often the run's counts; 0 where nobody knows.
        notes: Told where it counts otherwise.
    """
    own = ticks(scheduler, steps)
    if times in (0, own) or EPOCH not in scheduler:
        return dict(scheduler)
    at, told = steps * times, [Item(Kind.SCHEDULER, key) for key in (EPOCH, COUNTED)]
    text = f"lr_scheduler: {EPOCH} {scheduler[EPOCH]} → {at}: the run counts {times} for a step, the source {own}"
    notes.add(Fate.DERIVED, text, *told)
    return {**scheduler, EPOCH: at, COUNTED: at + 1}


def with_lambdas(source: Source) -> Source:
    """A source whose scheduler has an entry for the function of each group that says nothing; one of another kind passes over it.

    Args:
        source: One whose scheduler lacks them.
    """
    scheduler = source.state.scheduler or {}
    count = len(cast(list[object], scheduler[BASE_LRS]))
    return replace(source, state=replace(source.state, scheduler={**scheduler, LAMBDAS: [None] * count}))


def _owners(scheduler: Mapping[str, object], base: Sequence[object], groups: Sequence[ParamGroup]) -> list[int] | None:
    """For every group, whose value it takes: any where all are the same, otherwise the one at whose learning rate it is."""
    if all(value == base[0] for value in base):
        return [0] * len(groups)
    found: list[int] = []
    for group in groups:
        at = _places(base, group.fields.get("initial_lr")) or _places(scheduler.get(LAST_LRS), group.fields.get("lr"))
        if not at or max(at) >= len(base) or len({base[place] for place in at}) > 1:
            return None
        found.append(at[0])
    return found


def _places(rates: object, rate: object) -> list[int]:
    """Where a rate stands among others."""
    if not isinstance(rates, list) or not isinstance(rate, int | float):
        return []
    return [
        at for at, other in enumerate(rates) if isinstance(other, int | float) and isclose(other, rate, rel_tol=1e-6)
    ]


def _dealt(state: Mapping[str, object], count: int, order: Sequence[int]) -> dict[str, object]:
    """The state with its lists dealt anew, and those of schedulers in it."""
    made: dict[str, object] = {}
    for key, value in state.items():
        if key == _INNER and isinstance(value, list):
            made[key] = [_dealt(inner, count, order) if isinstance(inner, Mapping) else inner for inner in value]
        elif key in PER_GROUP and isinstance(value, list) and len(value) == count:
            made[key] = [value[at] for at in order]
        else:
            made[key] = value
    return made
