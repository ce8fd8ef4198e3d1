"""What a check came to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .control import Broken
from .killing import Kill
from .metrics import MetricsComparison
from .states import StateComparison

Verdict = Literal["exact", "different", "blind", "no control"]
"""``exact``: everything is equal, and the broken control was caught. ``different``: something is not equal. ``blind``: equal,
but so was the control, so equality proves nothing. ``no control``: equal, and no control was asked for."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Another run compared with the uninterrupted one.

    Args:
        name: The other run's.
        states: The last step of both.
        metrics: The metrics of both; None where the command writes none.
    """

    name: str
    states: StateComparison
    metrics: MetricsComparison | None

    @property
    def equal(self) -> bool:
        """Whether nothing differs, and something was compared."""
        return self.states.tally.equal and (self.metrics is None or self.metrics.tally.equal)


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A run that was killed and resumed.

    Args:
        comparison: What it came to.
        kill: Where it was hit; None where it was compared only.
        before: The step that it resumed from, as it was when the kill hit; None where the uninterrupted run has not kept its own.
    """

    comparison: Comparison
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

    comparison: Comparison
    broken: Broken | None = None

    @property
    def caught(self) -> bool:
        """Whether it differs, as it must."""
        return not self.comparison.equal


@dataclass(slots=True)
class Outcome:
    """What a check came to.

    Args:
        steps: N: the step that must be committed before the kill.
        more: M: the steps after it.
        interrupted: The runs that were killed and resumed.
        control: The broken control; None where there was none.
        seconds: How long each start of the command took, by its log's name.
        folder: Where everything lies.
    """

    steps: int
    more: int
    interrupted: Sequence[Interrupted]
    control: Control | None
    seconds: dict[str, float] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def equal(self) -> bool:
        """Whether every resumed run is equal to the uninterrupted one."""
        return all(run.comparison.equal for run in self.interrupted)

    @property
    def verdict(self) -> Verdict:
        """The result in a word."""
        if not self.equal:
            return "different"
        if self.control is None:
            return "no control"
        return "exact" if self.control.caught else "blind"

    @property
    def passed(self) -> bool:
        """Whether the resume was shown to be exact, as far as was asked."""
        return self.verdict in ("exact", "no control")

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
