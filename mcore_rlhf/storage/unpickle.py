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
import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NoReturn

from ..errors import CheckpointError, Corrupt, Incomplete, Problems, Unsupported, Untrusted
from .meanings import has_meaning
from .pickle_scan import CutOff, Malformed, OtherProtocol, ScanError, scan
from .stored import StubType, stub_class


class Verdict(Enum):
    """What becomes of a global in a pickle."""

    REAL = auto()
    """Made into the value that it means, by code of ours: plain data types, tensors."""
    STUB = auto()
    """Loaded as an inert stub, and written back under its own name."""
    UNKNOWN = auto()
    """Refused, unless the user names it with ``--stub``."""
    HARMFUL = auto()
    """Refused always."""


_STUB_PREFIXES = (
    "megatron.", "deepspeed.", "transformer_engine", "apex.", "nemo.", "verl.", "rlinf.", "omegaconf.",
    "hydra.", "openrlhf.", "slime.", "mbridge.", "transformers.", "peft.", "accelerate.", "lightning.",
    "pytorch_lightning.", "numpy.dtypes.", "numpy.random.",
)  # fmt: skip
"""Frameworks whose enums and dataclasses stand in ``args``, configs and optimizer states."""

_STUB_NAMES = frozenset(
    {"signal.Signals", "signal.Handlers", "types.SimpleNamespace", "uuid.UUID", "decimal.Decimal"}
    | {f"datetime.{name}" for name in ("datetime", "date", "time", "timedelta", "timezone")}
    | {
        f"{module}.{name}"
        for module in ("pathlib", "pathlib._local")  # the second since Python 3.13
        for name in ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
    }
    | {
        "torch._C._nn.gelu",
        "torch.nn.functional.gelu",
        "torch.nn.functional.silu",
        "torch.nn.functional.relu",
    }
    | {"torch.optim.adam.Adam", "torch.optim.adamw.AdamW", "torch.optim.sgd.SGD"}
)
"""Classes of the standard library, and activation functions, that training arguments refer to; and the optimizers that the param groups of
an offloaded one name. Source: megatron-core 0.16.1, ``optimizer/cpu_offloading/hybrid_optimizer.py`` (``defaults``).
"""

_HARMFUL_MODULES = frozenset(
    {
        "_bootsubprocess", "_codecs", "_ctypes", "_frozen_importlib", "_frozen_importlib_external", "_imp",
        "_io", "_operator", "_pickle", "_posixsubprocess", "_socket", "_thread", "_winapi", "asyncio",
        "atexit", "bdb", "builtins", "cProfile", "cffi", "cloudpickle", "code", "codecs", "codeop",
        "commands", "concurrent", "copyreg", "ctypes", "dill", "distutils", "doctest", "ensurepip",
        "faulthandler", "fileinput", "ftplib", "functools", "gc", "glob", "http", "idlelib", "imaplib",
        "imp", "importlib", "inspect", "io", "joblib", "jsonpickle", "linecache", "logging", "mailbox",
        "marshal", "mmap", "multiprocessing", "nntplib", "nt", "ntpath", "operator", "os", "pdb", "pickle",
        "pickletools", "pip", "pkg_resources", "pkgutil", "platform", "poplib", "posix", "posixpath",
        "profile", "pty", "pydoc", "requests", "resource", "runpy", "sched", "setuptools", "shelve",
        "shutil", "signal", "site", "smtplib", "socket", "socketserver", "sqlite3", "ssl", "subprocess",
        "sys", "telnetlib", "tempfile", "test", "threading", "timeit", "tkinter", "trace", "types",
        "unittest", "urllib", "venv", "webbrowser", "winreg", "xmlrpc", "zipimport",
    }
)  # fmt: skip

