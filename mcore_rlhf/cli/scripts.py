"""How the scripts in ``tools/`` begin and end: once in a job; an error is one message and an exit code, never a traceback."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mcore_rlhf.errors import CheckpointError, clean
from mcore_rlhf.storage.once import once


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
