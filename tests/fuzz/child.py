"""One command in a child of a warm parent: everything is imported already, and what it does to itself ends with it."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

CANARY = "CANARY"
"""A file that only code of a checkpoint would make, in the folder where the command runs."""

_OUTPUT = ("stdout", "stderr")
_READ_AT_MOST = 4 << 20
_NO_COMMAND_DOES_THIS = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pty.spawn", "socket.connect"}
_UNCAUGHT = 99
"""Exit code of a child that an exception left: none of the command line's own."""


@dataclass(frozen=True)
class Limits:
    """What a child may use.

    Args:
        memory: Bytes of private memory; asking for more is a MemoryError.
        resident: Bytes that count as an overrun although they were given.
        cpu: Seconds of all threads together.
        wall: Seconds until a child counts as hanging.
        file: Length of a file that it writes.
    """

    memory: int = 2 << 30
    resident: int = 700 << 20
    cpu: int = 30
    wall: float = 60.0
    file: int = 256 << 20


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Args:
        code: Its exit code, or None where a signal ended it.
        signal: That signal, or 0.
        hung: Whether it had to be stopped.
        peak: Most memory that it had at a time, in bytes.
        stdout, stderr: What it printed, up to a few megabytes.
        printed: Bytes that it printed, all of them.
        ran_code: Whether something ran that no command runs.
    """

    code: int | None
    signal: int
    hung: bool
    peak: int
    stdout: str
    stderr: str
    printed: int
    ran_code: bool

    @property
    def output(self) -> str:
        """Both streams."""
        return self.stdout + self.stderr


def run(
    arguments: Sequence[str], folder: Path, limits: Limits, main: Callable[[Sequence[str]], int] | None = None
) -> Ended:
    """Run a command in a folder, with the folder above it for what it prints.

    Args:
        arguments: What follows ``mcore-rlhf`` on the command line.
        folder: Where it runs; ``stdout`` and ``stderr`` are written beside it.
        limits: What it may use.
        main: What runs them; None is the command line.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, none of which hold anything that is needed
        child = os.fork()
    if not child:
        _be_the_command(main or command_line, arguments, folder, limits)
    hung = not _ends_within(child, limits.wall)
    if hung:
        with contextlib.suppress(ProcessLookupError):  # so busy a machine that it leads no group yet
            os.killpg(child, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
    _, status, used = os.wait4(child, 0)
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    texts = [_text(folder.parent / name) for name in _OUTPUT]
    return Ended(
        code=None if number else os.WEXITSTATUS(status),
        signal=0 if hung else number,
        hung=hung or number == signal.SIGXCPU,
        peak=used.ru_maxrss << 10,
        stdout=texts[0],
        stderr=texts[1],
        printed=sum((folder.parent / name).stat().st_size for name in _OUTPUT),
        ran_code=(folder / CANARY).exists(),
    )


def _ends_within(child: int, seconds: float) -> bool:
    """Wait without being busy; a child that is done at the last moment counts as hanging."""
    handle = os.pidfd_open(child)
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_READ_AT_MOST).decode("utf-8", "backslashreplace")


def _be_the_command(
    main: Callable[[Sequence[str]], int], arguments: Sequence[str], folder: Path, limits: Limits
) -> NoReturn:
    code = _UNCAUGHT
    try:
        _settle_in(folder, limits)
        try:
            code = main(arguments)
        except BaseException:
            import traceback

            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _settle_in(folder: Path, limits: Limits) -> None:
    os.setsid()
    torch.set_num_threads(1)  # makes the pool anew that did not survive the fork, before two threads do it at once
    os.chdir(folder)
    for number, name in enumerate(_OUTPUT, 1):
        opened = os.open(folder.parent / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace") for number in (1, 2))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for kind, most in (
        (resource.RLIMIT_DATA, limits.memory),
        (resource.RLIMIT_FSIZE, limits.file),
        (resource.RLIMIT_CPU, limits.cpu),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most + 1 if kind == resource.RLIMIT_CPU else most))
    sys.addaudithook(_watched)


def _watched(event: str, _arguments: object) -> None:
    if event in _NO_COMMAND_DOES_THIS:
        os.close(os.open(CANARY, os.O_WRONLY | os.O_CREAT))


def command_line(arguments: Sequence[str]) -> int:
    """The exit code of the command line; whatever else leaves it goes on to the caller."""
    from mcore_rlhf.cli.app import app

    sys.argv = ["mcore-rlhf", *arguments]
    try:
        app(list(arguments), prog_name="mcore-rlhf")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


def warm_up() -> None:
    """Import everything that a command imports, so that no child has to."""
    import importlib
    import pkgutil

    import mcore_rlhf

    torch.set_num_threads(1)
    rooms = ("cli", "families", "formats", "layouts", "manager", "models", "storage", "trainers", "verify", "convert")
    for room in rooms:
        module = importlib.import_module(f"{mcore_rlhf.__name__}.{room}")
        for found in pkgutil.walk_packages(getattr(module, "__path__", []), f"{module.__name__}."):
            importlib.import_module(found.name)
    gc.freeze()  # else every child's collector looks at all of that, and copies it
