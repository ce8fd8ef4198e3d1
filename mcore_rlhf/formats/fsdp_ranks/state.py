"""A folder of rank files' own view of itself: how its run writes them, and the random states of every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, ClassVar

from mcore_rlhf.core.account import Report
from mcore_rlhf.core.facts import Fate, Inventory, Item, Kind, Rule, Values
from mcore_rlhf.families.fsdp.state import RNG, random_states
from mcore_rlhf.families.module import ModuleState
from mcore_rlhf.families.source import Source
from mcore_rlhf.storage.torch_values import SmallTensor

from .manner import Manner

_OTHERS = Item(Kind.RNG, "rng of other ranks than the first")
Rng = Mapping[str, object]
_OF_OTHERS: Rule[RanksState] = Rule(
    Fate.LOST,
    "rng: of rank 0 only; the files of {found} other ranks are not carried",
    lambda own: max(len(own.random) - 1, 0),
    [_OTHERS],
)
"""Formats that are loaded by any number of ranks keep the random states of one."""


@dataclass(slots=True)
class RanksState(ModuleState):
    """What rank files keep besides what all formats under a module's names do.

    Args:
        manner: How they were written; None for a mesh of several axes, which is read and not written.
        random: The random states of every rank, in order; empty where there are none.
    """

    homeless: ClassVar[Sequence[Rule[Any]]] = (*ModuleState.homeless, _OF_OTHERS)
    manner: Manner | None = None
    random: tuple[Rng, ...] = ()

    @property
    def fsdp(self) -> int:
        """See :attr:`ModuleState.fsdp`."""
        return self.manner.version if self.manner is not None else 0

    def inventory(self) -> Inventory:
        """What it has, item by item."""
        others = {_OTHERS: self.random[1:]} if self.random[1:] else {}
        return {**ModuleState.inventory(self), **others}


_ITEMS = (Item(Kind.RNG),)
_LEFT_OUT: Rule[object] = Rule(
    Fate.LOST, "rng: left out, as --rng drop asks; verl goes on with what a new run has", of=_ITEMS
)
_KEPT: Rule[object] = Rule(Fate.KEPT, "rng: of every rank its own", of=_ITEMS)
_DERIVED: Rule[Values] = Rule(Fate.DERIVED, "rng: of every rank its own, derived from {first}{more}", dict, _ITEMS)


def keeps_states(source: Source, world: int, wanted: str | None) -> bool:
    """Whether every rank of a target keeps its own random states; arguments as for :func:`states_of_ranks`."""
    own = RanksState.of(source)
    return own is not None and len(own.random) == world and wanted in (None, "keep")


def states_of_ranks(source: Source, world: int, wanted: str | None, report: Report) -> list[Rng | None]:
    """The random states of every rank of a target.

    Args:
        source: What it is made of.
        world: Ranks of the target.
        wanted: ``keep``, ``derive``, ``drop``; None for ``keep`` where every rank has its own.
        report: Told what becomes of them.
    """
    own = RanksState.of(source)
    saved = () if own is None else own.random
    if wanted == "drop":
        report.through([_LEFT_OUT], None)
        return [None] * world
    if keeps_states(source, world, wanted):
        report.through([_KEPT], None)
        return list(saved)
    first = saved[0] if saved else source.state.other.get(RNG)
    lacking = f"; --rng keep keeps those of {world} ranks, and the source has those of {len(saved) or 'none'}"
    of = "that of rank 0" if first else f"iteration {source.state.iteration}"
    report.through([_DERIVED], {"first": of, "more": lacking if wanted == "keep" else ""})
    known = sha256(_plain(first) + f"/{source.state.iteration}".encode()).digest()
    return [random_states(sha256(known + f"/{rank}".encode()).digest()) for rank in range(world)]


def _plain(value: Any) -> bytes:
    """The same bytes for equal states."""
    if isinstance(value, Mapping):
        return b"".join(
            str(key).encode() + _plain(item) for key, item in sorted(value.items(), key=lambda of: str(of[0]))
        )
    if isinstance(value, list | tuple):
        return b"".join(map(_plain, value))
    if isinstance(value, SmallTensor):
        return value.contiguous()
    return value.tobytes() if hasattr(value, "tobytes") else repr(value).encode()