_HARMFUL_PREFIXES = (
    "numpy.f2py", "numpy.distutils", "numpy.testing", "numpy.load", "numpy.lib", "numpy.ctypeslib",
    "numpy.memmap", "numpy.fromfile", "numpy.core", "numpy._core", "numpy.vectorize", "numpy.frompyfunc",
    "torch.load", "torch.save", "torch.hub", "torch.jit", "torch.serialization", "torch.package",
    "torch.ops", "torch.classes", "torch.utils", "torch.multiprocessing", "torch.testing", "torch.compile",
    "torch._dynamo", "torch._inductor", "torch.library", "torch._library", "torch._C", "torch.fx",
    "torch.export", "torch.storage", "torch.distributed.rpc", "torch.distributed.run",
    "torch.distributed.launch", "torch.distributed.elastic",
)  # fmt: skip

_HARMFUL_PARTS = frozenset(
    {
        "os", "sys", "subprocess", "builtins", "eval", "exec", "execfile", "compile", "system", "popen",
        "getattr", "setattr", "importlib", "ctypes", "shutil",
    }
)  # fmt: skip
"""Not even inside a framework: ``megatron.core.utils`` + ``os.system`` would be found by a real loader."""

_DOTTED_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def judge(name: str, stubs: Collection[str] = ()) -> Verdict:
    """Decide about one global of a pickle, given by its full dotted name.

    A stub runs nothing here, but it is written back under its own name and a real loader would call it there.
    So what can do harm is refused even when the user asks for a stub: a conversion must not carry an attack
    along.
    """
    if has_meaning(name):
        return Verdict.REAL
    if name in _STUB_NAMES:
        return Verdict.STUB
    if _is_harmful(name):
        return Verdict.HARMFUL
    return Verdict.STUB if name.startswith(_STUB_PREFIXES) or name in stubs else Verdict.UNKNOWN


def _is_harmful(name: str) -> bool:
    parts = name.split(".")
    return (
        not _DOTTED_NAME.fullmatch(name)
        or parts[0] in _HARMFUL_MODULES
        or any(name == prefix or name.startswith(prefix + ".") for prefix in _HARMFUL_PREFIXES)
        or any(part in _HARMFUL_PARTS or part.startswith("__") for part in parts if part != "__main__")
    )


def require_trust(names: Iterable[str], stubs: Collection[str], file: str) -> dict[str, Verdict]:
    """Judge all globals of one pickle.

    Args:
        names: Full dotted names.
        stubs: Names that the user wants as stubs (``--stub``).
        file: For the message.

    Returns:
        REAL or STUB for every name.

    Raises:
        Untrusted: At least one is refused; all of them are listed.
    """
    verdicts = {name: judge(name, stubs) for name in sorted(names)}
    problems = Problems()
    for name, verdict in verdicts.items():
        if verdict is Verdict.HARMFUL:
            problems.add(
                Untrusted,
                f"{file}: asks for {name!r}, which can run code or reach the system; it is refused always",
                "No honest checkpoint needs it: do not load this file with anything else either, "
                "unless you know who wrote it and why.",
            )
        elif verdict is Verdict.UNKNOWN:
            problems.add(
                Untrusted,
                f"{file}: asks for {name!r}, which is not known to be harmless "
                f"(to load it as an inert stub: --stub {name})",
                "Use --stub only for plain data classes of your own code; a stub runs nothing and is "
                "written back under its own name.",
            )
    problems.raise_if_any()
    return verdicts


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
        if self._vocabulary.inert(full) or judge(full, self._stubs) in (Verdict.REAL, Verdict.STUB):
            return stub_class(full)
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
    except CutOff as error:
        raise Incomplete(f"{where}: the pickle inside cannot be read: {error}.\n{ADVICE}") from None
    except Malformed as error:
        raise Corrupt(f"{where}: the pickle inside cannot be read: {error}.\n{ADVICE}") from None
    except OtherProtocol as error:
        raise Unsupported(f"{where}: the pickle inside cannot be read: {error}.") from None
    except ScanError as error:
        raise Untrusted(f"{where}: the pickle inside is refused: {error}.\n{_HOSTILE}") from None
