"""The user's command with places to fill in: ``train.py --output-dir {dir} --steps {steps} --resume {resume}``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mcore_rlhf.errors import Problems, UsageError

REQUIRED, OPTIONAL = ("dir", "steps"), ("resume", "metrics")
RESUME = "auto"
"""What ``{resume}`` always is: begin anew in an empty folder, and go on from the newest step in any other."""

_VARIABLE = "MCORE_RLHF_CHECK_"
_MEANING = {"dir": "the folder of the run's output", "steps": "the step to end at, counted from the start of training"}
_PLACE = re.compile(r"\{([A-Za-z_]+)\}")


@dataclass(frozen=True, slots=True)
class RunPlaces:
    """Where one run works; all that it leaves carries its name.

    Args:
        folder: The folder of the whole check.
        name: ``A``, ``B`` or ``C``.
    """

    folder: Path
    name: str

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


def metrics_of(output: Path) -> Path:
    """The metrics file of a run with this output folder: ``A.metrics.jsonl`` beside ``A``."""
    return output.with_name(f"{output.name}.metrics.jsonl")


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
    return {"dir": str(run.output), "steps": str(steps), "resume": RESUME, "metrics": str(run.metrics)}
