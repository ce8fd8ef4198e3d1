"""Converting each newly committed step of a run behind its training; training waits for nothing, and nothing half made is published.

What has been done lies where the results lie, not in a process's memory: a watcher that was killed goes on where it was.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from mcore_rlhf.errors import CheckpointError, StorageError, UsageError, headline
from mcore_rlhf.storage.paths import ReadablePath

from .run.retention import KeepRule
from .run.steps import Step
from .runs import listed_steps
from .watched_results import Note, Results, results_in

_TRIES = 3
"""How often a step is tried that cannot be converted, before only a change of it gives it another chance."""
_LONGEST_PAUSE_S = 600.0
_GRACE_S = 5.0

Kind = Literal["converted", "failed", "skipped", "retired", "ran", "waiting"]


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """Something that a watcher did.

    Args:
        kind: What.
        step: With which step; None where it is about the run.
        text: One line for people.
        seconds: How long it took; None where that says nothing.
        path: What was made, or is gone.
    """

    kind: Kind
    step: int | None
    text: str
    seconds: float | None = None
    path: str = ""


@dataclass(slots=True)
class _Failure:
    source: str
    tries: int
    again_at: float
    lasting: bool


@dataclass(slots=True)
class Watcher:
    """Makes a result of every newly committed step of a root.

    Args:
        root: The run's, of any trainer that is known.
        out: Where the results lie, ``global_step_N`` each, as of a run.
        convert: Converts and verifies one step to a place; raises a CheckpointError where it cannot.
        keep: Which results are kept; all where there is no rule.
        command: A command line with ``{path}`` and ``{step}``, run on each result without a shell; empty for none.
        command_timeout: Seconds that it may take.
        settle: For how many seconds a step that has no manifest must stay as it is before it counts as written.
        say: Hears of everything.
    """

    root: ReadablePath
    out: ReadablePath
    convert: Callable[[int, ReadablePath], None]
    keep: tuple[KeepRule, ...] = ()
    command: str = ""
    command_timeout: float = 3600.0
    settle: float = 30.0
    say: Callable[[WatchEvent], None] = lambda event: None
    _results: Results = field(init=False)
    _failures: dict[int, _Failure] = field(default_factory=dict)
    _seen: dict[int, tuple[str, float]] = field(default_factory=dict)
    _skipped: set[int] = field(default_factory=set)
    _unnoted: dict[int, Note] = field(default_factory=dict)
    _unread: set[int] = field(default_factory=set)
    _away: bool = False
    _ails: str = ""
    _top: int | None = None

    def __post_init__(self) -> None:
        _words(self.command)
        one, other = (path.resolve() if isinstance(path, Path) else path for path in (self.root, self.out))
        if one == other or one in other.parents or other in one.parents:
            raise UsageError(
                f"{self.out}: lies in the run that is watched, or holds it\nGive a folder of its own with --into."
            )
        self._results = results_in(self.out, lambda text: self.say(WatchEvent("waiting", None, text)))

    def close(self) -> None:
        """Let others have the target."""
        self._results.close()

    def check(self) -> None:
        """Raise where another watcher is known to have the target; for a conversion that goes on."""
        self._results.check()

    def look(self) -> bool:
        """Do what there is to do now: first what a kill left undone, then one step, the newest that is wanted.

        Returns:
            Whether a step was converted: there may be more.

        Raises:
            StorageError: Another watcher has the target, or nobody can say.
        """
        self._results.hold()
        try:
            worked = self._worked()
        except StorageError as error:  # the target's disk; it may be well again at the next look
            if self._ails != (text := headline(str(error))):
                self._ails = text
                self.say(WatchEvent("failed", None, f"{text}; it is tried again"))
            return False
        self._ails = ""
        return worked

    def _worked(self) -> bool:
        self._note_what_ran()
        for note in self._results.all():
            if self.command and note.source and not note.ran and self._results.is_there(note.step):
                self._run(note)
        wanted = self._wanted()
        if not wanted:
            return False
        self._make(wanted[0])
        self._retire()
        return True

    def _found(self) -> list[Step]:
        try:
            found = self._listed()
        except CheckpointError as error:  # a run that begins, or a file system that is away
            if not self._away:
                self.say(WatchEvent("waiting", None, f"{headline(str(error))}; it is looked for again"))
            self._away = True
            return []
        self._away = False
        self._unread = {step.step for step in found if step.state == "unreadable"}
        ready = [step for step in found if self._is_ready(step)]
        settling = (step.step for step in found if step.state == "foreign")  # one that was just converted is, too
        self._top = max({*(step.step for step in ready), *self._unread, *settling}, default=self._top)
        return ready

    def _is_ready(self, step: Step) -> bool:
        """Whether it is committed; of one that has no manifest, whether it has not changed for a while."""
        if step.state != "foreign":
            return step.resumable
        now, source = time.monotonic(), _identity(step)
        before, since = self._seen.get(step.step, ("", now))
        if before != source:
            self._seen[step.step], since = (source, now), now
        return now - since >= self.settle

    def _wanted(self) -> list[Step]:
        """Steps without a result, or whose result is of another state of them, the newest first."""
        done = {note.step: note for note in self._results.all()}
        found = {step.step: step for step in self._found()}
        open_ = {
            number: step
            for number, step in found.items()
            if (note := done.get(number)) is None
            or note.source != _identity(step)
            or not (note.taken or self._results.is_there(number))
        }
        kept = self._kept(
            {*done, *open_, *self._unread}
        )  # an older one is not made in place of what a disk does not show
        for number in sorted(open_.keys() - kept):
            self._skip(number)
        return [open_[number] for number in sorted(open_.keys() & kept, reverse=True) if self._may_try(open_[number])]

    def _may_try(self, step: Step) -> bool:
        failure = self._failures.get(step.step)
        if failure is None or failure.source != _identity(step):
            return True
        return (failure.tries < _TRIES or not failure.lasting) and time.monotonic() >= failure.again_at

    def _make(self, step: Step) -> None:
        """Convert aside, see that the step is still the same, publish."""
        source, started = _identity(step), time.monotonic()
        try:
            self.convert(step.step, self._results.begin(step.step))
            now = next((one for one in self._listed() if one.step == step.step), None)
            if now is None or _identity(now) != source:
                self._results.drop(step.step)
                raise StorageError(
                    f"step {step.step} " + ("is gone" if now is None else "was replaced") + " while it was converted"
                )
            self._results.publish(made := Note(step.step, source, ran=not self.command))
            self._unnoted.pop(step.step, None)
        except CheckpointError as error:
            self._failed(step, source, error)
            return
        self._failures.pop(step.step, None)
        self._seen.pop(step.step, None)
        seconds, target = time.monotonic() - started, str(self._results.place(step.step))
        self.say(WatchEvent("converted", step.step, f"step {step.step} is in {target}", seconds, target))
        if self.command:
            self._run(made)

    def _listed(self) -> list[Step]:
        """What lies in the root.

        Raises:
            CheckpointError: It is not there, or cannot be listed.
        """
        try:
            if not self.root.is_dir():
                raise StorageError(f"{self.root}: is not there")
            return listed_steps(self.root)
        except OSError as error:
            raise StorageError(f"{self.root}: {error}") from error

    def _failed(self, step: Step, source: str, error: CheckpointError) -> None:
        before = self._failures.get(step.step)
        tries = before.tries + 1 if before is not None and before.source == source else 1
        lasting = not isinstance(error, StorageError)  # a disk that is full now may not be later
        pause = min(2.0 ** min(tries - 1, 20) * max(1.0, self.settle), _LONGEST_PAUSE_S)
        self._failures[step.step] = _Failure(source, tries, time.monotonic() + pause, lasting)
        again = tries < _TRIES or not lasting
        further = f"it is tried again in {pause:g} s" if again else "it is tried again when it changes"
        self.say(WatchEvent("failed", step.step, f"step {step.step}: {headline(str(error))}; {further}"))

    def _run(self, note: Note) -> None:
        """Run the command on a result; what becomes of it is said, and stops nothing."""
        target, started = str(self._results.place(note.step)), time.monotonic()
        words = [_filled(word, target, note.step) for word in _words(self.command)]
        outcome = _outcome(words, self.command_timeout)
        self._unnoted[note.step] = replace(note, ran=True)
        taken = not self._results.is_there(note.step)
        seconds = time.monotonic() - started
        kind: Kind = "failed" if outcome else "ran"
        text = (
            f"step {note.step}: {words[0]} {outcome or 'has run'}{', and the result is there no more' if taken else ''}"
        )
        self.say(WatchEvent(kind, note.step, text, seconds, target))
        self._unnoted[note.step] = replace(note, ran=True, taken=taken)
        self._note_what_ran()

    def _note_what_ran(self) -> None:
        """On a full disk that is done later, and no command is run again meanwhile."""
        for number, note in list(self._unnoted.items()):
            self._results.say(note)
            del self._unnoted[number]

    def _retire(self) -> None:
        """Delete results that no rule wants."""
        there = {note.step for note in self._results.all()}
        for number in sorted(there - self._kept(there)):
            place = self._results.place(number)
            try:
                self._results.retire(number)
            except CheckpointError as error:
                self.say(WatchEvent("failed", number, f"{headline(str(error))}; it stays"))
            else:
                self._skipped.add(number)
                self.say(WatchEvent("retired", number, f"{place} is no longer wanted", path=str(place)))

    def _kept(self, numbers: Collection[int]) -> set[int]:
        """Those that a rule wants. Results of steps that the run has gone back behind are not counted, and stay."""
        behind = {number for number in numbers if self._top is not None and number > self._top}
        found = [Step(number, self._results.place(number), "committed") for number in sorted({*numbers} - behind)]
        if not self.keep or not found:
            return set(numbers)
        return behind.union({found[-1].step}, *(rule.wants(found) for rule in self.keep))

    def _skip(self, number: int) -> None:
        if number not in self._skipped:
            self._skipped.add(number)
            text = f"step {number} is passed over: newer ones are there, and it would be retired at once"
            self.say(WatchEvent("skipped", number, text))


def _identity(step: Step) -> str:
    """Which state of a step it is: its commit, or where it has none, how much lies there since when."""
    return step.transaction or f"{step.nbytes} {step.time}"


def _words(command: str) -> list[str]:
    """The words of a command line.

    Raises:
        UsageError: It is none.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--run: {command}: is no command line: {error}") from None
    if command and not (words and words[0]):
        raise UsageError(f"--run: {command!r}: names no program")
    return words


def _filled(word: str, path: str, step: int) -> str:
    """A word with what it asks for; what is put in is never read again."""
    parts = word.split("{path}")
    return path.join(part.replace("{step}", str(step)) for part in parts)


def _outcome(words: list[str], timeout: float) -> str:
    """Run a command; what went wrong, or nothing. It, and all that it started, ends with this process's patience."""
    try:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
    except OSError as error:
        return f"cannot be run: {error.strerror}"
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        return f"has not ended within {timeout:g} s, and was stopped"
    finally:
        if process.poll() is None:
            _stop(process)
    return f"ended with {code}" if code else ""


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(_GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
        return
