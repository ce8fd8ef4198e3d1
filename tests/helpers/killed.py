"""A conversion in a process of its own that is killed, or counts what it does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]

_PROGRAM = """
import json, os, signal, sys
from mcore_rlhf.core import execute
from mcore_rlhf.execution import journal
from mcore_rlhf.cli import main

after, number, log = int(sys.argv.pop(1)), int(sys.argv.pop(1)), sys.argv.pop(1)
run, add = execute.FileRun.run, journal.Journal.add
noted = 0

def counted(self):
    with open(log, "a") as out:
        out.write(self.plan.file + "\\n")
    return run(self)

def adding(self, name, done):
    global noted
    add(self, name, done)
    noted += 1
    if noted == after:
        os.kill(os.getpid(), number)

execute.FileRun.run, journal.Journal.add = counted, adding
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs tests behind his shell ignores it
main()
"""


def start(*arguments: object, after: int = 0, number: int = 9, log: Path = Path("/dev/null")) -> subprocess.Popen[str]:
    """Start ``mcore-rlhf``; once so many tasks are noted as done it gets a signal from itself.

    Args:
        arguments: Of the command.
        after: So many; 0 for never.
        number: The signal.
        log: Hears of every file that is begun.
    """
    code = [sys.executable, "-c", _PROGRAM, str(after), str(number), str(log), *map(str, arguments)]
    return subprocess.Popen(code, cwd=PROJECT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def run(*arguments: object, **more: Any) -> tuple[int, str, str]:
    """The same, to its end: exit code, standard output and error."""
    process = start(*arguments, **more)
    stdout, stderr = process.communicate(timeout=240)
    return process.returncode, stdout, stderr


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
