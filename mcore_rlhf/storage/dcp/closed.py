"""Unpickling in a closed world: for pickles that torch's ``weights_only`` unpickler does not read.

Those are ``.metadata``, which has pickle protocol 4, and files with DTensors in them, which torch can only make of its own classes.
Every name becomes what a table says, or an inert stub of :mod:`..stubs`; names that are not trusted are refused before the result
is used. No class of the checkpoint is imported, and nothing of it is called. What a table gives must be safe to be called with
anything, and must not be changed by a state that the pickle applies to it (see :class:`Function`).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection
from typing import Any

from mcore_rlhf.core.dtype import dtype_of
from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete

from ..stubs import stub_class
from ..trust import require_trust

RESTORE = "Copy the folder again from where it was written, or use an older step."


class Function:
    """A function that a pickle may call, whose attributes it cannot set."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        return self._call(*args)

    def __setstate__(self, state: Any) -> None:
        """Refuse a state.

        Raises:
            TypeError: Always.
        """
        raise TypeError("a function has no state")


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, resolve: Callable[[str], Any], persistent: Callable[[Any], Any] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._resolve, self._persistent = resolve, persistent
        self.unknown: list[str] = []

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        found = self._resolve(full)
        if found is not None:
            return found
        if module == "torch" and is_dtype(name):
            return full  # as a string: no state of the pickle can change one
        self.unknown.append(full)
        return stub_class(full)

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise pickle.UnpicklingError("a storage where none belongs")
        return self._persistent(pid)


def is_dtype(name: object) -> bool:
    """Whether that is the name of an element type, with or without ``torch.``."""
    try:
        dtype_of(name)
    except ValueError:
        return False
    return True


def unpickle_closed(
    data: bytes,
    where: str,
    resolve: Callable[[str], Any],
    stubs: Collection[str] = (),
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Unpickle without running anything of the pickle.

    Args:
        data: The pickle.
        where: The file, for messages.
        resolve: What a full name is loaded as; None for a name that it does not know. Element types come as strings.
        stubs: Names that the user allows as inert stubs.
        persistent: What a persistent id is loaded as.

    Raises:
        Untrusted: It names something that is not known to be harmless; all of them are listed.
        Incomplete: It is cut off.
        Corrupt: It is no pickle, or makes no sense.
    """
    unpickler = _Unpickler(data, resolve, persistent)
    failure: Exception | None = None
    result: Any = None
    try:
        result = unpickler.load()
    except Exception as error:  # a forged or damaged pickle can raise anything
        failure = error
    require_trust(unpickler.unknown, stubs, where)
    if isinstance(failure, CheckpointError):
        raise failure
    if failure is not None:
        kind = Incomplete if isinstance(failure, EOFError) or "truncated" in str(failure) else Corrupt
        raise kind(f"{where}: the pickle cannot be read: {type(failure).__name__}: {failure}\n{RESTORE}") from failure
    return result
