"""What was planned of a source's tensors: of this, and of nothing else, its account says what became of them."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from operator import itemgetter

from .catalog import MASTER, PARAM, DType
from .chunks import Chunks
from .plan import FilePlan

_param_of, _state_of = itemgetter(1), itemgetter(2)  # of a name


class Tally:
    """What was planned of an opened source, and what a target makes of it: the account of its tensors.

    Args:
        opened: The source's table, as it was opened.
    """

    def __init__(self, opened: Chunks) -> None:
        self.opened = opened
        self._own = frozenset(opened.numbers)
        self._planned: set[int] = set()
        self._wanted: set[str] = set()
        self._numel = 0
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
        masters = [name for name in holds.names if name.state == MASTER]
        self._masters.update(name.param for name in masters if name not in plan.casts)
        if not self._wanted >= set(map(_param_of, holds.names)):
            for name, number in zip(holds.names, holds.numbers, strict=True):
                if name.param not in self._wanted:
                    self._wanted.add(name.param)
                    self._numel += prod(holds.tensors.shapes[number])
        if source.tensors is self.opened.tensors:
            self._plan(plan.used)

    def _plan(self, numbers: Collection[int]) -> None:
        """Note tensors, and those that they are made of."""
        while not self._planned.issuperset(numbers):
            new = set(numbers) - self._planned
            self._planned |= new
            numbers = {one for number in new - self._own for one in self.opened.tensors.made_of.get(number, ())}

    @property
    def complete(self) -> bool:
        """Whether the tensors that are written have as many elements as those that they are made of, or more.

        A state has the shape of its parameter, and is cut and padded with it: each parameter counts once.
        """
        opened = self.opened
        params = dict(zip(map(_param_of, reversed(opened.names)), reversed(opened.numbers), strict=True))
        if not self._planned >= self._own:
            planned = [at for at, number in enumerate(opened.numbers) if number in self._planned]
            params = {opened.names[at].param: opened.numbers[at] for at in reversed(planned)}
        return sum(prod(opened.tensors.shapes[number]) for number in params.values()) <= self._numel

    def casts(self) -> list[tuple[str, DType, DType, bool]]:
        """The conversions of the target's states, and of each whether all of its parameters' masters are in the target as they are."""
        return [(*cast, cast[0] == PARAM and params <= self._masters) for cast, params in self._casts.items()]

    def unplanned(self) -> dict[str, list[str]]:
        """By state the parameters of which no plan was made; every state is there."""
        found: dict[str, list[str]] = {state: [] for state in dict.fromkeys(map(_state_of, self.opened.names))}
        if not self._planned >= self._own:
            for name, number in zip(self.opened.names, self.opened.numbers, strict=True):
                if number not in self._planned:
                    found[name.state].append(name.param)
        return found
