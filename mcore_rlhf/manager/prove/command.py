"""A command with places to fill in, and with all the processes that it starts: none of them outlives the check."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from mcore_rlhf.errors import Problems, UsageError
from mcore_rlhf.storage.beneath import open_to_append
from mcore_rlhf.storage.paths import storage_error

REQUIRED, OPTIONAL = ("dir", "steps"), ("resume", "metrics", "again")
RESUME = "auto"
"""What ``{resume}`` always is: begin anew in an empty folder, and go on from the newest step in any other."""

_VARIABLE = "MCORE_RLHF_CHECK_"
_MEANING = {"dir": "the folder of the run's output", "steps": "the step to end at, counted from the start of training"}
_PLACE = re.compile(r"\{([A-Za-z_]+)\}")

MARK = "MCORE_RLHF_CHECK_RUN"
"""An environment variable that every process of a run inherits, by which it is found again. A process group would not do:
torchrun gives each worker a session of its own (``torch/distributed/elastic/multiprocessing/subprocess_handler``, 2.13)."""

LAST_LINES = 20

_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class RunPlaces:
    """Where one run works; all that it leaves carries its name.

    Args:
        folder: The folder of the whole check.
        name: ``A``, ``B``, ``C`` or ``D``.
        again: Whether the run is to save what it has loaded, at the step that it is of, and to end.
    """

    folder: Path
    name: str
    again: bool = False

    @property
    def output(self) -> Path:
        """What the command is given as ``{dir}``."""
        return self.folder / self.name

    @property
    def metrics(self) -> Path:
        """What it is given as ``{metrics}``: beside the output, so that it can be found again by its name."""
        return metrics_of(self.output)

    def log(self, part: str = "") -> Path:
        """Everything that it prints; ``part`` tells the starts of one run apart."""
        return self.folder / f"{self.name}{f'-{part}' if part else ''}.log"


def metrics_of(output: Path, rank: int = 0) -> Path:
    """The metrics file of a run with this output folder: ``A.metrics.jsonl`` beside ``A``, ``A.metrics.jsonl.1`` of rank 1."""
    return output.with_name(f"{output.name}.metrics.jsonl{f'.{rank}' if rank else ''}")


def metrics_by_rank(output: Path) -> dict[int, Path]:
    """The metrics files of a run: rank 0's, and those of further ranks that wrote their own, ``A.metrics.jsonl.1`` and so on."""
    first = metrics_of(output)
    found = {0: first} if first.is_file() else {}
    for path in sorted(first.parent.glob(f"{first.name}.*")):
        number = path.name.removeprefix(f"{first.name}.")
        if number.isascii() and number.isdecimal():
            found[int(number)] = path
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class Template:
    """A command line with placeholders. Other braces, of a JSON argument for example, are left as they are.

    Args:
        words: The command, word by word; no shell is involved.
        by_environment: Whether the command reads the variables ``MCORE_RLHF_CHECK_DIR``, ``…_STEPS``, ``…_RESUME`` and
            ``…_METRICS``; then it needs no placeholders.
    """

    words: Sequence[str]
    by_environment: bool = False

    def check(self) -> None:
        """See that the command can be told what it must be told.

        Raises:
            UsageError: There is no command, or a required placeholder is missing; all are named.
        """
        if not self.words:
            raise UsageError(
                "no command was given\nPut it behind two dashes: mcore-rlhf resume-check --steps 3 --more 2 -- "
                "torchrun train.py --output-dir {dir} --steps {steps}; or give --demo."
            )
        problems = Problems()
        for name in () if self.by_environment else REQUIRED:
            if name not in self.used:
                advice = "A script without such flags can read MCORE_RLHF_CHECK_DIR and so on: give --environment then."
                problems.add(UsageError, f"the command has no {{{name}}}: {_MEANING[name]}{self._near()}", advice)
        problems.raise_if_any()

    @property
    def used(self) -> set[str]:
        """The placeholders that are in it."""
        return {name for word in self.words for name in _PLACE.findall(word)} & {*REQUIRED, *OPTIONAL}

    @property
    def has_again(self) -> bool:
        """Whether the command can be told to save what it has loaded, and to end."""
        return "again" in self.used

    @property
    def has_metrics(self) -> bool:
        """Whether the command is told where to write metrics. A script that reads the environment may leave it."""
        return "metrics" in self.used

    def _near(self) -> str:
        unknown = sorted({name for word in self.words for name in _PLACE.findall(word)} - {*REQUIRED, *OPTIONAL})
        return f" (it has {', '.join(f'{{{name}}}' for name in unknown)})" if unknown else ""

    def filled(self, run: RunPlaces, steps: int) -> list[str]:
        """The command of one run, word by word."""
        values = _values(run, steps)
        return [_PLACE.sub(lambda match: values.get(match[1], match[0]), word) for word in self.words]

    def environment(self, run: RunPlaces, steps: int) -> dict[str, str]:
        """The same as environment variables."""
        return {f"{_VARIABLE}{name.upper()}": value for name, value in _values(run, steps).items()}

    def shell(self, run: RunPlaces, steps: int) -> str:
        """The command of one run as a line for a shell."""
        given = self.environment(run, steps) if self.by_environment else {}
        return " ".join(
            [*(f"{name}={shlex.quote(value)}" for name, value in given.items()), shlex.join(self.filled(run, steps))]
        )


