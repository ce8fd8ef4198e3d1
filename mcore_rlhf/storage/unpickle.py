"""The one unpickler: a scan, then C's own unpickler with inert stand-ins for every name. Nothing of the pickle is run.

It reads the ``data.pkl`` of ``.pt`` files and of items in ``.distcp`` files, and ``.metadata``, of any protocol from 2 to 5, without
torch. What it returns consists of Python's plain values and containers, of :class:`~.stored.Stub` and their classes, and of
:class:`Storage`; :mod:`.resolve` makes tensors, arrays and other values of them.

Everything that a pickle can put on the stack has a ``__setstate__`` of ours, or is of a type of Python's without attributes: a state
that the pickle applies (BUILD) changes neither a class nor what was checked before. No real mutable class is handed out.
"""

from __future__ import annotations

import io
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import CheckpointError, Corrupt, Incomplete, Unsupported, Untrusted
from .pickle_scan import scan
from .stored import StubType, stub_class
from .trust import PickleVerdict, judge, require_trust

MAX_NBYTES = 1 << 30
_MAX_UNKNOWN = 100
ADVICE = "The file is damaged, or was not written by torch. Copy it again, or use an older step."
_HOSTILE = (
    "No honest checkpoint needs that: do not load this file with anything else either, unless you know who wrote it."
)


class Storage:
    """A tensor's storage that a pickle refers to.

    Args:
        type_name: Full name of torch's class for it.
        key: Its key in the file.
        numel: Elements of that class, or bytes where it is untyped.
    """

    __slots__ = ("key", "numel", "type_name")

    def __init__(self, type_name: str, key: str, numel: int) -> None:
        self.type_name, self.key, self.numel = type_name, key, numel

    def __setstate__(self, _state: object) -> NoReturn:
        raise TypeError("a storage has no state")

    __hash__ = None  # type: ignore[assignment]  # no key of a dictionary


def _no_name(_name: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the names of one kind of file may become, besides what :mod:`.unpickle` says of all.

    Args:
        standins: What to load instead of a stub. Nothing in it may be changed by a state, or do anything when called.
        inert: Whether a name may become a stub in this kind of file.
    """

    standins: Mapping[str, Any]
    inert: Callable[[str], bool] = _no_name


PLAIN = Vocabulary({})
"""Only what is known of all files."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, vocabulary: Vocabulary, stubs: Collection[str]) -> None:
        super().__init__(io.BytesIO(data))
        self._vocabulary, self._stubs = vocabulary, stubs
        self.unknown: list[str] = []

    def find_class(self, module: str, name: str) -> Any:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))  # as in protocol 2
        full = f"{module}.{name}"
        found = self._vocabulary.standins.get(full)
        if found is not None:
            return found
        if self._vocabulary.inert(full) or judge(full, self._stubs) in (PickleVerdict.REAL, PickleVerdict.STUB):
            return stub_class(full, full in self._stubs)
        if len(self.unknown) < _MAX_UNKNOWN:
            self.unknown.append(full)
        return _REFUSED  # the whole is refused when all names are known

    def persistent_load(self, pid: Any) -> Storage:
        if type(pid) is not tuple or len(pid) != 5:
            raise TypeError("a reference to a storage that is not a tuple of five")
        word, kind, key, _location, numel = pid
        exact = type(kind) is StubType and type(key) is str and type(numel) is int and numel >= 0
        if word != "storage" or type(word) is not str or not exact:
            raise TypeError("a reference to a storage that is not one of torch's")
        return Storage(kind.stub_name, key, numel)


_REFUSED = stub_class("mcore_rlhf.Refused")


def unpickle(data: bytes, where: str, stubs: Collection[str] = (), vocabulary: Vocabulary = PLAIN) -> Any:
    """Load a pickle without running anything of it.

    Args:
        data: The pickle.
        where: The file, for messages.
        stubs: Full names of classes to load as stubs, besides those of the known frameworks.
        vocabulary: What else is known in this kind of file.

    Raises:
        Untrusted: It asks for classes or functions that are not allowed, all of which are named; or it would cost more memory or
            time than an honest file does.
        Incomplete: It is cut off.
        Corrupt: It cannot be unpickled.
        Unsupported: It has protocol 0 or 1, or more than 1 GiB.
    """
    if len(data) > MAX_NBYTES:
        raise Unsupported(f"{where}: its pickle has {len(data):,} bytes; at most {MAX_NBYTES:,} are read.")
    _scanned(data, where)
    unpickler = _Unpickler(data, vocabulary, stubs)
    result, failure = None, None
    try:
        result = unpickler.load()
    except Exception as error:  # a forged or damaged pickle can raise anything
        failure = error
    require_trust(unpickler.unknown, stubs, where)
    if failure is None:
        return result
    if isinstance(failure, CheckpointError):
        raise failure
    reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
    raise Corrupt(f"{where}: the pickle inside cannot be read: {reason}\n{ADVICE}") from failure


def _scanned(data: bytes, where: str) -> None:
    try:
        scan(data)
    except Incomplete as error:
        raise Incomplete(f"{where}: the pickle inside cannot be read: {error}.\n{ADVICE}") from None
    except Corrupt as error:
        raise Corrupt(f"{where}: the pickle inside cannot be read: {error}.\n{ADVICE}") from None
    except Unsupported as error:
        raise Unsupported(f"{where}: the pickle inside cannot be read: {error}.") from None
    except Untrusted as error:
        raise Untrusted(f"{where}: the pickle inside is refused: {error}.\n{_HOSTILE}") from None
