"""Commands that are forked off the test instead of started anew: importing torch takes seconds, a fork milliseconds."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence


class Forked:
    """A child process with as much of ``subprocess.Popen`` as :class:`~.processes.Command` uses."""

    def __init__(self, main: Callable[[Sequence[str]], None], words: Sequence[str], output: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads: the child begins with none that matter
            self.pid = os.fork()
        self._code: int | None = None
        if self.pid == 0:
            _be_child(main, words, output)

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._code if self._code is not None else self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait for its end."""
        return self._code if self._code is not None else self._reap(0)

    def _reap(self, flags: int) -> int | None:
        pid, status = os.waitpid(self.pid, flags)
        if pid:
            self._code = os.waitstatus_to_exitcode(status)
        return self._code


def _be_child(main: Callable[[Sequence[str]], None], words: Sequence[str], output: int) -> None:
    code = 1
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        main(words)
        code = 0
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def starter(main: Callable[[Sequence[str]], None]) -> Callable[[Sequence[str], Mapping[str, str], int], Forked]:
    """A stand-in for what starts a command."""

    def start(words: Sequence[str], environment: Mapping[str, str], output: int) -> Forked:
        del environment
        return Forked(main, words, output)

    return start
