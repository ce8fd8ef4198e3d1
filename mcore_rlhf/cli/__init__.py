"""The command line, ``mcore-rlhf``: the only place that prints.

``app`` holds the commands' signatures and ``options`` their options; ``job`` turns options and YAML files into what the
library takes. Each command has a module that does it, gathers plain facts, which are what ``--json`` prints, and writes them
for people; ``describe`` has what several of them say. ``guard`` turns every error into a message and an exit code.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process, and exit with its code."""
    try:
        _run()
    except KeyboardInterrupt:  # before a command runs under guard: while modules are still being loaded
        sys.stderr.write("interrupted\n")
        sys.exit(130)


def _run() -> None:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # names of files and tensors must never be what a terminal cannot print
            stream.reconfigure(errors="backslashreplace")
    from .app import app

    app(prog_name="mcore-rlhf")
