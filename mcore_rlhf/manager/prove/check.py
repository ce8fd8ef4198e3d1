"""The check itself: run A uninterrupted, run B killed and resumed, run C resumed from something broken; and what it came to."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from mcore_rlhf.errors import StorageError, UsageError
from mcore_rlhf.storage.beneath import make_folder, remove
from mcore_rlhf.storage.paths import storage_error

from .command import RunningCommand, RunPlaces, Template, metrics_by_rank, metrics_of
from .compare import ComparisonTally, Finding, StateComparison, StepComparer
from .control import Broken, copy_run, make_control
from .ignored import Ignored
from .killing import Kill, KillPlan, Moment, Watch, span
from .metrics import MetricsComparer, MetricsComparison
from .places import is_committed, require_committed, root_of, step_in, written_at
from .profiles import EXACT, MeasuredDifference, Profile

Verdict = Literal["exact", "within", "different", "blind", "no control"]
"""``exact``: everything is equal, and the broken control was caught. ``within``: the same, as far as a profile other than ``exact`` asks.
``different``: something is not equal. ``blind``: equal, but so was the control, so equality proves nothing. ``no control``: equal, and no
control was asked for."""

SAYS: Mapping[Verdict, str] = {
    "exact": "EXACT: the resumed run is the uninterrupted one, bit for bit, and the broken control was caught",
    "within": "WITHIN: the resumed run is the uninterrupted one as far as the profile asks, and the broken control was caught",
    "different": "DIFFERENT: the resumed run is not the uninterrupted one",
    "blind": "BLIND: everything is equal, but so is the broken control: nothing is proved",
    "no control": "EQUAL as far as was asked; no broken control was compared",
}
"""Each in a sentence."""

Say = Callable[[str], None]

_ATTEMPTS = 3

_PAUSE_S, _SAY_EVERY_S = 0.05, 10.0


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Another run compared with the uninterrupted one.

    Args:
        name: The other run's.
        states: The last step of both.
        ranks: The metrics of both, of every rank that writes any; none where the command writes none.
    """

    name: str
    states: StateComparison
    ranks: Mapping[int, MetricsComparison] = field(default_factory=dict)

    @property
    def metrics(self) -> MetricsComparison | None:
        """The metrics of rank 0."""
        return self.ranks.get(0)

    @property
    def equal(self) -> bool:
        """Whether nothing differs, and something was compared."""
        return self.states.tally.equal and all(lines.tally.equal for lines in self.ranks.values())

    @property
    def tallies(self) -> list[ComparisonTally]:
        """The counts: of metrics, rank by rank, and of the states."""
        return [*(lines.tally for lines in self.ranks.values()), self.states.tally]

    def first(self, rank: int = 0) -> Finding | None:
        """The first difference of a rank: in its metrics, which stand in the order of steps, otherwise in the states."""
        lines = self.ranks.get(rank)
        found = [*(lines.tally.findings[:1] if lines is not None else []), *self.states.tally.findings[:1]]
        return found[0] if found else None


@dataclass(frozen=True, slots=True)
class KilledRun:
    """A run that was killed and resumed.

    Args:
        comparison: What it came to.
        kill: Where it was hit; None where it was compared only.
        before: The step that it resumed from, as it was when the kill hit; None where the uninterrupted run has not kept its own.
    """

    comparison: RunComparison
    kill: Kill | None = None
    before: StateComparison | None = None

    @property
    def notes(self) -> list[str]:
        """What explains a result."""
        return [*self._unrepeatable(), *self._not_resumed()]

    def _unrepeatable(self) -> list[str]:
        tally = self.before.tally if self.before is not None else None
        if tally is None or tally.equal or self.kill is None:
            return []
        first = "".join(f": {finding.where}: {finding.key}" for finding in tally.findings[:1])
        return [
            f"run {self.comparison.name} was another run than A already at step {self.kill.resumes_from}, before it was killed "
            f"({tally.differing} values{first}): training is not repeatable, and that is to be mended first. Are python, numpy, "
            "torch and CUDA all seeded, and deterministic algorithms in use?"
        ]

    def _not_resumed(self) -> list[str]:
        metrics, kill = self.comparison.metrics, self.kill
        early = [step for step in metrics.began_again if step < kill.resumes_from] if metrics and kill else []
        if kill is None:
            return []
        return [
            f"run {self.comparison.name} went back to step {step}, although step {kill.resumes_from} was committed: "
            "it did not resume from it"
            for step in early
        ]


