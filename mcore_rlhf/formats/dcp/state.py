"""A DCP folder's own view of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate, Inventory
from mcore_rlhf.families.fsdp.state import ONE_SCHEDULER, RNG, SCHEDULERS, scheduler_of
from mcore_rlhf.families.inventory import value_items
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import ParamGroup

from .keys import KeyLayout


def note_rng(rest: Mapping[str, object], notes: Report) -> None:
    """Say what RNG states in a DCP folder are worth."""
    if isinstance(rest.get(RNG), Mapping):
        notes.add(
            Fate.NOTE,
            "rng: not bit-exact; torch saves one copy of what is not sharded, of any rank, so these states are of several ranks, "
            "and every rank gets the same",
        )


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
        _, other = scheduler_of(self.rest)
        rest = {k: value for k, value in other.items() if k not in (SCHEDULERS, *ONE_SCHEDULER, *self.derived)}
        return {**ModuleState.inventory(self), **dict(value_items(rest))}