def _values(run: RunPlaces, steps: int) -> Mapping[str, str]:
    return {
        "dir": str(run.output), "steps": str(steps), "resume": RESUME, "metrics": str(run.metrics), "again": str(int(run.again)),
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Process:
    pid: int
    started: str
    parent: int
    alive: bool
    marked: bool


class RunningCommand:
    """A command that is running. Use it in a ``with`` block: left in whatever way, all of its processes are ended.

    Args:
        words: The command line.
        environment: Variables besides those of this process.
        log: File for everything that it prints; appended to.

    Raises:
        UsageError: There is no such program, or it may not be run.
        StorageError: The log cannot be written.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.words, self.log = list(words), log
        self.started = time.monotonic()
        self.killed = False
        """Whether :meth:`kill` was called; the exit code says nothing of the command itself then."""
        self._mark, self._known = secrets.token_hex(16), list[_Process]()
        try:
            output = os.fdopen(open_to_append(log), "ab")
        except OSError as error:
            raise storage_error(error, log, "write") from error
        with output:
            self._root = _start(self.words, {**os.environ, **environment, MARK: self._mark}, output.fileno())

    @property
    def seconds(self) -> float:
        """How long it has been running."""
        return time.monotonic() - self.started

    def ended(self) -> bool:
        """Whether it has come to its end."""
        return self._root.poll() is not None

    @property
    def exit_code(self) -> int | None:
        """Its exit code; minus the signal that ended it; None while it runs."""
        return self._root.poll()

    def kill(self) -> int:
        """SIGKILL to every process, until none is left: what a power cut does.

        Returns:
            How many processes were killed.
        """
        self.killed = True
        killed, end = set[tuple[int, str]](), time.monotonic() + _PATIENCE_S
        targets = [process for process in self._known if _started(process.pid) == process.started] or self._alive()
        while targets or self._dying(killed):
            for process in targets:  # the launcher first: it must not see a worker die, and stop the others gently
                _kill(process.pid)
                killed.add((process.pid, process.started))
            self._root.poll()
            if time.monotonic() > end:
                break  # in a system call that cannot be interrupted: it ends when that returns
            time.sleep(0.005)
            targets = self._alive()
        while self._root.poll() is None and time.monotonic() < end:
            time.sleep(0.001)
        return len(killed)

    def _dying(self, killed: set[tuple[int, str]]) -> bool:
        """Whether processes are still there that were told to end; those without mark and parent are not found otherwise."""
        return any(process.alive and (process.pid, process.started) in killed for process in _processes(self._mark))

    def get_ready(self) -> None:
        """Find the processes now, so that :meth:`kill` strikes at once."""
        self._known = self._alive()

    def _alive(self) -> list[_Process]:
        """All processes of this run, parents before their children."""
        table = {process.pid: process for process in _processes(self._mark)}
        ours = [table[self._root.pid]] if self._root.poll() is None and self._root.pid in table else []
        ours += [process for process in table.values() if process.marked and process not in ours]
        for process in ours:  # grows: children without the mark have thrown their environment away
            ours += [child for child in table.values() if child.parent == process.pid and child not in ours]
        return [process for process in ours if process.alive]

    def last_lines(self, count: int = LAST_LINES) -> list[str]:
        """The end of the log."""
        with self.log.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip() for line in deque(file, count)]

    def failure(self, what: str) -> UsageError:
        """The error that says how it ended, with the end of its log."""
        lines = [f"  {line}" for line in self.last_lines()] or ["  (it printed nothing)"]
        head = f"{what}\nThe last {len(lines)} lines that it printed:" if len(lines) > 1 else f"{what}\nIt printed:"
        return UsageError("\n".join([head, *lines, f"All of it: {self.log}"]))

    def __enter__(self) -> RunningCommand:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def _start(words: Sequence[str], environment: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    except FileNotFoundError:
        raise UsageError(f"{words[0]}: there is no such program\nCheck the command, and PATH.") from None
    except OSError as error:
        raise UsageError(f"{words[0]}: cannot be run: {error.strerror}") from None


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _processes(mark: str) -> list[_Process]:
    """Every process of this machine that can be seen, from ``/proc`` (Linux, ``man 5 proc``)."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                stat = _stat(int(name))
                found.append(_Process(int(name), stat[19], int(stat[1]), _runs(stat), _is_marked(int(name), mark)))
            except (OSError, IndexError, ValueError):
                continue  # it has ended meanwhile
    return found


def _stat(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` from the third on: 0 state, 1 parent, 17 threads, 19 start (``man 5 proc``)."""
    return Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()


def _runs(stat: Sequence[str]) -> bool:
    """Whether any thread is left. Until the last one has gone, the process holds its files and their locks."""
    state, threads = stat[0], int(stat[17])
    return state not in "ZX" or threads > 1


def _started(pid: int) -> str:
    """When a process began, by which it is told from a later one with the same number; empty where there is none."""
    try:
        return _stat(pid)[19]
    except (OSError, IndexError):
        return ""


def _is_marked(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
    except OSError:  # of another user, or gone
        return False
