"""A pytest plugin: the fixture ``resume_check`` proves in a test that a trainer resumes exactly, by ``mcore-rlhf resume-check``'s own code.

::

    def test_resume(resume_check):
        resume_check([sys.executable, "train.py", "{dir}", "{steps}", "{metrics}"], steps=3, more=2)

pytest finds it by the entry point ``pytest11`` of the installed package. Loading it imports nothing of the package but this module, and
neither numpy nor torch; the rest is imported by the first check.

Source: pytest 9.1, ``doc/en/how-to/writing_plugins.rst`` ("Making your plugin installable by others").
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import pytest

if TYPE_CHECKING:
    from mcore_rlhf.manager.prove.check import CheckOutcome

_PLACES = ("dir", "steps", "resume", "metrics", "again")

CommandMaker = Callable[..., Sequence[str]]
"""Makes a command from those of ``dir``, ``steps``, ``resume``, ``metrics`` and ``again`` that it has parameters for, each a text."""


@dataclass(frozen=True, slots=True)
class ResumeChecker:
    """What the fixture is: called with a trainer's command, it fails the test where the trainer does not resume exactly.

    Args:
        make_folder: Makes a new empty folder for one check.
    """

    make_folder: Callable[[], Path]

    def __call__(
        self,
        command: Sequence[str] | CommandMaker,
        *,
        steps: int = 3,
        more: int = 2,
        profile: str = "exact",
        kill_after: str = "step-commit",
        runs: int = 1,
        seed: int = 0,
        timeout: float = 3600.0,
        ignore: Sequence[str] = (),
        stubs: Sequence[str] = (),
        environment: bool = False,
    ) -> CheckOutcome:
        """Run the trainer, run it again, kill it, resume it, and compare; see ``docs/how-to/prove-that-resume-is-exact.md``.

        Args:
            command: Its words, with ``{dir}``, ``{steps}``, ``{metrics}`` and so on; or a function that makes them of these.
            steps: Nothing is killed before this step is committed.
            more: Steps after it, to the end of the run.
            profile: What may be off: see :data:`mcore_rlhf.manager.prove.profiles.PROFILES`.
            kill_after: The moment of the kill: ``step-commit``, ``during-save``, ``random``.
            runs: How many runs are killed and resumed.
            seed: Draws random moments.
            timeout: Seconds that one start of the command may take.
            ignore: Values that may differ, ``FILE:KEY`` or ``metrics:NAME``, with ``*``.
            stubs: Pickled classes to load as inert stubs.
            environment: Whether the command reads ``MCORE_RLHF_CHECK_DIR`` and so on, and needs no placeholders.

        Returns:
            What the check came to, where it passed.

        Raises:
            pytest.fail.Exception: The resume is not exact, the check is blind, or the command could not be checked.
        """
        __tracebackhide__ = True
        from mcore_rlhf.errors import CheckpointError, UsageError
        from mcore_rlhf.manager.prove.check import CheckOptions, ResumeCheck, clear
        from mcore_rlhf.manager.prove.command import Template
        from mcore_rlhf.manager.prove.facts import write_by_rank
        from mcore_rlhf.manager.prove.killing import Moment
        from mcore_rlhf.manager.prove.profiles import profile_named

        folder = self.make_folder()
        try:
            if kill_after not in get_args(Moment):
                raise UsageError(f"kill_after: expected one of {', '.join(get_args(Moment))}, found {kill_after!r}")
            if steps < 1 or more < 1:
                raise UsageError(f"steps and more: expected 1 or more, found {steps} and {more}")
            options = CheckOptions(
                steps, more, cast(Moment, kill_after), runs, seed, timeout, tuple(ignore), tuple(stubs), profile_named(profile)
            )  # fmt: skip
            outcome = ResumeCheck(Template(_words(command), environment), folder, options).run()
            write_by_rank(outcome, folder)
        except CheckpointError as error:
            pytest.fail(f"resume_check: {error}", pytrace=False)
        if not outcome.passed:
            pytest.fail(_why(outcome, folder), pytrace=False)
        clear(folder)
        return outcome


def _words(command: Sequence[str] | CommandMaker) -> list[str]:
    """The command with its placeholders.

    Raises:
        UsageError: It is one text, which no shell takes apart here, or no texts.
    """
    from mcore_rlhf.errors import UsageError

    given: object = command
    if callable(command):
        takes = inspect.signature(command).parameters
        given = command(**{name: f"{{{name}}}" for name in _PLACES if name in takes})
    if isinstance(given, list | tuple) and all(isinstance(word, str) for word in given):
        return list(given)
    raise UsageError(
        f"the command: expected a list of texts, found {given!r}\nNo shell is involved: one text for each word, paths as str(path)."
    )


def _why(outcome: CheckOutcome, folder: Path) -> str:
    """What a failed check says: the first difference by name and step, what explains it, and where the rest lies."""
    from mcore_rlhf.manager.prove.check import SAYS

    lines = [f"resume_check: {SAYS[outcome.verdict]}"]
    first = outcome.first
    if first is not None:
        values = "" if first.first == first.second else f"run A has {first.first}, the resumed one {first.second}"
        said = "; ".join(filter(None, [values, first.detail]))
        lines.append(f"first difference: {first.where}: {first.key}: {said}")
        total = sum(tally.differing for run in outcome.interrupted for tally in run.comparison.tallies)
        lines.append(f"{total} values differ in all, profile {outcome.profile.name}")
    return "\n".join([*lines, *outcome.notes, f"logs, metrics, checkpoints and rank-*.json: {folder}"])


@pytest.fixture
def resume_check(tmp_path_factory: pytest.TempPathFactory) -> ResumeChecker:
    """Proves that a trainer resumes exactly: ``resume_check(command, steps=3, more=2, profile="exact")``."""
    return ResumeChecker(lambda: tmp_path_factory.mktemp("resume-check"))
