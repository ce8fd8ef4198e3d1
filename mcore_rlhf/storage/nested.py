"""Pickles inside of what we write: bytes that a framework hands to its own unpickler, such as Transformer Engine's ``_extra_state``.

Bytes are carried as they are, and what they say is not known. But whoever loads them runs what they call, so that they are followed
here, opcode by opcode and without making an object, as far as an unpickler would come; every call in them must be on the closed lists
of :mod:`.trust`, or be one of torch's that are named here. Bytes that are no pickle call nothing, and pass.

Sources: megatron-core 0.19.2, ``extensions/transformer_engine.py`` (``_encode_extra_state``) and ``safe_globals.py``
(``SafeUnpickler``); torch 2.13.0, ``serialization.py`` (``_load``, ``_legacy_load``); CPython 3.11, ``Lib/pickletools.py``.
"""

from __future__ import annotations

import io
import pickletools
import tarfile
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .trust import MADE_BY_US, WRITTEN, Form, may_stand

_LOADERS = frozenset({"torch.storage._load_from_bytes", "megatron.core.safe_globals.safe_load_from_bytes"})
"""What torch calls for a storage inside of a plain pickle: with bytes, which are followed in their turn."""
_OF_CLASS = "torch._tensor._rebuild_from_type_v2"
_TENSORS = frozenset({f"torch._utils._rebuild_{name}" for name in ("tensor_v2", "tensor_v3", "parameter")})
_CLASSES = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"})
_CALLED = (
    MADE_BY_US | _TENSORS | _LOADERS | {_OF_CLASS, "builtins.list", "builtins.dict", "builtins.tuple", "io.BytesIO"}
)
_MOST_STEPS = 1 << 20
_BYTES = "_codecs.encode"
"""How protocol 2 writes bytes."""
_ZIP, _MOST, _DEEPEST = b"PK\3\4", 256 << 20, 8
_SCRIPT = "constants.pkl"
"""What a zip has that torch takes for a program of TorchScript."""


@dataclass(frozen=True, slots=True)
class _Name:
    """A class or function on the stack."""

    full: str


_OTHER = object()
_MARK = object()


def calls_of(data: bytes, depth: int = 0) -> list[str]:
    """What an unpickler would call for these bytes that is on no list; nothing for bytes that are no pickle.

    Args:
        data: A pickle or several, a file of ``torch.save``, or anything else.
        depth: How many pickles this one is inside of.
    """
    if depth == _DEEPEST:
        return ["a pickle in a pickle, too deep to be looked into"]
    if data[:4] == _ZIP:
        return _of_zip(data, depth)
    if _is_tar(data):
        return ["an archive of torch's before 0.1.10"]
    found: list[str] = []
    at = 0
    while at < len(data):
        machine = _Machine(depth)
        stopped = machine.run(data, at)
        found += machine.found
        if stopped is None:
            break
        at = stopped
    return list(dict.fromkeys(found))


def _of_zip(data: bytes, depth: int) -> list[str]:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as zipped:
            names = zipped.namelist()
            small = sum(item.file_size for item in zipped.infolist()) <= _MOST
            if not small or len(set(names)) < len(names) or any(name.endswith(_SCRIPT) for name in names):
                return ["a zip that is none of torch.save's"]
            return [call for name in names if name.endswith(".pkl") for call in calls_of(zipped.read(name), depth + 1)]
    except (zipfile.BadZipFile, OSError, ValueError, RuntimeError, NotImplementedError, EOFError):
        return ["a zip that cannot be looked into"]


def _is_tar(data: bytes) -> bool:
    """Whether torch's oldest loader would take them for its own: an archive with a pickle in it."""
    if len(data) < tarfile.BLOCKSIZE:
        return False
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            return archive.next() is not None
    except (tarfile.TarError, OSError, ValueError, EOFError):
        return False


