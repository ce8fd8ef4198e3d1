"""How the scripts in ``tools/`` end: an error is one message and an exit code, never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from mcore_rlhf.errors import CheckpointError


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
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
    return 0
