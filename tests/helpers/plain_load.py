"""``torch.load`` for files of frameworks that are not installed: their classes become empty ones. Nothing of mcore_rlhf."""

from __future__ import annotations

import copyreg
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

_REAL = {"torch", "numpy", "collections", "argparse", "_codecs", "builtins", "signal"}


class Unknown:
    """Stands for an object of a class that is not installed; equal to another of the same class and arguments."""

    full_name = ""
    args: tuple[object, ...] = ()

    def __init__(self, *args: object) -> None:
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.state = state

    def __reduce__(self) -> tuple[object, ...]:
        made = (type(self), self.args) if "args" in vars(self) else (copyreg.__newobj__, (type(self),))  # type: ignore[attr-defined]
        return (*made, self.state) if hasattr(self, "state") else made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unknown) and (self.full_name, vars(self)) == (other.full_name, vars(other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self.full_name}{vars(self)}"


_unknown: dict[str, type] = {}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in _REAL:
            return super().find_class(module, name)
        full = f"{module}.{name}"
        return _unknown.setdefault(full, type(name, (Unknown,), {"full_name": full}))


_PICKLE = SimpleNamespace(Unpickler=_Unpickler, load=pickle.load, loads=pickle.loads, __name__="plain_load")


def plain_load(path: Path) -> Any:
    """Everything in a ``.pt`` file, tensors as views of their storages, as torch itself reads it.

    For files of our own tests only: whatever else a pickle asks for is done.
    """
    return torch.load(path, map_location="cpu", weights_only=False, pickle_module=_PICKLE)


class _Pickler(pickle._Pickler):  # type: ignore[name-defined,misc]
    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and issubclass(obj, Unknown) and obj.full_name:
            module, _, name = obj.full_name.rpartition(".")
            self.write(pickle.GLOBAL + f"{module}\n{name}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)


def plain_save(tree: Any, path: Path) -> None:
    """Save what :func:`plain_load` gave: unknown classes under their own names, tensors as views of their storages."""
    torch.save(tree, path, pickle_module=SimpleNamespace(Pickler=_Pickler, __name__="plain_load"))


def plain_unpickle(path: Path) -> Any:
    """What a bare pickle holds, such as ``.metadata``."""
    with path.open("rb") as file:
        return _Unpickler(file).load()


def plain_pickle(tree: Any, path: Path) -> None:
    """Write what :func:`plain_unpickle` gave."""
    with path.open("wb") as file:
        _Pickler(file).dump(tree)


def same(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two loaded trees differ: keys, order, types, values, shapes, dtypes, and all bits of tensors."""
    if type(a) is not type(b):
        return [f"{path}: {type(a).__name__} and {type(b).__name__}"]
    if hasattr(a, "__dict__") and type(a).__name__ == "Namespace":
        return same(vars(a), vars(b), f"{path}.")
    if isinstance(a, dict):
        if list(a) != list(b):
            return [f"{path}: keys {_only(a, b)} and {_only(b, a)}, or their order, differ"]
        return [line for key in a for line in same(a[key], b[key], f"{path}/{key}")]
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return [f"{path}: {len(a)} and {len(b)} items"]
        return [line for i, (x, y) in enumerate(zip(a, b, strict=True)) for line in same(x, y, f"{path}[{i}]")]
    return [] if _equal(a, b) else [f"{path}: {a!r:.60} and {b!r:.60}"]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bits(a) == bits(b)
    if hasattr(a, "tobytes"):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b) or (a != a and b != b)


def _only(a: dict[Any, Any], b: dict[Any, Any]) -> list[Any]:
    return [key for key in a if key not in b][:5]


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements in row-major order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