@dataclass(frozen=True, slots=True)
class Control:
    """The broken control run.

    Args:
        comparison: How it differs from the uninterrupted run.
        broken: What was broken; None where that was done before.
    """

    comparison: RunComparison
    broken: Broken | None = None

    @property
    def caught(self) -> bool:
        """Whether it differs, as it must."""
        return not self.comparison.equal


@dataclass(frozen=True, slots=True)
class SavedAgain:
    """What a run saved that loaded a step and did nothing else.

    Args:
        step: The step.
        states: What it had loaded, and what it saved.
    """

    step: int
    states: StateComparison


@dataclass(slots=True)
class CheckOutcome:
    """What a check came to.

    Args:
        steps: N: the step that must be committed before the kill.
        more: M: the steps after it.
        interrupted: The runs that were killed and resumed.
        control: The broken control; None where there was none.
        seconds: How long each start of the command took, by its log's name.
        folder: Where everything lies.
        profile: How far values might be off.
        again: What was loaded, saved again before the first update; None where the command has no ``{again}``.
    """

    steps: int
    more: int
    interrupted: Sequence[KilledRun]
    control: Control | None
    seconds: dict[str, float] = field(default_factory=dict)
    folder: Path | None = None
    profile: Profile = EXACT
    again: SavedAgain | None = None

    @property
    def equal(self) -> bool:
        """Whether every resumed run is equal to the uninterrupted one, and what was loaded to what had been saved."""
        loaded = self.again is None or self.again.states.tally.equal
        return loaded and all(run.comparison.equal for run in self.interrupted)

    @property
    def first(self) -> Finding | None:
        """The first difference: what was loaded otherwise than it was saved, else the first of a resumed run."""
        loaded = self.again.states.tally.findings[:1] if self.again is not None else []
        runs = [run.comparison.first(rank) for run in self.interrupted for rank in run.comparison.ranks or [0]]
        return next((finding for finding in [*loaded, *runs] if finding is not None), None)

    @property
    def worst(self) -> MeasuredDifference | None:
        """Of the values that the profile lets pass, the one that takes most of what is allowed."""
        found = [tally.worst for run in self.interrupted for tally in run.comparison.tallies if tally.worst is not None]
        return max(found, key=lambda off: off.share, default=None)

    @property
    def verdict(self) -> Verdict:
        """The result in a word."""
        if not self.equal:
            return "different"
        if self.control is None:
            return "no control"
        if not self.control.caught:
            return "blind"
        return "exact" if self.profile == EXACT else "within"

    @property
    def passed(self) -> bool:
        """Whether the resume was shown to be exact, as far as was asked."""
        return self.verdict in ("exact", "within", "no control")

    @property
    def notes(self) -> list[str]:
        """What explains the result, one line each."""
        found = [note for run in self.interrupted for note in run.notes]
        if self.verdict == "blind":
            found.append(
                "the broken control ended up equal to the uninterrupted run: the check is blind, and equality proves nothing. "
                "Does the command load what it finds in {dir}? Is training still going on after step N?"
            )
        if self.verdict == "no control":
            found.append("no broken control was compared: that the check can see a difference at all was not shown")
        return found


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """How to check.

    Args:
        steps: N: the step that must be committed before the kill.
        more: M: the steps after it.
        kill_after: The moment of the kill.
        runs: How many runs are killed, each at a moment of its own.
        seed: Draws the moments.
        timeout: Seconds that one start of the command may take.
        ignore: Values that may differ, ``FILE:KEY`` or ``metrics:NAME``, besides :data:`~.ignored.VALUES`.
        stubs: Pickled classes to load as inert stubs.
        profile: How far values may be off.
    """

    steps: int
    more: int
    kill_after: Moment = "step-commit"
    runs: int = 1
    seed: int = 0
    timeout: float = 3600.0
    ignore: tuple[str, ...] = ()
    stubs: tuple[str, ...] = ()
    profile: Profile = EXACT

    @property
    def coarse(self) -> bool:
        """See :class:`~.control.Broken`."""
        return self.profile != EXACT

    @property
    def last(self) -> int:
        """The last step."""
        return self.steps + self.more


