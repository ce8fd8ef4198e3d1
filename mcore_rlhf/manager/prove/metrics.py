"""Comparing the metrics of two runs: files of one JSON object per line, each with its step, which a kill may have cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mcore_rlhf.errors import Incomplete
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.paths import cannot_open

from .compare import ComparisonTally, Finding, measured, shown
from .ignored import Ignored
from .profiles import EXACT, Profile, between, decimal

STEP_NAMES = ("step", "global_step", "iteration")
"""The field that says which step a line is of: the first of these that it has."""

_WHERE = "metrics"
_MAX_LOG = 1 << 30
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class MetricsLine:
    """What was written of a step.

    Args:
        step: The step.
        values: By name. Numbers with a point are kept as their text, so that every digit counts.
    """

    step: int
    values: Mapping[str, object]


@dataclass(slots=True)
class MetricsComparison:
    """What comparing two files of metrics found.

    Args:
        lines: Lines of the second run that were compared.
        equal: How many of them are equal.
        repeated: How many are of a step that the second run did twice.
        began_again: Steps at which the second run went back to an earlier one.
        tally: The single values.
    """

    lines: int = 0
    equal: int = 0
    repeated: int = 0
    began_again: list[int] = field(default_factory=list)
    tally: ComparisonTally = field(default_factory=ComparisonTally)


def read_lines(path: Path) -> list[MetricsLine]:
    """The lines of a file, in order. What a kill cut off in the middle is left out.

    Raises:
        CheckpointError: The file is missing or cannot be read, or a line says nothing of its step.
    """
    try:
        text = reading.read_text(path, _MAX_LOG, "replace")
    except OSError as error:
        raise cannot_open(error, path) from error
    pieces = text.split("\n")
    found = []
    for number, piece in enumerate(pieces, start=1):
        values = _parsed(piece)
        if values is not None:
            found.append(MetricsLine(_step(path, number, values), values))
        elif piece.strip() and not piece.lstrip().startswith("{"):
            raise Incomplete(f"{path}:{number}: expected a JSON object per line, found {shown(piece)}")
    return found


def _parsed(piece: str) -> dict[str, object] | None:
    """The object of a line. Where a cut-off line was never ended, the next one stands behind it, and that is taken."""
    at = piece.find("{")
    while at >= 0:
        try:
            value = reading.parse_json(piece[at:], parse_float=str, parse_constant=str)
        except ValueError:
            value = None
        if isinstance(value, dict) and (at == 0 or any(name in value for name in STEP_NAMES)):
            return value
        at = piece.find("{", at + 1)
    return None


def _step(path: Path, number: int, values: Mapping[str, object]) -> int:
    step = next((values[name] for name in STEP_NAMES if name in values), None)
    if type(step) is not int:
        raise Incomplete(
            f"{path}:{number}: the line does not say of which step it is; expected one of {', '.join(STEP_NAMES)}, a whole number"
        )
    return step


@dataclass(frozen=True, slots=True)
class MetricsComparer:
    """Compares the metrics of two runs.

    Args:
        ignored: What is not compared.
        profile: How far numbers with a point may be off.
    """

    ignored: Ignored = field(default_factory=Ignored)
    profile: Profile = EXACT

    def compare(self, a: Path, b: Path) -> MetricsComparison:
        """Compare every line of the second run with the uninterrupted one's line of the same step.

        Args:
            a: The uninterrupted run's file.
            b: The other one's. A step that it did twice must be equal both times.

        Raises:
            CheckpointError: A file is missing, cannot be read, or is not one of metrics.
        """
        result = MetricsComparison()
        expected: dict[int, MetricsLine] = {}
        for line in read_lines(a):
            expected.setdefault(line.step, line)
        self._compare_lines(expected, read_lines(b), result)
        return result

    def _compare_lines(
        self, expected: Mapping[int, MetricsLine], lines: list[MetricsLine], result: MetricsComparison
    ) -> None:
        seen, last = set[int](), None
        for line in lines:
            if last is not None and line.step <= last:
                result.began_again.append(line.step)
            result.lines += 1
            result.repeated += line.step in seen
            when = "done again" if line.step in seen else ""
            equal = line.step in expected and self._compare_values(expected[line.step], line, when, result.tally)
            if line.step not in expected:
                result.tally.differs(Finding(_WHERE, f"step {line.step}", "not there", "there"))
            result.equal += equal
            seen.add(line.step)
            last = line.step
        for step in sorted(expected.keys() - seen):
            result.tally.differs(Finding(_WHERE, f"step {step}", "there", "not there"))

    def _compare_values(self, a: MetricsLine, b: MetricsLine, detail: str, tally: ComparisonTally) -> bool:
        """Compare two lines; whether they are equal."""
        before = tally.differing
        for name, first, second in _pairs(a.values, b.values):
            if self.ignored.metric(name):
                tally.ignored += 1
            elif first == second and type(first) is type(second):
                tally.same()
            else:
                self._count(
                    Finding(_WHERE, f"step {a.step}/{name}", _text(first), _text(second), detail),
                    name,
                    first,
                    second,
                    tally,
                )
        return tally.differing == before

    def _count(self, finding: Finding, name: str, first: object, second: object, tally: ComparisonTally) -> None:
        """Count two values that are not the same."""
        row = self.profile.row(f"{_WHERE}:{name}")
        off = None if row is None else between(_WHERE, finding.key, decimal(first), decimal(second), row)
        if off is not None and off.within:
            tally.passes(off)
        else:
            tally.differs(finding if off is None else measured(finding, off))


def _pairs(a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[tuple[str, object, object]]:
    for name in dict.fromkeys([*a, *b]):
        yield name, a.get(name, _ABSENT), b.get(name, _ABSENT)


def _text(value: object) -> str:
    if value is _ABSENT:
        return "not there"
    return value if isinstance(value, str) and len(value) < 40 else shown(value)
