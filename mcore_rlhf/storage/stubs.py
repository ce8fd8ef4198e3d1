"""Inert stand-ins for the classes of training frameworks that a checkpoint's pickle names.

A stub keeps what the pickle said about an object (arguments, state, items) and does nothing with it. It is
written back under its original name, so that the real framework gets its own object again.
"""

from __future__ import annotations

import copyreg
import threading
from typing import Any

_classes: dict[str, StubType] = {}
_lock = threading.Lock()


class StubType(type):
    """The class of all stub classes; one may itself be a value (a function that a config refers to)."""

    stub_name: str


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
        """Take the arguments down; ``__init__`` follows only where the pickle calls the class."""
        self = super().__new__(cls)
        self.stub_args, self.stub_called, self.stub_items, self.stub_state = args, False, None, None
        return self

    def __init__(self, *args: Any) -> None:
        self.stub_called = True

    def __setstate__(self, state: Any) -> None:
        """Keep the state, and do nothing with it."""
        self.stub_state = state

    def __getattr__(self, name: str) -> Any:
        state = self.stub_state if not name.startswith(("__", "stub_")) else None
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(f"{type(self).stub_name}: the checkpoint stores no {name!r}")

    def _content(self) -> tuple[Any, ...]:
        return self.stub_args, self.stub_state, self.stub_items

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stub) and type(self) is type(other) and _same(self._content(), other._content())

    def __hash__(self) -> int:
        return hash(type(self).stub_name)  # arguments need not be hashable

    def __repr__(self) -> str:
        parts = [repr(arg) for arg in self.stub_args]
        parts += [f"state={self.stub_state!r}"] if self.stub_state is not None else []
        parts += [f"items={self.stub_items!r}"] if self.stub_items is not None else []
        return f"<stub {type(self).stub_name}({', '.join(parts)})>"

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and for sending to other processes; files get the original name instead."""
        content = (self.stub_args, self.stub_called, self.stub_items, self.stub_state)
        return _rebuild, (type(self).stub_name, *content)


def stub_class(name: str) -> StubType:
    """The stub class for a full name such as ``megatron.core.enums.ModelType``; one per name and process.

    ``stub_class(name)(value)`` makes an instance that is written as a call with that value: an enum's member.
    """
    with _lock:
        if name not in _classes:
            module, _, qualname = name.rpartition(".")
            made = StubType(qualname, (Stub,), {"__slots__": (), "__module__": module, "__qualname__": qualname})
            made.stub_name = name
            _classes[name] = made
        return _classes[name]


def new_stub(name: str, state: Any = None, *args: Any) -> Stub:
    """An instance that is written as an ordinary object: created by ``__new__(*args)``, then given its state.

    Args:
        name: Full name of the class, for example ``deepspeed.utils.tensor_fragment.fragment_address``.
        state: Its ``__dict__``.
        args: Arguments of ``__new__``.
    """
    return _rebuild(name, args, False, None, state)


def _rebuild(name: str, args: tuple[Any, ...], called: bool, items: Any, state: Any) -> Stub:
    stub: Stub = Stub.__new__(stub_class(name), *args)  # type: ignore[arg-type]  # a StubType is a Stub's class
    stub.stub_called, stub.stub_items, stub.stub_state = called, items, state
    return stub


def _same(a: object, b: object) -> bool:
    try:
        return bool(a == b)
    except (ValueError, RuntimeError):  # arrays inside have no single truth value
        return a is b


copyreg.pickle(StubType, lambda cls: (stub_class, (cls.stub_name,)))
