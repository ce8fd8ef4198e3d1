"""How much a command says of its work besides its result: on standard error as ``-v`` and ``-q`` want it, and all of it in a file.

Everything goes through the loggers below ``mcore_rlhf``. What the terminal has by other means, progress and errors, goes through
:data:`SHOWN`, which only the file hears.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import click

from mcore_rlhf import __version__
from mcore_rlhf.errors import UsageError, log_of, printable
from mcore_rlhf.storage.beneath import open_to_append
from mcore_rlhf.storage.paths import storage_error

from .output import say

PACKAGE = "mcore_rlhf"
SHOWN = log_of(f"{PACKAGE}.shown")
"""Progress and errors: on the terminal they stand already."""

VERBOSE, QUIET, FILE = "mcore_rlhf.verbose", "mcore_rlhf.quiet", "mcore_rlhf.log_file"
"""Keys of a context's ``meta``: what ``-v``, ``-q`` and ``--log-file`` said."""


@contextmanager
def logged(ctx: click.Context) -> Iterator[None]:
    """Say what the command's options want to be said, until the end of the block.

    Args:
        ctx: Of the command, with its options read.

    Raises:
        UsageError: Two options contradict each other.
        StorageError: The file cannot be written.
    """
    verbose, quiet, file = ctx.meta.get(VERBOSE, 0), ctx.meta.get(QUIET, False), ctx.meta.get(FILE)
    if verbose and quiet:
        raise UsageError("-v and -q contradict each other\nGive one of them, or neither.")
    package = log_of(PACKAGE)
    before = package.level
    handlers: list[logging.Handler] = [_Terminal(_level(verbose, quiet))]
    stream = None if file is None else _opened(file)
    if stream is not None:
        handlers.append(_file_handler(stream))
    package.setLevel(min(handler.level for handler in handlers))
    for handler in handlers:
        package.addHandler(handler)
    try:
        SHOWN.info("mcore-rlhf %s: %s, process %d", __version__, ctx.command_path, os.getpid())
        yield
        SHOWN.info("%s: done", ctx.command_path)
    except click.exceptions.Exit as end:
        SHOWN.info("%s: ends with %d", ctx.command_path, end.exit_code)
        raise
    except BaseException as error:
        SHOWN.error("%s: %s: %s", ctx.command_path, type(error).__name__, error, exc_info=True)
        raise
    finally:
        for handler in handlers:
            package.removeHandler(handler)
        package.setLevel(before)
        if stream is not None:
            stream.close()


def _level(verbose: int, quiet: bool) -> int:
    return logging.ERROR if quiet else (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)]


class _Terminal(logging.Handler):
    """Standard error, whatever that is at the moment."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.addFilter(lambda record: record.name != SHOWN.name)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a line."""
        with suppress(OSError):  # nobody listens any more; the work goes on
            say(self.format(record), err=True)


def _opened(path: Path) -> TextIO:
    try:
        return os.fdopen(open_to_append(path), "w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise storage_error(error, path, "write") from error


class _Stamped(logging.Formatter):
    """Of a traceback, too, nothing commands the terminal of who looks at the file."""

    def format(self, record: logging.LogRecord) -> str:
        """A record as text."""
        return printable(super().format(record))


def _file_handler(stream: TextIO) -> logging.Handler:
    handler = logging.StreamHandler(stream)
    line = _Stamped("%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    line.converter = time.gmtime
    handler.setFormatter(line)
    handler.setLevel(logging.DEBUG)
    return handler
