"""How the scripts in ``tools/`` begin and end: once in a job; an error is one message and an exit code, never a traceback.

All ranks of a distributed job may ask for the same folder: one writes it, the others wait, and find it done. DeepSpeed's own test of
``zero_to_fp32.py`` runs it on every rank with one target, and so do scripts that torchrun starts. Who comes first holds a lock beside the
target; whoever gets it afterwards looks whether the target is what it wants: written in this job, of the same source files, with the same
options. It holds over hosts as far as the file system's locks do.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from mcore_rlhf.cli.guard import explain
from mcore_rlhf.cli.output import say
from mcore_rlhf.errors import CheckpointError, printable
from mcore_rlhf.storage.beneath import make_folder, open_to_lock, remove
from mcore_rlhf.storage.manifest import JOB, Manifest
from mcore_rlhf.storage.publish import MANIFEST_NAME
from mcore_rlhf.storage.waiting import waiting_for

_NAMES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")


def job_of(environ: Mapping[str, str]) -> str | None:
    """The job of which this process is a rank, or None where it is by itself: as torchrun and DeepSpeed's launcher say it."""
    world = environ.get("WORLD_SIZE", "")
    if "RANK" not in environ or not world.isdecimal() or int(world) < 2:
        return None
    return "/".join(environ.get(name, "") for name in _NAMES)


def once(targets: Sequence[Path], sources: Sequence[Path], about: str, work: Callable[[], None]) -> bool:
    """Do work unless another rank of this job has done it; outside of a job, do it.

    Args:
        targets: The folders that the work publishes, each with a manifest.
        sources: What it reads.
        about: Everything else that decides what comes out: the options.
        work: The work.

    Returns:
        Whether it was done here.
    """
    job = job_of(os.environ)
    if job is None:
        work()
        return True
    targets = [Path(os.path.abspath(target)) for target in targets]
    files = [line for source in sources for line in _files(source, targets)]
    key = hashlib.sha256("\n".join([job, about, *map(str, targets), *files]).encode()).hexdigest()
    with _turn(targets[0]):
        if all(_is_done(target, key) for target in targets):
            return False
        token = JOB.set(key)
        try:
            work()
        finally:
            JOB.reset(token)
    return True


def _files(source: Path, targets: Sequence[Path]) -> Iterator[str]:
    """The files of a source, with sizes and times; without the targets, where they lie inside, and hidden files."""
    for parent, folders, names in os.walk(os.path.abspath(source)):
        folders[:] = sorted(f for f in folders if f[0] != "." and Path(parent, f) not in targets)
        for path in (Path(parent, name) for name in sorted(names) if name[0] != "."):
            with suppress(FileNotFoundError):
                about = path.stat()
                yield f"{path} {about.st_size} {about.st_mtime_ns}"


@contextmanager
def _turn(target: Path) -> Iterator[None]:
    """Wait until no other process of the job has its turn; the lock is gone in the end."""
    make_folder(target.parent)
    path = target.parent / f".{target.name}.turn"
    fd = _locked(path)
    try:
        yield
    finally:
        remove(path)  # while it is held: who waits for this one finds that it is gone
        os.close(fd)


def _locked(path: Path) -> int:
    while True:
        fd = open_to_lock(path)
        try:
            with waiting_for(f"the lock {path}, which another process of the job holds"):
                fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError:
            return fd  # no locks on this file system: two at once are told apart when they publish
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)


def _is_done(target: Path, key: str) -> bool:
    """Whether a target was published under this key, and since this job began: an older one may have been damaged since."""
    manifest = target / MANIFEST_NAME
    try:
        return Manifest.read(manifest).provenance.get("job") == key and manifest.stat().st_mtime >= _parents_start()
    except (CheckpointError, OSError):
        return False


def _parents_start() -> float:
    """When the process began that started this one: torchrun, or the rank that runs a script. 0 where nobody says it."""
    try:
        fields = (
            Path(f"/proc/{os.getppid()}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # proc_pid_stat(5): field 22, starttime
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


EXIT_CODES = (
    "Exit codes: 0 done; 1 damaged, incomplete or contradictory files; 2 usage, unsupported, target exists, I/O."
)


class _Parser(argparse.ArgumentParser):
    """Says what was typed as something that can be read; names of a stranger's files are typed by ``*``."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong as every command here does."""
        self.print_usage(sys.stderr)
        self.exit(2, f"error: {message}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(printable(message), file)


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """The beginning of a script's command line.

    Args:
        doc: The script's docstring, whose first line says what it is for.
    """
    return _Parser(description=(doc or "").partition("\n")[0], epilog=EXIT_CODES, allow_abbrev=False)


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
            say(f"written by another process of this job: {target}")


def exit_code_of(work: Callable[[], None], interrupted: str, *, debug: bool = False) -> int:
    """Do the work of a script.

    Args:
        work: What it does.
        interrupted: What to say after Ctrl-C.
        debug: Whether the traceback of an error is shown.

    Returns:
        The exit code.
    """
    try:
        work()
    except KeyboardInterrupt:
        say(interrupted, err=True)
        return 130
    except Exception as error:
        code, text = explain(error)
        if debug:
            say(traceback.format_exc(), err=True)
        say(f"error: {text}", err=True)
        return code
    return 0
