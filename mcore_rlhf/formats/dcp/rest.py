"""What an FSDP run saves besides model and optimizer: schedulers, random states, the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mcore_rlhf.core.account import Fate, Report
from mcore_rlhf.families.source import ParamGroup

from .folders import Located
from .groups import STEP

SCHEDULERS, SCHEDULER, RNG, VERSION = "lr_schedulers", "lr_scheduler", "rng", "fsdp_version"
EPOCH = "last_epoch"
_COUNTERS = (("train_state", "step"), ("train_state", "global_step"), ("global_step",), ("step",), ("iteration",))
"""Where runs keep their step; the first is torchtitan's (``torchtitan/train.py``, ``state_dict``)."""


def scheduler_of(rest: Mapping[str, object]) -> tuple[dict[str, object] | None, dict[str, object]]:
    """The learning-rate scheduler's state, and everything else.

    Args:
        rest: What was saved besides model and optimizer.
    """
    other = dict(rest)
    listed = other.get(SCHEDULERS)
    if isinstance(listed, list) and len(listed) == 1 and isinstance(listed[0], dict):
        del other[SCHEDULERS]
        return dict(listed[0]), other
    one = other.get(SCHEDULER)
    if isinstance(one, dict) and EPOCH in one:
        del other[SCHEDULER]
        return dict(one), other
    return None, other


def iteration_of(
    located: Located, rest: Mapping[str, object], scheduler: Mapping[str, object] | None, groups: tuple[ParamGroup, ...], notes: Report
) -> int:  # fmt: skip
    """The iteration, for which a DCP folder has no place of its own.

    Args:
        located: Has the step in the folders' names.
        rest: May hold a counter.
        scheduler: Counts its steps.
        groups: Count the optimizer's.
        notes: Told where it comes from.
    """
    if located.step is not None:
        notes.add(Fate.NOTE, f"iteration {located.step}: from the folder's name")
        return located.step
    for path in _COUNTERS:
        found = _number(_at(rest, path))
        if found is not None:
            notes.add(Fate.NOTE, f"iteration {found}: from {'.'.join(path)}")
            return found
    for what, value in (
        ("the scheduler's last_epoch", (scheduler or {}).get(EPOCH)),
        ("the optimizer's step", next((group.fields[STEP] for group in groups if STEP in group.fields), None)),
    ):
        found = _number(value)
        if found is not None:
            notes.add(Fate.DERIVED, f"iteration {found}: {what}, since the folder does not say it")
            return found
    return 0


def _at(value: Any, path: tuple[str, ...]) -> object:
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _number(value: object) -> int | None:
    import torch

    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if plain or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return int(cast(float, value))
    return None


def note_rng(rest: Mapping[str, object], notes: Report) -> None:
    """Say what random states in a DCP folder are worth."""
    if isinstance(rest.get(RNG), Mapping):
        notes.add(
            Fate.NOTE,
            "rng: not bit-exact; torch saves one copy of what is not sharded, of any rank, so these states are of several ranks, "
            "and every rank gets the same",
        )
