"""Pickles that we write as they are: bytes that a framework hands to its own unpickler, such as Transformer Engine's ``_extra_state``,
and whole files that go along byte for byte, such as a trainer's ``training_args.bin``.

Bytes are carried as they are, and what they say is not known. But whoever loads them runs what they call, so that they are followed
here, opcode by opcode and without making an object, as far as an unpickler would come; every call in them must be on the closed lists
of :mod:`.trust`, or be one of torch's that are named here, and no other name may stand there at all: what stands as a value can be called
in ways that no opcode shows (as an attribute ``__setstate__`` or ``append`` of an object that is built twice). Where Python's own parser of
opcodes stops and an unpickler goes on, it is gone on here. Bytes that are no pickle call nothing, and pass.

Sources: megatron-core 0.19.2, ``extensions/transformer_engine.py`` (``_encode_extra_state``) and ``safe_globals.py``
(``SafeUnpickler``); torch 2.13.0, ``serialization.py`` (``_load``, ``_legacy_load``); CPython 3.11, ``Lib/pickletools.py`` and
``Modules/_pickle.c`` (``load_int``, ``load_string``, ``load_build``, ``do_append``).
"""

from __future__ import annotations

import codecs
import io
import pickletools
import tarfile
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import Corrupt, Incomplete, NotACheckpoint, Unsupported
from .paths import ReadablePath
from .reading import ByteSource, opened
from .torchzip import directory_of
from .trust import MADE_BY_US, WRITTEN, AllowedForm, is_harmful, may_stand

_LOADERS = frozenset({"torch.storage._load_from_bytes", "megatron.core.safe_globals.safe_load_from_bytes"})
"""What torch calls for a storage inside of a plain pickle: with bytes, which are followed in their turn."""
_OF_CLASS = "torch._tensor._rebuild_from_type_v2"
_TENSORS = frozenset({f"torch._utils._rebuild_{name}" for name in ("tensor_v2", "tensor_v3", "parameter")})
_CLASSES = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"})
_CALLED = (
    MADE_BY_US | _TENSORS | _LOADERS | {_OF_CLASS, "builtins.list", "builtins.dict", "builtins.tuple", "io.BytesIO"}
)
_MOST_STEPS = 1 << 20
_BYTES, _LATIN = "_codecs.encode", ("latin1", "latin-1")
"""How protocol 2 writes bytes."""
_ZIP, _MOST, _DEEPEST = b"PK\3\4", 256 << 20, 8
_SMALLEST = 16
"""More bytes than None has."""
_PICKLE, _SCRIPT = ".pkl", "constants.pkl"
"""How the pickles in a zip of torch's are called, and the one of which torch takes the zip for a program of TorchScript."""


@dataclass(frozen=True, slots=True)
class _Name:
    """A class or function on the stack."""

    full: str


_OTHER = object()
_MARK = object()


_UNSEEN = "what cannot be looked into"
_TEXTS = frozenset(
    {
        ".json", ".jsonl", ".txt", ".md", ".model", ".jinja", ".py", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".csv", ".tiktoken", ".spm",
        ".bpe", ".vocab", ".merges", ".html", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf", ".log", ".sh",
    }
)  # fmt: skip
"""Endings of files that no program unpickles: they need not be read to know that they call nothing."""


def calls_of_file(path: ReadablePath, stubs: Collection[str] = ()) -> list[str]:
    """What somebody would call who unpickles a file that goes along byte for byte, and that is on no list.

    Args:
        path: A file of any kind; one that is no pickle calls nothing.
        stubs: Full names of classes that the user vouches for; those that can do harm are not among them, whatever he says.

    Raises:
        StorageError: It cannot be read.
    """
    if path.suffix.lower() in _TEXTS:
        return []
    with opened(path) as file:
        if file.nbytes and file.read(0, min(len(_ZIP), file.nbytes)) != _ZIP:
            found = calls_of(file.read(0, file.nbytes)) if file.nbytes <= _MOST else [_UNSEEN]
        elif file.nbytes:
            found = _of_zip(file)
        else:
            found = []
    return [name for name in found if name not in stubs or is_harmful(name)]


