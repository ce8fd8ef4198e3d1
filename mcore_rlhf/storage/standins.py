"""Our own equivalents of harmless classes that torch's restricted unpickler cannot build, or not safely.

numpy's ``dtype.__setstate__`` believes any flags it is given, so that a forged pickle makes it treat raw
bytes as object pointers (numpy ``descriptor.c``, ``arraydescr_setstate``). Therefore no numpy code sees the
pickle: these classes take down what it says, and their ``resolve`` builds the array from checked facts.
defaultdict, deque and framework subclasses of list and dict come as exact lists and OrderedDicts, as torch's
unpickler fills no others, and are remembered.
"""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

from ..errors import Corrupt, Unsupported
from .stubs import Stub, StubType

_DTYPE_CODE = re.compile(r"[<>|=]?(\?|[biufcO]\d+|[SUV]\d*)")
_Plain = TypeVar("_Plain")
_FACTORIES = (None, list, dict, int, float, str, bool, set, tuple)


class PickledDtype:
    """What a pickle says about a ``numpy.dtype``: the type's code, then a state with its byte order."""

    def __init__(self, code: Any, *_flags: Any) -> None:
        self.code: Any = code
        self.state: Any = (3, "|", None, None, None, -1, -1, 0)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def resolve(self) -> Any:
        """The ``numpy.dtype``.

        Raises:
            Unsupported: A structured, date or otherwise unusual type.
        """
        import numpy as np

        code, state = self.code, self.state
        plain = isinstance(code, str) and _DTYPE_CODE.fullmatch(code)
        if not plain or not isinstance(state, tuple) or len(state) < 5 or any(state[2:5]):
            raise Unsupported(f"a numpy array of dtype {code!r}, which is not a plain number or string type")
        dtype = np.dtype(code)
        return dtype.newbyteorder(state[1]) if state[1] in ("<", ">") else dtype


class PickledArray:
    """What a pickle says about a ``numpy.ndarray``."""

    def __init__(self, *_args: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def resolve(self, element: Callable[[Any], Any]) -> Any:
        """The array; ``element`` is applied to the elements of an array of objects.

        Raises:
            Corrupt: The data does not fit the shape.
            Unsupported: See :meth:`PickledDtype.resolve`.
        """
        import numpy as np

        shape, dtype, fortran, data = self._checked()
        if dtype.hasobject:
            objects = np.empty(shape, dtype)
            for index, value in enumerate(data):
                objects.flat[index] = element(value)
            return objects
        order: Any = "F" if fortran else "C"
        return np.frombuffer(data, dtype).reshape(shape, order=order).copy(order)

    def _checked(self) -> tuple[tuple[int, ...], Any, bool, Any]:
        if not isinstance(self.state, tuple) or len(self.state) != 5:
            raise Corrupt("a numpy array without its five-part state")
        _, shape, dtype, fortran, data = self.state
        if not isinstance(shape, tuple) or any(type(n) is not int or n < 0 for n in shape):
            raise Corrupt(f"a numpy array of shape {shape!r}")
        real = _dtype(dtype)
        nbytes = prod(shape) * (1 if real.hasobject else real.itemsize)
        if not isinstance(data, list if real.hasobject else bytes) or len(data) != nbytes:
            raise Corrupt(f"a numpy array of shape {shape} and dtype {real} whose data does not have {nbytes} bytes")
        return shape, real, bool(fortran), data


@dataclass(frozen=True, slots=True, eq=False)
class PickledScalar:
    """What a pickle says about a numpy scalar."""

    dtype: Any
    data: Any

    def resolve(self) -> Any:
        """The numpy scalar.

        Raises:
            Corrupt: The data does not fit the type.
            Unsupported: See :meth:`PickledDtype.resolve`.
        """
        array = PickledArray()
        array.state = (1, (), self.dtype, False, self.data)
        return array.resolve(lambda value: value)[()]


def empty_bytes() -> bytes:
    """``bytes`` as protocol 2 calls it; with a number it could be made to fill the memory."""
    return b""


def reconstruct(subtype: Any, *_args: Any) -> PickledArray:
    """``numpy._core.multiarray._reconstruct``: an empty array whose state follows.

    Raises:
        Unsupported: A subclass of ndarray.
    """
    if subtype is not PickledArray:
        raise Unsupported(f"a numpy array of the class {getattr(subtype, 'stub_name', subtype)}")
    return PickledArray()


def _dtype(pickled: Any) -> Any:
    if not isinstance(pickled, PickledDtype):
        raise Corrupt(f"a numpy array whose dtype is a {type(pickled).__name__}")
    return pickled.resolve()


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """A plain list or OrderedDict that stands for another container; it is kept alive so that its id stays
    its own.
    """

    plain: Any
    build: Callable[[Any], Any]


@dataclass(slots=True, eq=False)
class Containers:
    """The containers of one pickle that are loaded as plain ones, and what each one is in truth."""

    marks: dict[int, _Mark] = field(default_factory=dict)

    def defaultdict(self, factory: Any = None) -> OrderedDict[Any, Any]:
        """``collections.defaultdict``.

        Raises:
            Unsupported: Its factory is not a builtin type.
        """
        if factory not in _FACTORIES:
            raise Unsupported(f"a defaultdict whose factory is {factory!r}")
        return self._mark(OrderedDict(), lambda plain: defaultdict(factory, plain))

    def deque(self, items: Any = (), maxlen: int | None = None) -> list[Any]:
        """``collections.deque``."""
        return self._mark(list(items), lambda plain: deque(plain, maxlen))

    def subclass(self, stub: StubType, plain: type[list[Any]] | type[OrderedDict[Any, Any]]) -> type:
        """A class that stands for a framework's subclass of list or dict: its instances come as plain
        containers.
        """

        def new(_cls: type, *args: Any) -> Any:
            def build(filled: Any) -> Stub:
                made: Stub = Stub.__new__(stub, *args)  # type: ignore[arg-type]  # a StubType is a Stub's class
                made.stub_items = list(filled) if isinstance(filled, list) else dict(filled)
                made.stub_state = dict(vars(filled)) or None if isinstance(filled, OrderedDict) else None
                return made

            return self._mark(plain(), build)

        return type(stub.__name__, (), {"__new__": new, "__module__": stub.__module__, "stub": stub})

    def _mark(self, plain: _Plain, build: Callable[[Any], Any]) -> _Plain:
        self.marks[id(plain)] = _Mark(plain, build)
        return plain
