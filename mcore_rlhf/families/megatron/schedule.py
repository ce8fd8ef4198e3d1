"""A scheduler's state for Megatron, made where a source has none of Megatron's: its loader asks for one beside every optimizer. And one
that counts samples, as Megatron-LM's does, for a trainer whose counts steps.

Source: megatron-core 0.19.2, ``training/checkpointing.py`` (``load_checkpoint``: without ``opt_param_scheduler`` a KeyError, whatever
``--override-opt-param-scheduler`` says), ``core/optimizer_param_scheduler.py`` (``load_state_dict``: with that option the arguments'
values count, and of the state ``num_steps`` alone, which is in samples; ``get_lr``); verl 0.9.1 and 0.7.0,
``workers/engine/megatron/transformer_impl.py`` (``lr_scheduler_step``: ``step(1)``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeGuard

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate, Item, Kind, Rule, Values
from mcore_rlhf.families.sidecar import FormerFamily
from mcore_rlhf.families.source import Source

MADE = (
    "one is made, of a constant rate, at num_steps {num_steps} ({counted}): with --override-opt-param-scheduler the rates of the run's "
    "arguments go on from there"
)
_RATES = ("max_lr", "initial_lr", "lr")


def made_at(source: Source) -> Mapping[str, object] | None:
    """Where a scheduler that is made stands, and in what that was counted; None where the source needs none.

    Args:
        source: Under a module's names.
    """
    state = source.state
    if source.optimizer is None or FormerFamily.of(source).scheduler(state.iteration) is not None:
        return None
    samples = state.other.get("global_samples")
    if _is_count(samples) and samples > 0:
        return {"num_steps": samples, "counted": "samples"}
    return {
        "num_steps": state.iteration,
        "counted": "steps, since nobody says how many samples these were",
    }


def new_scheduler(source: Source) -> dict[str, object] | None:
    """Such a state; None where the source needs none.

    Args:
        source: Under a module's names.
    """
    made = made_at(source)
    if made is None:
        return None
    rates = [rate for group in source.state.groups if isinstance(rate := _rate(group.fields), float | int)]
    return {
        "max_lr": max(rates, default=0.0), "min_lr": 0.0, "lr_warmup_steps": 0, "num_steps": made["num_steps"],
        "lr_decay_style": "constant", "lr_decay_steps": made["num_steps"],
    }  # fmt: skip


def _is_count(value: object) -> TypeGuard[int]:
    """Whether it can be a number of samples or steps; with anything else that a file says nothing is counted."""
    return type(value) is int and 0 <= value < 1 << 63


def _rate(fields: Mapping[str, object]) -> object:
    return next((fields[name] for name in _RATES if fields.get(name) is not None), None)


def in_steps(source: Source, report: Report) -> Source:
    """A source whose scheduler counts steps, where it counts a number of samples for each.

    Args:
        source: Under Megatron's names.
        report: Told what becomes of it.
    """
    had, at = source.state.scheduler or {}, source.state.iteration
    counted = {name: value for name in _COUNTS if _is_count(value := had.get(name))}
    if not at or counted.get("num_steps") in (None, 0, at):
        return source
    each = counted["num_steps"] // at
    fits = counted["num_steps"] == each * at and not any(value % each for value in counted.values())
    report.through(_IN_STEPS, {"samples": counted["num_steps"], "steps": at, "each": each if fits else 0})
    if not fits:
        return source
    scheduler = {**had, **{name: value // each for name, value in counted.items()}}
    return replace(source, state=replace(source.state, scheduler=scheduler))


_COUNTS = ("num_steps", "lr_warmup_steps", "lr_decay_steps", "wd_incr_steps")
_IN_STEPS: tuple[Rule[Values], ...] = (
    Rule(Fate.DERIVED, "lr_scheduler: at {steps} steps, which the trainer counts, of {samples} samples; its other numbers are divided by "
         "{each} as well", lambda found: found if found["each"] else None, [Item(Kind.SCHEDULER)]),
    Rule(Fate.LOST, "lr_scheduler: counts samples, {samples} in {steps} steps, not as many in each, and the trainer counts steps: "
         "its rates go on at another pace", lambda found: None if found["each"] else found, [Item(Kind.SCHEDULER)]),
)  # fmt: skip
