"""What an FSDP run saves besides model and optimizer: schedulers, RNG states, the step; and a DCP folder's own view of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from mcore_rlhf.core.account import Fate, Inventory, Report
from mcore_rlhf.families.inventory import value_items
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import ParamGroup
from mcore_rlhf.families.torch_groups import STEP
from mcore_rlhf.storage.torch_values import SmallTensor

from .folders import Located
from .keys import KeyLayout

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


def scheduler_key(rest: Mapping[str, object]) -> str:
    """Under which key a run keeps its scheduler: one, or a list of them."""
    return SCHEDULER if SCHEDULER in rest else SCHEDULERS


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
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if plain or (isinstance(value, SmallTensor) and value.numel() == 1):
        return int(cast(float, value))
    return None


def note_rng(rest: Mapping[str, object], notes: Report) -> None:
    """Say what RNG states in a DCP folder are worth."""
    if isinstance(rest.get(RNG), Mapping):
        notes.add(
            Fate.NOTE,
            "rng: not bit-exact; torch saves one copy of what is not sharded, of any rank, so these states are of several ranks, "
            "and every rank gets the same",
        )


_SCHEDULERS = ("lr_schedulers", "lr_scheduler")


@dataclass(slots=True)
class DcpState(ModuleState):
    """A DCP folder's own view of itself.

    Args:
        layout: How its keys are made.
        inner: The DCP folder below the checkpoint's: ``dcp_checkpoint``, or empty.
        weights: Whether RLinf's plain weights lie beside it.
        rest: What is neither the model nor the optimizer: schedulers, RNG states, counters, as the nested dict that was saved.
        groups: Param groups as the folder has them; those of the source may be of another format that it was made of.
        scalars: What the optimizer keeps per parameter that is no tensor of its shape: ``step``.
        derived: Keys of ``rest`` that an earlier conversion has made, for a source that had nothing of the kind.
        differing: Lines of the report that hold for targets with one step per group.
    """

    layout: KeyLayout = field(default_factory=lambda: KeyLayout(()))
    inner: str = ""
    weights: bool = False
    rest: Mapping[str, object] = field(default_factory=dict)
    groups: tuple[ParamGroup, ...] = ()
    scalars: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    differing: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()

    def inventory(self) -> Inventory:
        """What it has, item by item; a scheduler is one of the training state's."""
        rest = {key: value for key, value in self.rest.items() if key not in (*_SCHEDULERS, *self.derived)}
        return {**ModuleState.inventory(self), **dict(value_items(rest))}
