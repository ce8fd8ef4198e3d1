"""What a trainer imports at the top and no checkpoint needs: modules of which every attribute is a class that does nothing.

Generation (vllm), attention kernels (flash-attn), loggers and graders stand at the top of the modules that save and load. Where such a
package is not installed an empty one takes its place, of those names that a job lists and of no others: a missing module that nobody
listed is an error. Nothing that saves, loads or trains is ever one of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__module__": self.__name__, "__init__": lambda self, *given, **named: None})
        setattr(self, name, made)
        return made


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__version__ = "0"  # type: ignore[attr-defined]


class _Finder(MetaPathFinder):
    """Finds what is listed, and what lies below it."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not any(fullname == name or fullname.startswith(f"{name}.") for name in self.names):
            return None
        return ModuleSpec(fullname, _Loader(), is_package=True)


def stand_in(*names: str, instead: bool = False) -> None:
    """Let modules be empty ones where they are not installed.

    Args:
        names: Of packages, or of modules in a package that is there.
        instead: Even where they are: for what runs code of a GPU as it is imported.
    """
    sys.meta_path.insert(0 if instead else len(sys.meta_path), _Finder(names))