def _of_zip(file: ByteSource, depth: int = 0) -> list[str]:
    """Of a file by torch, as torch finds its parts: two directories of one zip may name different ones."""
    try:
        directory = directory_of(file)
        pickles = [member for name, member in directory.members.items() if name.endswith(_PICKLE)]
        if any(member.name.endswith(_SCRIPT) or member.nbytes > _MOST for member in pickles):
            return [_UNSEEN]
        return [call for part in pickles for call in calls_of(file.read(part.byte_offset, part.nbytes), depth + 1)]
    except (Corrupt, Incomplete, Unsupported, NotACheckpoint):
        return [_UNSEEN]


class _InMemory(ByteSource):
    """Bytes that are a file of their own."""

    def __init__(self, data: bytes) -> None:
        super().__init__(Path("bytes"), len(data))
        self._data = data

    def pread(self, nbytes: int, offset: int) -> bytes:
        return self._data[offset : offset + nbytes]


def calls_of(data: bytes, depth: int = 0) -> list[str]:
    """What an unpickler would call for these bytes that is on no list; nothing for bytes that are no pickle.

    Args:
        data: A pickle or several, a file of ``torch.save``, or anything else.
        depth: How many pickles this one is inside of.
    """
    if depth == _DEEPEST:
        return ["a pickle in a pickle, too deep to be looked into"]
    if data[:4] == _ZIP:  # in which names are never packed
        return _of_zip(_InMemory(data), depth) if _PICKLE.encode() in data else []
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


PICKLED_NONE = b"\x80\x04N."
"""As ``pickle.dumps(None)`` makes it."""


def is_none(data: bytes) -> bool:
    """Whether bytes are None, pickled, or as ``torch.save`` has it, and nothing besides.

    Args:
        data: A pickle, a file of ``torch.save``, or anything else.
    """
    if data[:4] != _ZIP:
        return len(data) == len(PICKLED_NONE) and data[:1] == PICKLED_NONE[:1] and data[2:] == PICKLED_NONE[2:]
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as zipped:
            pickled = [item for item in zipped.infolist() if item.filename.endswith(".pkl")]
            return len(pickled) == 1 and pickled[0].file_size < _SMALLEST and is_none(zipped.read(pickled[0]))
    except (zipfile.BadZipFile, OSError, ValueError, RuntimeError, NotImplementedError, EOFError):
        return False


def _is_tar(data: bytes) -> bool:
    """Whether torch's oldest loader would take them for its own: an archive with a pickle in it."""
    if len(data) < tarfile.BLOCKSIZE:
        return False
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            return archive.next() is not None
    except (tarfile.TarError, OSError, ValueError, EOFError):
        return False


def _opcodes(reader: io.BytesIO) -> Iterator[tuple[pickletools.OpcodeInfo, Any]]:
    """Opcodes with their arguments, as ``pickletools.genops`` tells them, but for those that it reads more strictly than an unpickler.

    Raises:
        KeyError: What stands there is no opcode: an unpickler stops there, too.
        ValueError: An argument is cut off; the same.
    """
    while True:
        opcode = _BY_CODE[reader.read(1).decode("latin-1")]
        read = _READ.get(opcode.name, opcode.arg and opcode.arg.reader)
        yield opcode, read(reader) if read else None


def _line(reader: io.BytesIO) -> bytes:
    line = reader.readline()
    if not line.endswith(b"\n"):
        raise ValueError
    return line[:-1]


def _number(reader: io.BytesIO) -> None:
    """Of any base, and whatever C takes for one."""
    _line(reader)


def _quoted(reader: io.BytesIO) -> str:
    """A text of protocol 0, in any encoding."""
    return codecs.escape_decode(_line(reader)[1:-1])[0].decode("latin-1")


