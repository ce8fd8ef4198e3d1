"""What was planned of a source's tensors: of this, and of nothing else, its account says what became of them."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from .catalog import MASTER, PARAM, DType
from .chunks import Chunks
from .plan import FilePlan


class Tally:
    """What was planned of an opened source, and what a target makes of it: the account of its tensors.

    Args:
        opened: The source's table, as it was opened.
    """

    def __init__(self, opened: Chunks) -> None:
        self.opened = opened
        self._own = frozenset(opened.numbers)
        self._planned: set[int] = set()
        self._wanted: dict[str, int] = {}
        self._masters: set[str] = set()
        self._casts: dict[tuple[str, DType, DType], set[str]] = {}

    def add(self, plan: FilePlan, holds: Chunks, source: Chunks) -> None:
        """A file that was planned.

        Args:
            plan: Its plan.
            holds: What it holds, under the target's names.
            source: What it was planned from: the source's table, or a view of it.
        """
        for name, (stored, wanted) in plan.casts.items():
            self._casts.setdefault((name.state, stored, wanted), set()).add(name.param)
        for name, number in zip(holds.names, holds.numbers, strict=True):
            if name.state == MASTER and name not in plan.casts:
                self._masters.add(name.param)
            if name.param not in self._wanted:
                self._wanted[name.param] = prod(holds.tensors.shapes[number])
        if source.tensors is self.opened.tensors:
            self._plan(plan.used)

    def _plan(self, numbers: Iterable[int]) -> None:
        """Note tensors, and those that they are made of."""
        waiting = [number for number in numbers if number not in self._planned]
        while waiting:
            number = waiting.pop()
            if number not in self._planned:
                self._planned.add(number)
                if number not in self._own:
                    waiting.extend(self.opened.tensors.made_of.get(number, ()))

    @property
    def complete(self) -> bool:
        """Whether the tensors that are written have as many elements as those that they are made of, or more.

        A state has the shape of its parameter, and is cut and padded with it: each parameter counts once.
        """
        made_of: dict[str, int] = {}
        for name, number in zip(self.opened.names, self.opened.numbers, strict=True):
            if number in self._planned:
                made_of.setdefault(name.param, prod(self.opened.tensors.shapes[number]))
        return sum(made_of.values()) <= sum(self._wanted.values())

    def casts(self) -> list[tuple[str, DType, DType]]:
        """The conversions of the target's states, but for those of parameters whose masters are in the target as they are."""
        return [cast for cast, params in self._casts.items() if cast[0] != PARAM or params - self._masters]

    def unplanned(self) -> dict[str, list[str]]:
        """By state the parameters of which no plan was made; every state is there."""
        found: dict[str, list[str]] = {}
        for name, number in zip(self.opened.names, self.opened.numbers, strict=True):
            missing = found.setdefault(name.state, [])
            if number not in self._planned:
                missing.append(name.param)
        return found