def compare_outputs(a: Path, b: Path, last: int, options: CheckOptions) -> RunComparison:
    """Compare two finished runs.

    Args:
        a: Output folder of the uninterrupted run.
        b: Output folder of the other one.
        last: The step to compare.
        options: What is ignored.

    Raises:
        CheckpointError: The step is not committed in both, or is damaged.
    """
    first, second = (require_committed(root_of(run), last, f"run {run.name}") for run in (a, b))
    ignored = Ignored(options.ignore)
    states = StepComparer((a, b), ignored, options.stubs, options.profile).compare(first, second)
    ranks = sorted({*metrics_by_rank(a), *metrics_by_rank(b)})
    comparer = MetricsComparer(ignored, options.profile)
    lines = {rank: comparer.compare(metrics_of(a, rank), metrics_of(b, rank)) for rank in ranks}
    return RunComparison(b.name, states, lines)


@dataclass(slots=True)
class ResumeCheck:
    """Checks that a trainer resumes exactly.

    Args:
        template: Its command.
        folder: Where to work; made where it does not exist, must be empty.
        options: How to check.
        say: Hears how far it has come, line by line.

    Raises:
        UsageError: The command lacks a placeholder.
        StorageError: The folder is not empty, or cannot be made.
    """

    template: Template
    folder: Path
    options: CheckOptions
    say: Say = lambda line: None
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.template.check()
        self.folder = self.folder.absolute()
        _make_empty(self.folder)

    def run(self) -> CheckOutcome:
        """Do all runs, and compare.

        Raises:
            UsageError: The command cannot be run, fails by itself, takes too long, or does not save where it should.
            CheckpointError: What it saved is damaged.
        """
        whole = self._uninterrupted()
        interrupted, control, again = [], None, None
        rng = random.Random(self.options.seed)
        for number in range(self.options.runs):
            places = self._places("B" if not number else f"B{number + 1}")
            kill = self._killed(places, rng)
            if control is None:  # before the run goes on, and deletes the step that it resumes from
                copy, coarse = self._places("C").output, self.options.coarse
                control = make_control(places.output, copy, kill.resumes_from, self.options.stubs, coarse=coarse)
                again = self._saved_again(places, kill.resumes_from) if self.template.has_again else None
            before = self._compared_before(whole, places, kill.resumes_from)
            self._to_the_end(places, "resumed", f"resumes from step {kill.resumes_from}")
            interrupted.append(KilledRun(self._compared(whole, places), kill, before))
        self._to_the_end(self._places("C"), "", f"the control: resumes from a broken step ({control})")
        caught = Control(self._compared(whole, self._places("C")), control)
        options = self.options
        return CheckOutcome(
            options.steps, options.more, interrupted, caught, self.seconds, self.folder, options.profile, again
        )

    def _saved_again(self, source: RunPlaces, step: int) -> SavedAgain:
        """Let a copy of what the kill left be loaded and saved, with no update in between.

        Raises:
            UsageError: It did not save the step.
        """
        places = replace(self._places("D"), again=True)
        copy = copy_run(source.output, places.output, step)
        saved = step_in(root_of(source.output), step)
        before = written_at(copy)
        self._to_the_end(places, "", f"loads step {step}, and saves it again before the first update")
        require_committed(copy.parent, step, "run D")
        if written_at(copy) == before:
            raise UsageError(
                f"run D was told by {{again}} to load step {step}, to save it again and to end, and did not save it\n"
                f"After loading, where {{again}} is 1: save at the step that was loaded. Its log: {places.log()}"
            )
        comparer = StepComparer((source.output, places.output), Ignored(self.options.ignore), self.options.stubs)
        return SavedAgain(step, comparer.compare(saved, copy))

    def _places(self, name: str) -> RunPlaces:
        return RunPlaces(self.folder, name)

    def _uninterrupted(self) -> RunPlaces:
        places, options = self._places("A"), self.options
        seen = self._to_the_end(places, "", "uninterrupted")
        require_committed(root_of(places.output), options.last, "run A")
        if not any(options.steps <= step < options.last for step in seen):
            raise UsageError(
                f"run A committed the steps {', '.join(map(str, sorted(seen)))}: none from {options.steps} to {options.last - 1}, "
                "so there is nothing that a killed run could resume from\nLet it save more often, or give other --steps and --more."
            )
        if self.template.has_metrics and not places.metrics.is_file():
            raise UsageError(f"{places.metrics}: run A wrote no metrics, although the command has {{metrics}}")
        return places

    def _killed(self, places: RunPlaces, rng: random.Random) -> Kill:
        options = self.options
        until_end = span(root_of(self._places("A").output), options.steps, options.last)
        plan = KillPlan(options.kill_after, options.steps, options.last, until_end, rng)
        for attempt in range(_ATTEMPTS):
            kill = self._kill_once(places, plan, attempt)
            if kill is not None:
                self.say(f"run {places.name}: killed {kill.processes} processes {kill.phase}")
                return kill
            self.say(f"run {places.name}: the moment to kill it ({options.kill_after}) was missed")
        raise UsageError(
            f"run {places.name} could not be killed at the right moment ({options.kill_after}) in {_ATTEMPTS} attempts: "
            f"its {'saves' if options.kill_after == 'during-save' else 'steps'} are too short\n"
            f"Did it commit step {options.steps}? Give a larger --more or another --kill-after. Its log: {places.log('killed')}"
        )

    def _kill_once(self, places: RunPlaces, plan: KillPlan, attempt: int) -> Kill | None:
        _remove(places)
        self.say(f"run {places.name}: to be killed ({self.options.kill_after}, once step {plan.step} is committed)")
        with self._started(places, "killed") as command:
            watch = Watch(places.output)
            kill = plan.strike(command, watch, lambda: self._within_time(command, places), attempt)
            self.seconds[f"{places.name}-killed"] = command.seconds
            by_itself = not command.killed and command.exit_code not in (0, None)
            if by_itself and plan.last not in watch.committed():
                raise command.failure(f"run {places.name} ended by itself with exit code {command.exit_code}")
        return kill

    def _to_the_end(self, places: RunPlaces, part: str, what: str, last: int | None = None) -> set[int]:
        """Run it to its end; returns the steps that were seen committed."""
        self.say(f"run {places.name}: {what}")
        with self._started(places, part, last) as command:
            watch, said, at, seen = Watch(places.output), -1, time.monotonic(), set[int]()
            while not command.ended():
                self._within_time(command, places)
                seen.update(watch.committed())
                newest = max(seen, default=-1)
                if newest != said or time.monotonic() - at > _SAY_EVERY_S:
                    said, at = newest, time.monotonic()
                    self._say_step(places, newest, command.seconds)
                time.sleep(_PAUSE_S)
            self.seconds[f"{places.name}{f'-{part}' if part else ''}"] = command.seconds
            if command.exit_code:
                raise command.failure(f"run {places.name} failed: exit code {command.exit_code}")
        return seen.union(watch.committed())

    def _say_step(self, places: RunPlaces, newest: int, seconds: float) -> None:
        done = f"step {newest} of {self.options.last} is committed" if newest >= 0 else "no step is committed yet"
        self.say(f"run {places.name}: {done}, {seconds:.0f} s")

    def _started(self, places: RunPlaces, part: str, last: int | None = None) -> RunningCommand:
        last = self.options.last if last is None else last
        return RunningCommand(
            self.template.filled(places, last), self.template.environment(places, last), places.log(part)
        )

    def _within_time(self, command: RunningCommand, places: RunPlaces) -> None:
        if command.seconds > self.options.timeout:
            raise command.failure(
                f"run {places.name} took longer than {self.options.timeout:g} s (--timeout), and was ended"
            )

    def _compared_before(self, whole: RunPlaces, other: RunPlaces, step: int) -> StateComparison | None:
        """Compare what the kill left with what the uninterrupted run had then, where it has kept that."""
        folders = [step_in(root_of(run.output), step) for run in (whole, other)]
        if not all(is_committed(folder) for folder in folders):
            return None
        ignored = Ignored(self.options.ignore)
        comparer = StepComparer((whole.output, other.output), ignored, self.options.stubs, self.options.profile)
        return comparer.compare(folders[0], folders[1])

    def _compared(self, whole: RunPlaces, other: RunPlaces) -> RunComparison:
        self.say(f"comparing run {other.name} with run A")
        return compare_outputs(whole.output, other.output, self.options.last, self.options)


def clear(folder: Path, *, everything: bool = False) -> None:
    """Remove the checkpoints of a check; its logs, metrics and what it wrote of them stay, unless everything is to go."""
    for path in [folder] if everything else [path for path in folder.iterdir() if path.is_dir()]:
        with suppress(OSError):
            remove(path)


def _make_empty(folder: Path) -> None:
    try:
        make_folder(folder)
        occupied = any(folder.iterdir())
    except OSError as error:
        raise storage_error(error, folder, "create") from error
    if occupied:
        raise StorageError(f"{folder}: is not empty\nGive a new folder as --dir, or remove what is there.")


def _remove(places: RunPlaces) -> None:
    """Begin a run anew."""
    for path in (places.output, *metrics_by_rank(places.output).values(), places.log("killed")):
        remove(path)
