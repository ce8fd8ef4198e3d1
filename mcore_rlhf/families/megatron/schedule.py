"""A scheduler's state for Megatron, made where a source has none of Megatron's: its loader asks for one beside every optimizer. And one
that counts samples, as Megatron-LM's does, for a trainer whose counts steps, and the other way round.

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

from .state import SAMPLES

MADE = (
    "one is made, of a constant rate, at num_steps {num_steps} ({counted}): with --override-opt-param-scheduler the rates of the run's "
    "arguments go on from there"
)
_RATES = ("max_lr", "initial_lr", "lr")


def samples_of(source: Source, batch: int | None) -> int:
    """How many samples were consumed, as a source says or steps of a batch amount to; 0 where nobody says it.

    Args:
        source: Under a module's names.
        batch: Samples of a step, where somebody says it.
    """
    samples = source.state.other.get("global_samples") or source.state.iteration * (batch or 0)
    return samples if _is_count(samples) else 0


def made_at(source: Source, batch: int | None) -> Mapping[str, object] | None:
    """Where a scheduler that is made stands, and in what that was counted; None where the source needs none.

    Args:
        source: Under a module's names.
        batch: Samples of a step, where somebody says it.
    """
    state = source.state
    if source.optimizer is None or FormerFamily.of(source).scheduler(state.iteration) is not None:
        return None
    if samples := samples_of(source, batch):
        return {"num_steps": samples, "counted": "samples"}
    return {
        "num_steps": state.iteration,
        "counted": "steps, since nobody says how many samples these were",
    }


def new_scheduler(source: Source, batch: int | None) -> dict[str, object] | None:
    """Such a state; None where the source needs none.

    Args:
        source: Under a module's names.
        batch: Samples of a step, where somebody says it.
    """
    made = made_at(source, batch)
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


def counted_as(source: Source, batch: int | None, report: Report, *, by_steps: bool) -> Source:
    """A source whose scheduler counts as the target's does: a number of samples for each step, or the steps.

    Args:
        source: Under Megatron's names.
        batch: Samples of a step in the run that goes on, where somebody says it.
        report: Told what becomes of it.
        by_steps: Whether the target's counts steps.
    """
    state = source.state
    counted = {name: value for name in _COUNTS if _is_count(value := (state.scheduler or {}).get(name))}
    now = counted.get("num_steps")
    if state.by_steps == by_steps or not now or (by_steps and now == state.iteration):
        return source
    steps = state.iteration if by_steps else now
    each = now // max(steps, 1) if by_steps else batch or _batch(state.args)
    new = {name: value // (each or 1) if by_steps else value * each for name, value in counted.items()}
    fits = each > 0 and new["num_steps"] == (steps if by_steps else now * each) and all(map(_is_count, new.values()))
    fits = fits and not (by_steps and any(value % each for value in counted.values()))
    said = {"samples": now if by_steps else now * each, "steps": steps, "each": each if fits else 0}
    report.through(_COUNTED[by_steps], said)
    if not fits:
        return source
    args = state.args
    if not by_steps and args and not args.get(SAMPLES[0]):
        report.through([_CONSUMED], said)
        args = {**args, SAMPLES[0]: said["samples"]}
    return replace(
        source, state=replace(state, scheduler={**(state.scheduler or {}), **new}, by_steps=by_steps, args=args)
    )


def _batch(args: Mapping[str, object]) -> int:
    """How many samples each step had; 0 where nobody says it, or not all had as many."""
    batch = args.get("global_batch_size")
    return batch if _is_count(batch) and not args.get("rampup_batch_size") else 0


def _rules(fits: str, not_so: str) -> tuple[Rule[Values], ...]:
    return (
        Rule(Fate.DERIVED, f"lr_scheduler: {fits}", lambda found: found if found["each"] else None, [Item(Kind.SCHEDULER)]),
        Rule(Fate.LOST, f"lr_scheduler: {not_so}: its rates go on at another pace", lambda found: None if found["each"] else found,
             [Item(Kind.SCHEDULER)]),
    )  # fmt: skip


_CONSUMED: Rule[Values] = Rule(
    Fate.DERIVED,
    "consumed_train_samples: {samples}, of {steps} steps, by which Megatron-LM's own data go forward",
    lambda found: found,
)
_COUNTS = ("num_steps", "lr_warmup_steps", "lr_decay_steps", "wd_incr_steps")
_COUNTED = {
    True: _rules(
        "at {steps} steps, which the trainer counts, of {samples} samples; its other numbers are divided by {each} as well",
        "counts samples, {samples} in {steps} steps, not as many in each, and the trainer counts steps",
    ),
    False: _rules(
        "at {samples} samples, which Megatron-LM counts, of {steps} steps; its other numbers are multiplied by {each} as well",
        "counts steps, {steps}, where Megatron-LM counts samples, and without --global-batch-size nobody says how many a step has",
    ),
}
