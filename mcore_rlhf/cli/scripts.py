"""How the scripts in ``tools/`` begin and end: once in a job; an error is one message and an exit code, never a traceback."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mcore_rlhf.errors import CheckpointError, clean
from mcore_rlhf.storage.once import once

EXIT_CODES = (
    "Exit codes: 0 done; 1 damaged, incomplete or contradictory files; 2 usage, unsupported, target exists, I/O."
)


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """The beginning of a script's command line.

    Args:
        doc: The script's docstring, whose first line says what it is for.
    """
    return argparse.ArgumentParser(description=(doc or "").partition("\n")[0], epilog=EXIT_CODES, allow_abbrev=False)


def once_in_a_job(
    args: argparse.Namespace, targets: Sequence[Path], sources: Sequence[Path], work: Callable[[], None]
) -> None:
    """Do a script's work; where all ranks of a job run it, one does, and the others wait.

    Args:
        args: The command line.
        targets: The folders that are published.
        sources: What is read.
        work: The work; it says itself what it wrote.
    """
    if not once(targets, sources, repr(sorted(vars(args).items(), key=lambda item: item[0])), work):
        for target in targets:
            print(f"written by another process of this job: {target}")


def exit_code_of(work: Callable[[], None], interrupted: str, *, debug: bool = False) -> int:
    """Do the work of a script.

    Args:
        work: What it does.
        interrupted: What to say after Ctrl-C.
        debug: Whether an error of ours is raised, for its traceback.

    Returns:
        The exit code.
    """
    try:
        work()
    except CheckpointError as error:
        if debug:
            raise
        print(f"error: {clean(str(error))}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {clean(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
    return 0
