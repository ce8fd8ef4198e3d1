"""Taking back what was done, where a later part of the same load refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

from .stateful import Stateful
from .writable import copied


@dataclass(slots=True)
class Undo:
    """Runs what was noted, last first, if its ``with`` block is left by an error; otherwise forgets it."""

    _steps: list[Callable[[], object]] = field(default_factory=list)

    def note(self, step: Callable[[], object]) -> None:
        """Say how something is put back that is about to change."""
        self._steps.append(step)

    def attributes(self, owner: object, names: Iterable[str]) -> None:
        """Attributes that are about to be set are put back, as far as there are any."""
        for name in names:
            if hasattr(owner, name):
                self.note(partial(setattr, owner, name, getattr(owner, name)))

    def state(self, owner: Stateful) -> None:
        """Something is about to take a state: if it, or anything later, refuses, it is given a copy of its former one."""
        self.note(partial(owner.load_state_dict, copied(owner.state_dict())))

    def handed(self, owner: Stateful, state: dict[str, object]) -> None:
        """Hand something a state, to be taken back like that."""
        self.state(owner)
        owner.load_state_dict(state)

    def optimizer(self, optimizer: Any) -> None:
        """Groups and states of a torch optimizer are about to be replaced: they will be the same objects again.

        Tensors in them are not copied: what is installed are other ones, or these, which are filled only once nothing can
        refuse any more.

        Args:
            optimizer: Has ``param_groups`` and ``state``, as torch's have.
        """
        groups, state = optimizer.param_groups, optimizer.state
        fields = [
            {key: list(value) if isinstance(value, list) else value for key, value in one.items()} for one in groups
        ]
        values = {held: dict(value) if isinstance(value, dict) else value for held, value in state.items()}

        def put_back() -> None:
            for group, kept in zip(groups, fields, strict=True):
                group.clear()
                group.update(kept)
            state.clear()
            state.update(values)
            optimizer.param_groups, optimizer.state = groups, state

        self.note(put_back)

    def __enter__(self) -> Undo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._steps:
            self._put_back()

    def _put_back(self) -> None:
        # Others' code: what refuses even its own former state refused the new one before it changed anything, as far
        # as anybody can tell, and the rest must be put back all the same.
        try:
            with suppress(Exception):
                self._steps.pop()()
        finally:
            if self._steps:
                self._put_back()