def _two_lines(reader: io.BytesIO) -> tuple[str, str]:
    return _line(reader).decode("latin-1"), _line(reader).decode("latin-1")


_READ: dict[str, Callable[[io.BytesIO], Any]] = {
    **dict.fromkeys(("INT", "LONG", "FLOAT", "PERSID"), _number),
    **dict.fromkeys(("GLOBAL", "INST"), _two_lines),
    "STRING": _quoted,
}
_BY_CODE = {opcode.code: opcode for opcode in pickletools.opcodes}
_FILLING = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"})
"""Leave on the stack what they fill: with nothing, whatever it is."""
_MADE_UP = "a name that is put together"


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
            for number, (opcode, argument) in enumerate(_opcodes(reader)):
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
        if opcode.name in _FILLING:
            for _ in before[1:]:
                self._value(self.stack.pop())
            return
        for _ in before:
            self._value(self.stack.pop())
        text = type(argument) in (str, bytes, bytearray) and not before
        self.stack += [argument if text else _MARK if item.name == "mark" else _OTHER for item in after]

    def _value(self, item: Any) -> Any:
        """Something that stands as a value. Of names, only those that may: whoever has one can call it later, unseen."""
        if isinstance(item, _Name) and not may_stand(item.full):
            self.found.append(item.full)
        return item

    def _since_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError
        parts = self.stack[at + 1 :]
        del self.stack[at:]
        return [self._value(part) for part in parts]

    def named(self, module: str, name: str) -> None:
        """A global, under the name that Python 3 has for it."""
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        self.stack.append(_Name(f"{module}.{name}"))

    def stacked(self) -> None:
        """A global whose names are on the stack."""
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is str and type(module) is str:
            self.named(module, name)
        else:
            self.stack.append(_Name(_MADE_UP))

    def tupled(self, count: int | None) -> None:
        """A tuple of what is on top."""
        if count is None:
            parts = self._since_mark()
        else:
            parts = self.stack[len(self.stack) - count :]
            del self.stack[len(self.stack) - count :]
        self.stack.append(tuple(map(self._value, parts)))

    def kept(self, index: int | None) -> None:
        """Remember what is on top."""
        self.memo[len(self.memo) if index is None else index] = self.stack[-1]

    def called(self, new: bool) -> None:
        """A call, or the making of an object. Of what was made: nothing, since no function is, and no name stands there that may not."""
        args, function = self.stack.pop(), self.stack.pop()
        made = _OTHER
        if isinstance(function, _Name):
            full = function.full
            if not self._is_known(full, args, new):
                self.found.append(full)
            elif full in _LOADERS:
                self.found += calls_of(bytes(args[0]), self.depth + 1)
            elif full == _BYTES:
                made = args[0].encode("latin-1")
        self.stack.append(made)

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
        self._value(self.stack.pop())
        if isinstance(self.stack[-1], _Name):
            self.found.append(self.stack[-1].full)

    def _is_known(self, full: str, args: Any, new: bool) -> bool:
        if type(args) is not tuple:
            return False
        if full == _OF_CLASS:
            named = [part.full for part in args if isinstance(part, _Name)]
            return len(named) == 2 and named[0] in _TENSORS and named[1] in _CLASSES and isinstance(args[0], _Name)
        if full in _LOADERS:
            return len(args) == 1 and isinstance(args[0], bytes | bytearray)
        if full == _BYTES:
            return len(args) == 2 and args[1] in _LATIN and type(args[0]) is str and max(args[0], default="") < "\u0100"
        form = WRITTEN.get(full, AllowedForm.VALUE)
        return full in _CALLED or (
            new == (form in (AllowedForm.OBJECT, AllowedForm.TUPLE)) and form is not AllowedForm.VALUE
        )


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "GLOBAL": lambda machine, argument: machine.named(*argument),
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
    "INST": lambda machine, argument: machine.odd(".".join(argument)),
    "OBJ": lambda machine, _: machine.odd(),
    "BUILD": lambda machine, _: machine.built(),
}  # fmt: skip
