"""What stands in a tree that was read and not made real: tensors that were found but not loaded, and stubs of classes that are not run.

A stub keeps what the pickle said about an object (arguments, state, items) and does nothing with it. It is
written back under its original name, so that the real framework gets its own object again. While a pickle is
loaded, everything that it names is a stub, torch's functions and numpy's classes too; :mod:`.resolve` then makes
values of those whose meaning is known.
"""

from __future__ import annotations

import argparse
import copyreg
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ..core.catalog import Box, Chunk, Record, Shape, TensorEntry, TensorName, dot, row_major
from ..errors import shown


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that was not read, only found.

    Args:
        record: The storage that holds it.
        start: Its first element in the record.
        shape: Its shape.
        strides: Its strides, in elements.
    """

    record: Record
    start: int
    shape: Shape
    strides: Shape

    @classmethod
    def whole(cls, record: Record, shape: Shape) -> StoredTensor:
        """A contiguous tensor that is the whole of a record."""
        return cls(record, 0, shape, row_major(shape))

    @property
    def stop(self) -> int:
        """One past its last element in the record; ``start`` where it is empty."""
        return self.start + (1 + dot(tuple(n - 1 for n in self.shape), self.strides) if 0 not in self.shape else 0)


def whole_entry(name: TensorName, *replicas: StoredTensor) -> TensorEntry:
    """The entry of a tensor that lies whole in each of several places, the preferred one first.

    Args:
        name: Its identity.
        replicas: Those places, one at least; all of one shape and dtype.
    """
    first = replicas[0]
    chunks = tuple(Chunk(Box.whole(one.shape), one.record, one.start, one.strides) for one in replicas)
    return TensorEntry(name, first.shape, first.record.dtype, chunks)


@dataclass(slots=True)
class StoredArray:
    """A numpy array of numbers, as it lay in a pickle: an RNG state, which most who open a file never look at, and numpy takes
    longer to import than the file to open.

    Args:
        dtype: numpy's name of its element type, with the byte order: ``<u4``.
        shape: Its shape.
        data: Its elements, row by row.
    """

    dtype: str
    shape: Shape
    data: bytes
    _array: Any = field(default=None, compare=False, repr=False)

    def array(self) -> Any:
        """The array itself: the same one for all who ask, as all who named it in the pickle shared it."""
        if self._array is None:
            import numpy as np

            self._array = np.frombuffer(bytearray(self.data), np.dtype(self.dtype)).reshape(self.shape)
        return self._array


@dataclass(frozen=True, slots=True)
class TorchName:
    """A class or function of torch's that we name in what we write, of :data:`.trust.OF_SHARDS`; nothing that was read is one.

    Args:
        name: Its full name.
    """

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """An object of torch's that is made of values of our own in what we write; nothing that was read is one.

    Args:
        of: Its class, or the function that makes it.
        args: What that is given.
        state: The object's attributes; None for none.
        new: Whether it is made by its ``__new__``; else it is called.
    """

    of: TorchName
    args: tuple[Any, ...]
    state: dict[str, Any] | None
    new: bool


def map_tensors(tree: Any, function: Callable[[StoredTensor], Any]) -> Any:
    """A copy of a nest of dictionaries, lists, tuples, Namespaces and stubs with ``function`` applied to its stored
    tensors, and its arrays made.
    """
    if isinstance(tree, StoredTensor):
        return function(tree)
    if isinstance(tree, StoredArray):
        return tree.array()
    if type(tree) in (dict, OrderedDict):
        return type(tree)((key, map_tensors(value, function)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(map_tensors(value, function) for value in tree)
    if type(tree) in NAMESPACES:
        return Namespace({key: map_tensors(value, function) for key, value in vars(tree).items()})
    if isinstance(tree, Stub):
        return tree.mapped(lambda part: map_tensors(part, function))
    return tree


_classes: dict[tuple[str, bool], StubType] = {}
_lock = threading.Lock()
_INT64 = 1 << 63


class StubType(type):
    """The class of all stub classes; one may itself be a value (a function that a config refers to). Equal ones have the same name.

    Attributes:
        stub_name: The full name.
        stub_vouched: Whether the user named it with ``--stub``, so that it may be written.
    """

    stub_name: str
    stub_vouched: bool

    def __call__(cls, *args: Any) -> Any:
        """An object that the pickle makes by a call: an enum's member, a tensor."""
        made: Stub = object.__new__(cls)  # type: ignore[arg-type]  # a StubType is a Stub's class
        made.stub_args, made.stub_called, made.stub_items, made.stub_state = args, True, None, None
        return made

    def __setstate__(cls, _state: object) -> NoReturn:
        raise TypeError(f"{cls.stub_name}: a class has no state")

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, StubType) and getattr(cls, "stub_name", "") == getattr(other, "stub_name", "")

    def __hash__(cls) -> int:
        return hash(getattr(cls, "stub_name", ""))


