"""Putting functions in the place of another package's, wherever they have been imported to, and putting them back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


@dataclass(slots=True)
class Replacements:
    """Functions of other modules that stand aside for a while."""

    _undo: list[tuple[ModuleType, str, Function]] = field(default_factory=list)

    def replace(self, module: ModuleType, name: str, new: Function) -> None:
        """Replace a function in its own module, and in every module that has imported it under its name.

        ``from a import f`` copies the reference, so replacing ``a.f`` alone would miss it. Modules that are imported later
        find the new one.

        Args:
            module: Where it is defined.
            name: Its name.
            new: What stands in its place.
        """
        old: Function = getattr(module, name)
        others: list[object] = list(sys.modules.values())
        for one in others:
            # vars, not getattr: a lazy module must not be made to import something
            if isinstance(one, ModuleType) and vars(one).get(name) is old:
                self._undo.append((one, name, old))
                setattr(one, name, new)

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            module, name, old = self._undo.pop()
            setattr(module, name, old)
