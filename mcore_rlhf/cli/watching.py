"""``mcore-rlhf watch``: convert every newly committed step of a run, behind its training."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mcore_rlhf.errors import CheckpointError, StorageError, headline
from mcore_rlhf.manager.watch import Watcher, WatchEvent
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.urls import checkpoint_path

from .guard import explain_os_error
from .options import WatchOptions
from .output import plain, say
from .steps import require_root, rules_of

_NICE = 10
_PR_SET_PDEATHSIG = 1
"""Linux, ``prctl(2)``: the signal that a process gets when its parent is gone."""
_GRACE_S = 10.0
_LOOK_S = 1.0
_OF_STORAGE = "\0"
"""What a child's word begins with where a disk or a store failed: that may pass."""


def run(root: Path, given: Mapping[str, Any], config: Path | None, watching: WatchOptions, as_json: bool) -> int:
    """Watch until a signal comes, or with ``--once`` until nothing is left to do.

    Args:
        root: The run's.
        given: Options of ``convert``.
        config: A job file for the others.
        watching: The watcher's.
        as_json: A JSON object a line.

    Returns:
        The exit code: 1 where ``--once`` leaves steps that cannot be converted.

    Raises:
        CheckpointError: It cannot begin, or the target cannot be written.
    """
    from .job import make_job

    given = {name: value for name, value in given.items() if value not in (None, (), [])}
    source, out = checkpoint_path(root), checkpoint_path(watching.into)
    if watching.once or source.exists():  # else it is a run that has yet to begin
        require_root(root)

    def job(step: int, folder: ReadablePath) -> dict[str, Any]:
        ends = {"source": str(root), "target": str(folder)}
        return {**given, **ends, "step": step, "overwrite": True, "verify": True}

    def convert(step: int, folder: ReadablePath) -> None:
        _in_a_child(job(step, folder), config, watcher.check)

    make_job(job(0, out), config)  # what is wrong with it is said now
    failed = set[int | None]()

    def tell(event: WatchEvent) -> None:
        if event.kind == "failed":
            failed.add(event.step)
        elif event.step is not None:
            failed.discard(event.step)
        _print(event, as_json)

    settle, keep = 0.0 if watching.once else watching.settle, rules_of(watching.keep_last, watching.keep_every)
    watcher = Watcher(source, out, convert, tuple(keep), watching.run, watching.run_timeout, settle, tell)
    try:
        ended = _ends(watcher, watching)
    finally:
        watcher.close()
    return 1 if failed and not ended else 0


def _ends(watcher: Watcher, watching: WatchOptions) -> bool:
    """Look until SIGTERM ends it where it is, with nothing published of a step that is being converted; or until all is done."""
    try:
        while (worked := watcher.look()) or not watching.once:
            if not worked:
                time.sleep(watching.every)
    except KeyboardInterrupt as stop:
        if stop.args != (signal.SIGTERM,):
            raise
        return True
    return False


def _print(event: WatchEvent, as_json: bool) -> None:
    if as_json:
        facts = {**asdict(event), "time": time.time()}
        say(json.dumps(plain(facts), ensure_ascii=True))
    else:
        say(f"{event.kind}: {event.text}" + ("" if event.seconds is None else f" ({event.seconds:.1f} s)"))
    sys.stdout.flush()


def _in_a_child(given: dict[str, Any], config: Path | None, check: Callable[[], None]) -> None:
    """Convert in a process of its own, that has less right to the cores, and whose memory goes with it.

    Args:
        given: The job.
        config: A file of further options.
        check: Raises where it is to end at once.

    Raises:
        CheckpointError: It could not be done.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_convert, args=(there, given, config), name="mcore-rlhf convert")
    child.start()
    there.close()
    try:
        told = None
        with suppress(EOFError):
            while not here.poll(_LOOK_S):
                check()
            told = here.recv_bytes().decode()
        child.join()
    finally:
        if child.is_alive():
            child.terminate()
            child.join(_GRACE_S)
            child.kill()
            child.join()
    if told is None:
        raise CheckpointError(
            f"the conversion ended with {child.exitcode}, and said nothing: was it killed, or out of memory?"
        )
    if told:
        raise (StorageError if told.startswith(_OF_STORAGE) else CheckpointError)(told.removeprefix(_OF_STORAGE))


def _convert(answer: Connection, given: dict[str, Any], config: Path | None) -> None:
    """In the child: nothing, or why it could not be done."""
    import click

    from .converting import run as convert
    from .job import make_job

    with suppress(OSError):
        os.nice(_NICE)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid != os.getppid():  # it went before that was said
            os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the watcher hears of it, and ends this process
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # what there is to say, the watcher says
            convert(make_job(given, config), True)
    except click.exceptions.Exit:
        answer.send_bytes(b"what was written is not what was read: mcore-rlhf convert --verify says more")
    except CheckpointError as error:
        answer.send_bytes(f"{_OF_STORAGE if isinstance(error, StorageError) else ''}{headline(str(error))}".encode())
    except OSError as error:  # a file system that is away for a while; a step is tried until it is there again
        answer.send_bytes(f"{_OF_STORAGE}{headline(explain_os_error(error))}".encode())
    except MemoryError:
        answer.send_bytes(b"there is not enough memory: give less with --max-memory, and fewer --workers")
    else:
        answer.send_bytes(b"")