class Stub(metaclass=StubType):
    """An object of a class that is not loaded.

    Equal stubs have the same class name, arguments, state and items. Entries of a state dictionary can be
    read as attributes: ``loss_scaler.cur_scale``.

    Attributes:
        stub_args: What the pickle passed to the constructor; an enum's value is ``stub_args[0]``.
        stub_state: What it passed to ``__setstate__``; usually the instance's ``__dict__``, or None.
        stub_items: The elements where the class is a list or dictionary subclass, else None.
        stub_called: Whether the pickle called the class (REDUCE) or its ``__new__`` (NEWOBJ).
    """

    __slots__ = ("stub_args", "stub_called", "stub_items", "stub_state")
    stub_args: tuple[Any, ...]
    stub_called: bool
    stub_items: list[Any] | dict[Any, Any] | None
    stub_state: Any

    def __new__(cls, *args: Any) -> Stub:
        """What NEWOBJ makes: take the arguments down, and nothing else."""
        self = super().__new__(cls)
        self.stub_args, self.stub_called, self.stub_items, self.stub_state = args, False, None, None
        return self

    def __setstate__(self, state: Any) -> None:
        """Keep the state, and do nothing with it.

        Raises:
            TypeError: There is one already.
        """
        if self.stub_state is not None:
            raise TypeError(f"{type(self).stub_name}: a second state for one object")
        self.stub_state = state

    def append(self, item: Any) -> None:
        """Keep an element of a list's subclass."""
        self.extend([item])

    def extend(self, items: Any) -> None:
        """Keep elements of a list's subclass.

        Raises:
            TypeError: It was a dictionary before.
        """
        if self.stub_items is None:
            self.stub_items = []
        if type(self.stub_items) is not list or type(items) is not list:
            raise TypeError(f"{type(self).stub_name}: a list and a dictionary at once")
        self.stub_items += items

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.stub_items is None:
            self.stub_items = {}
        if type(self.stub_items) is not dict:
            raise TypeError(f"{type(self).stub_name}: a list and a dictionary at once")
        self.stub_items[key] = value

    def __getattr__(self, name: str) -> Any:
        state = self.stub_state if not name.startswith(("__", "stub_")) else None
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(f"{type(self).stub_name}: the checkpoint stores no {name!r}")

    def mapped(self, function: Callable[[Any], Any]) -> Stub:
        """A copy with a function applied to its arguments, state and items."""
        args, state, items = (function(part) for part in self._content())
        return _rebuild(type(self), args, self.stub_called, items, state)

    def _content(self) -> tuple[Any, ...]:
        return self.stub_args, self.stub_state, self.stub_items

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Stub)
            and type(self).stub_name == type(other).stub_name
            and _same(self._content(), other._content())
        )

    def __hash__(self) -> int:
        """For keys: only of what is like an enum's member, like a path, or one of numpy's numbers; no others can collide."""
        args = self.stub_args[1:] if type(self).stub_name in _SCALARS else self.stub_args
        one = len(args) == 1 and type(args[0]) is int and -_INT64 <= args[0] < _INT64
        texts = args and all(type(arg) in _TEXTS for arg in args)
        if not (one or texts) or self.stub_state is not None or self.stub_items is not None:
            raise TypeError(f"an object of the class {type(self).stub_name} cannot be the key of a dictionary")
        return hash((type(self).stub_name, *args))

    def __repr__(self) -> str:
        parts = [shown(arg) for arg in self.stub_args[:8]]
        parts += [f"state={shown(self.stub_state)}"] if self.stub_state is not None else []
        parts += [f"items={shown(self.stub_items)}"] if self.stub_items is not None else []
        return f"<stub {type(self).stub_name}({', '.join(parts)})>"

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and for sending to other processes; files get the original name instead."""
        content = (self.stub_args, self.stub_called, self.stub_items, self.stub_state)
        return _rebuild, (type(self), *content)


class Namespace:
    """Named values, as ``argparse.Namespace`` holds Megatron's arguments; written back under that name.

    Args:
        values: By name; every name is allowed, and none replaces a method.
    """

    def __init__(self, values: Mapping[str, Any] | None = None) -> None:
        vars(self).update(values or {})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NAMESPACES) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # it can change

    def __repr__(self) -> str:
        return f"Namespace({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


NAMESPACES = (Namespace, argparse.Namespace)
"""What holds arguments: read from a file, or a live trainer's own."""


def stub_class(name: str, vouched: bool = False) -> StubType:
    """The stub class for a full name such as ``megatron.core.enums.ModelType``; one per name and process.

    ``stub_class(name)(value)`` makes an instance that is written as a call with that value: an enum's member.

    Args:
        name: The full name.
        vouched: Whether the user named it with ``--stub``.
    """
    known = _classes.get((name, vouched))
    if known is not None:
        return known
    with _lock:
        if (name, vouched) not in _classes:
            module, _, qualname = name.rpartition(".")
            made = StubType(qualname, (Stub,), {"__slots__": (), "__module__": module, "__qualname__": qualname})
            made.stub_name, made.stub_vouched = name, vouched
            _classes[name, vouched] = made
        return _classes[name, vouched]


def new_stub(name: str, state: Any = None, *args: Any) -> Stub:
    """An instance that is written as an ordinary object: created by ``__new__(*args)``, then given its state.

    Args:
        name: Full name of the class, for example ``deepspeed.utils.tensor_fragment.fragment_address``.
        state: Its ``__dict__``.
        args: Arguments of ``__new__``.
    """
    return _rebuild(stub_class(name), args, False, None, state)


def _rebuild(cls: StubType, args: tuple[Any, ...], called: bool, items: Any, state: Any) -> Stub:
    stub: Stub = Stub.__new__(cls, *args)  # type: ignore[arg-type]  # a StubType is a Stub's class
    stub.stub_called, stub.stub_items, stub.stub_state = called, items, state
    return stub


def _same(a: object, b: object) -> bool:
    try:
        return bool(a == b)
    except (ValueError, RuntimeError):  # arrays inside have no single truth value
        return a is b


_TEXTS = (str, bytes, stub_class("_codecs.encode"))
_SCALARS = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")

copyreg.pickle(StubType, lambda cls: (stub_class, (cls.stub_name, cls.stub_vouched)))