@dataclass(slots=True)
class _Machine:
    """One pickle, followed without making anything: names, texts, bytes and tuples are themselves, all else is one thing."""

    depth: int
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)

    def run(self, data: bytes, at: int) -> int | None:
        """Follow the pickle that begins there; where it ends, or None where an unpickler would have stopped before."""
        reader = io.BytesIO(data)
        reader.seek(at)
        try:
            for number, (opcode, argument, _) in enumerate(pickletools.genops(reader)):
                if number == _MOST_STEPS:
                    self.found.append("more than can be followed")
                    return None
                if opcode.name == "STOP":
                    return reader.tell()
                self._step(opcode, argument)
        except Exception:  # any damage: a loader stops here as well, and what it had called by then was seen
            return None
        return None

    def _step(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        special: Callable[[_Machine, Any], None] | None = _STEPS.get(opcode.name)
        if special is not None:
            special(self, argument)
        elif opcode.name.startswith("EXT"):
            raise ValueError  # numbers of classes, of which Python registers none
        else:
            self._moved(opcode, argument)

    def _moved(self, opcode: pickletools.OpcodeInfo, argument: Any) -> None:
        """What an opcode that calls nothing takes and leaves, as pickletools tells it."""
        before, after = [item.name for item in opcode.stack_before], opcode.stack_after
        if "stackslice" in before:
            self._since_mark()
            before = before[: before.index("mark")]
        for _ in before:
            self.stack.pop()
        text = type(argument) in (str, bytes, bytearray) and not before
        self.stack += [argument if text else _MARK if item.name == "mark" else _OTHER for item in after]

    def _since_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError
        parts = self.stack[at + 1 :]
        del self.stack[at:]
        return parts

    def named(self, module: str, name: str) -> None:
        """A global, under the name that Python 3 has for it."""
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        self.stack.append(_Name(f"{module}.{name}"))

    def stacked(self) -> None:
        """A global whose names are on the stack."""
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise ValueError
        self.named(module, name)

    def tupled(self, count: int | None) -> None:
        """A tuple of what is on top."""
        if count is None:
            parts = self._since_mark()
        else:
            parts = self.stack[len(self.stack) - count :]
            del self.stack[len(self.stack) - count :]
        self.stack.append(tuple(parts))

    def kept(self, index: int | None) -> None:
        """Remember what is on top."""
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]

    def called(self, new: bool) -> None:
        """A call, or the making of an object. Only what was named can be called: nothing that is made is a function."""
        args, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, _Name):
            raise ValueError
        full = function.full
        if not self._is_known(full, args, new):
            self.found.append(full)
        elif full in _LOADERS:
            self.found += calls_of(bytes(args[0]), self.depth + 1)
        self.stack.append(args[0].encode("latin-1") if full == _BYTES and type(args[0]) is str else _OTHER)

    def odd(self, named: str | None = None) -> None:
        """A call in a way that no framework's pickle has: of a name, or of the first value behind a mark."""
        parts = self._since_mark()
        function = parts[0] if named is None else _Name(named)
        if isinstance(function, _Name):
            self.found.append(function.full)
        self.stack.append(_OTHER)

    def with_keywords(self) -> None:
        """An object that is made with arguments by name."""
        del self.stack[-2:]
        self.stack += [_MARK, self.stack.pop()]
        self.odd()

    def built(self) -> None:
        """A state, which a class must not be given."""
        self.stack.pop()
        if isinstance(self.stack[-1], _Name):
            self.found.append(self.stack[-1].full)

    def _is_known(self, full: str, args: Any, new: bool) -> bool:
        named = [part.full for part in args if isinstance(part, _Name)] if type(args) is tuple else [""]
        if full == _OF_CLASS:
            return len(named) == 2 and named[0] in _TENSORS and named[1] in _CLASSES and isinstance(args[0], _Name)
        if full in _LOADERS:
            return len(args) == 1 and isinstance(args[0], bytes | bytearray)
        form = WRITTEN.get(full, Form.VALUE)
        return (full in _CALLED or (new == (form in (Form.OBJECT, Form.TUPLE)) and form is not Form.VALUE)) and all(
            map(may_stand, named)
        )


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "GLOBAL": lambda machine, argument: machine.named(*argument.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.stacked(),
    "TUPLE": lambda machine, _: machine.tupled(None),
    "EMPTY_TUPLE": lambda machine, _: machine.tupled(0),
    **{f"TUPLE{count}": lambda machine, _, count=count: machine.tupled(count) for count in (1, 2, 3)},  # type: ignore[misc]
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda machine, argument: machine.kept(argument)),
    "MEMOIZE": lambda machine, _: machine.kept(None),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda machine, index: machine.stack.append(machine.memo[index])),
    "DUP": lambda machine, _: machine.stack.append(machine.stack[-1]),
    "REDUCE": lambda machine, _: machine.called(new=False),
    "NEWOBJ": lambda machine, _: machine.called(new=True),
    "NEWOBJ_EX": lambda machine, _: machine.with_keywords(),
    "INST": lambda machine, argument: machine.odd(argument.replace(" ", ".", 1)),
    "OBJ": lambda machine, _: machine.odd(),
    "BUILD": lambda machine, _: machine.built(),
}  # fmt: skip
