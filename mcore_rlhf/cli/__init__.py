"""The command line, ``mcore-rlhf``: the only place that prints.

``app`` holds the commands' signatures and ``options`` their options; ``job`` turns options and YAML files into what the
library takes. Each command has a module that does it, gathers plain facts, which are what ``--json`` prints, and writes them
for people; ``describe`` has what several of them say. ``guard`` turns every error into a message and an exit code.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line of this process, and exit with its code."""
    try:
        _run()
    except KeyboardInterrupt:  # before a command runs under guard: while modules are still being loaded
        sys.stderr.write("interrupted\n")
        sys.exit(130)


def _fill_closed_streams() -> None:
    """Take the places of streams that were closed (``>&-``): the next file that is opened would be one of them.

    What is written to standard output fails then, and is said; who closes standard error wants to hear nothing.
    """
    for fd, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            try:
                os.fstat(fd)
            except OSError:
                os.open(os.devnull, flags)  # the lowest that is free, which this one is
            setattr(sys, name, os.fdopen(fd, "r" if fd == 0 else "w", closefd=False))


def _run() -> None:
    _fill_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names of files and tensors must never be what a terminal cannot print
            stream.reconfigure(errors="backslashreplace")
    from .app import app

    app(prog_name="mcore-rlhf")
