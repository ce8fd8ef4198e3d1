"""A conversion in a process of its own that is killed, or counts what it does.

The processes are forked from one that has imported the command line: importing takes longer than most of what they do. There are
two such servers, which hash strings differently, and who starts several commands gets them from both: what one process plans must
be what another plans.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]
_LONGEST = 1 << 16


class Command:
    """A command that runs, with as much of ``subprocess.Popen`` as is needed."""

    def __init__(self, server: socket.socket, request: bytes) -> None:
        self.returncode: int | None = None
        self._output = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 - closed where it is read
        self._ended, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(server, [request], [*(file.fileno() for file in self._output), theirs.fileno()])

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end: standard output and error."""
        with self._ended:
            self._ended.settimeout(timeout)
            self.returncode = int(self._ended.recv(16))
        texts = []
        for file in self._output:
            with file:
                file.seek(0)
                texts.append(file.read().decode())
        return texts[0], texts[1]


@cache
def _servers() -> Iterator[socket.socket]:
    return itertools.cycle([_server("1"), _server("2")])


def _server(hash_seed: str) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.killed", str(theirs.fileno())],
            cwd=PROJECT, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def start(*arguments: object, after: int = 0, number: int = 9, log: Path = Path("/dev/null")) -> Command:
    """Start ``mcore-rlhf``; once so many tasks are noted as done it gets a signal from itself.

    Args:
        arguments: Of the command.
        after: So many; 0 for never.
        number: The signal.
        log: Hears of every file that is begun.
    """
    words = [str(argument) for argument in arguments]
    return Command(next(_servers()), json.dumps([after, int(number), str(log), words]).encode())


def run(*arguments: object, **more: Any) -> tuple[int | None, str, str]:
    """The same, to its end: exit code, standard output and error."""
    command = start(*arguments, **more)
    stdout, stderr = command.communicate(timeout=240)
    return command.returncode, stdout, stderr


def begun(log: Path) -> list[str]:
    """The files that were begun since the log was made."""
    return log.read_text().splitlines() if log.exists() else []


def content(folder: Path) -> Mapping[str, Any]:
    """Every byte of a published folder; of its manifest what is not about the transaction, the time and the place."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name in ("mcore_rlhf.json", "manifest.json"):
            told = json.loads(path.read_text())
            found[name] = {key: told[key] for key in told if key not in ("transaction", "provenance", "crc32")}
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def _serve(control: socket.socket) -> None:
    """Fork a command for every request, and one that waits for it and tells its exit code, until nobody can ask any more."""
    import mcore_rlhf.cli.app
    import mcore_rlhf.cli.converting
    import mcore_rlhf.formats.megatron.reader
    import mcore_rlhf.formats.megatron.writer
    import mcore_rlhf.formats.megatron_dist.writer  # noqa: F401

    gc.freeze()  # else every child's collector looks at all of that, and copies it
    gc.set_threshold(50_000, 10, 10)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, _LONGEST, 3)
        if not request:
            return
        if os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        *output, ended = descriptors
        child = os.fork()
        if not child:
            control.close()
            os.close(ended)
            _be_the_command(output, *json.loads(request))
            return
        _, status = os.waitpid(child, 0)
        os.write(ended, str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)


def _be_the_command(output: list[int], after: int, number: int, log: str, words: list[str]) -> None:
    from mcore_rlhf.cli import main
    from mcore_rlhf.core import execute
    from mcore_rlhf.execution import journal

    for target, descriptor in enumerate(output, 1):
        os.dup2(descriptor, target)
        os.close(descriptor)
    sys.argv = ["mcore-rlhf", *words]
    run_file, add, noted = execute.FileRun.run, journal.Journal.add, itertools.count(1)

    def counted(self: execute.FileRun) -> Any:
        with open(log, "a") as out:
            out.write(self.plan.file + "\n")
        return run_file(self)

    def adding(self: journal.Journal, name: str, done: Any) -> None:
        add(self, name, done)
        if next(noted) == after:
            os.kill(os.getpid(), number)

    execute.FileRun.run, journal.Journal.add = counted, adding  # type: ignore[method-assign]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs tests behind his shell ignores it
    main()


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as controlled:
        _serve(controlled)
