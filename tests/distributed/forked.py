"""Processes that are forked off a server which has imported torch, and never computed: importing takes seconds, a fork milliseconds.

The test itself may not be forked: what it has computed by then left an OpenMP pool, whose threads a child does not have, and for
which MKL waits without end.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import DupFd

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.distributed.imported"])


class Forked:
    """A child process with as much of ``subprocess.Popen`` as :class:`~.processes.Command` uses."""

    def __init__(self, main: Callable[[Sequence[str]], None], words: Sequence[str], output: int) -> None:
        self._process = SERVER.Process(target=_be_child, args=(main, list(words), DupFd(output)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.exitcode

    def wait(self) -> int | None:
        """Wait for its end."""
        self._process.join()
        return self._process.exitcode


def _be_child(main: Callable[[Sequence[str]], None], words: Sequence[str], output: DupFd) -> None:
    code = 1
    try:
        os.setsid()
        target = output.detach()
        os.dup2(target, 1)
        os.dup2(target, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        main(words)
        code = 0
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def starter(main: Callable[[Sequence[str]], None]) -> Callable[[Sequence[str], Mapping[str, str], int], Forked]:
    """A stand-in for what starts a command."""

    def start(words: Sequence[str], environment: Mapping[str, str], output: int) -> Forked:
        del environment
        return Forked(main, words, output)

    return start
