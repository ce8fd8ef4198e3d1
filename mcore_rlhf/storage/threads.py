"""Threads for what goes on behind somebody's back. A container that has as many processes as it may have gives no more of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..errors import StorageError


def begin(name: str, job: Callable[..., object], *args: object) -> threading.Thread:
    """Run something on a thread of its own, which does not keep the process from ending.

    Args:
        name: What it is, for people who look at threads.
        job: It.
        args: For it.

    Raises:
        StorageError: The system gives no thread; nothing of the job was done.
    """
    thread = threading.Thread(target=job, name=name, args=args, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise StorageError(
            f"{name}: the system gives no thread for it: {error}\n"
            "Raise the limit on processes: ulimit -u, or pids.max of the container."
        ) from error
    return thread
