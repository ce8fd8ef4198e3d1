"""Which names a checkpoint's pickle may mention, and as what: itself, an inert stub, or never."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from enum import Enum, auto

from ..errors import Problems, Untrusted
from .meanings import has_meaning


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
)
"""Classes of the standard library, and activation functions, that training arguments refer to."""

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
