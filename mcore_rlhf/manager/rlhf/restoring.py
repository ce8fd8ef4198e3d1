"""Putting a state that was read into the live one, whose objects stay the same objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

from ...errors import Incomplete, Problems, UsageError
from .kinds import Kinds
from .kl import KL_CONTROLLERS
from .schedules import SCHEDULES
from .schema import COUNTERS
from .tensors import Buffer, refill

if TYPE_CHECKING:
    from .state import RlhfState

T = TypeVar("T")

_ADVICE = "Load into a state without it and add it afterwards, or use a step that has it."


def check(live: RlhfState, stored: RlhfState, where: str) -> Problems:
    """Whether the live state can become the stored one.

    What the live state holds by name must be in the file, and of the same kind; what it lacks will be added. Running
    statistics that have not seen a number yet may be missing.
    """
    problems = Problems()
    if live.algorithm and live.algorithm != stored.algorithm:
        text = f"{where}: algorithm: this run is {live.algorithm!r}, the checkpoint is of {stored.algorithm!r}"
        problems.add(UsageError, text, "Set algorithm='' to load it all the same.")
    _check_kinds(KL_CONTROLLERS, live.kl, stored.kl, f"{where}: kl", problems)
    _check_kinds(SCHEDULES, live.schedules, stored.schedules, f"{where}: schedules", problems)
    used = {name: item for name, item in live.statistics.items() if item.count}
    _check_names(used, stored.statistics, f"{where}: statistics", problems)
    _check_names(live.buffers, stored.buffers, f"{where}: buffers", problems)
    _check_best(live, stored, where, problems)
    return problems


def _check_names(live: Mapping[str, T], stored: Mapping[str, T], place: str, problems: Problems) -> None:
    for name in sorted(live.keys() - stored.keys()):
        problems.add(Incomplete, f"{place}/{name}: is missing in the checkpoint; this run has it", _ADVICE)


def _check_kinds(kinds: Kinds[T], live: Mapping[str, T], stored: Mapping[str, T], place: str, found: Problems) -> None:
    _check_names(live, stored, place, found)
    for name in sorted(live.keys() & stored.keys()):
        if type(live[name]) is not type(stored[name]):
            expected = kinds.kind_of(live[name]) or type(live[name]).__qualname__
            text = f"{place}/{name}: this run has a {kinds.what} of kind {expected!r}, the checkpoint one of kind "
            found.add(UsageError, f"{text}{kinds.kind_of(stored[name])!r}", "Configure the run as the checkpoint was.")


def _check_best(live: RlhfState, stored: RlhfState, where: str, problems: Problems) -> None:
    if live.best is None:
        return
    if stored.best is None:
        problems.add(Incomplete, f"{where}: best: is null in the checkpoint; this run has {live.best.name!r}", _ADVICE)
    elif (live.best.name, live.best.mode) != (stored.best.name, stored.best.mode):
        ours, theirs = (f"the {item.mode} of {item.name!r}" for item in (live.best, stored.best))
        problems.add(UsageError, f"{where}: best: this run keeps {ours}, the checkpoint {theirs}")


def restore(live: RlhfState, stored: RlhfState) -> None:
    """Make the live state the stored one; :func:`check` has found that it can be."""
    for name in ("algorithm", "weight_version", *COUNTERS):
        setattr(live, name, getattr(stored, name))
    _refill(live.kl, stored.kl, assign)
    _refill(live.schedules, stored.schedules, assign)
    _refill(live.statistics, live.statistics | stored.statistics, assign)
    _refill(live.buffers, stored.buffers, _assign_buffer)
    if live.best is None or stored.best is None:
        live.best = stored.best
    else:
        assign(live.best, stored.best)
    live.in_flight[:] = stored.in_flight
    live.extra.clear()
    live.extra.update(stored.extra)


def _refill(live: dict[str, T], stored: Mapping[str, T], assign_to: Callable[[T, T], None]) -> None:
    """Live objects take the stored values, in the stored order; new ones are added."""
    merged = dict(stored)
    for name in live.keys() & stored.keys():
        assign_to(live[name], stored[name])
        merged[name] = live[name]
    live.clear()
    live.update(merged)


def assign(live: object, stored: object) -> None:
    """Give a dataclass object the fields of another of its class."""
    for item in fields(stored):  # type: ignore[arg-type]  # every caller passes a dataclass
        setattr(live, item.name, getattr(stored, item.name))


def _assign_buffer(live: Buffer, stored: Buffer) -> None:
    refill(live.tensors, stored.tensors)
    live.meta.clear()
    live.meta.update(stored.meta)
