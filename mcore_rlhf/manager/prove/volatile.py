"""The values that differ between two runs although nothing is wrong: the whole list, and why each is on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

VALUES: tuple[tuple[str, str, str], ...] = (
    ("manifest.json", "transaction", "the identity of a commit"),
    ("manifest.json", "crc32", "of the manifest as a whole"),
    ("manifest.json", "provenance/time", "a time of day"),
    ("manifest.json", "report/*seconds", "how long something took"),
    ("manifest.json", "files/*/crc32", "of the file as a whole; its content is compared value by value"),
    ("manifest.json", "files/*/bytes", "of the file as a whole; its content is compared value by value"),
    ("*.pt", "args/iteration", "where this process started; Megatron takes the step from elsewhere in the file"),
    ("*.pt", "args/master_addr", "the launcher's"),
    ("*.pt", "args/master_port", "the launcher's"),
    ("*.pt", "args/rdzv_*", "the launcher's"),
)
"""File, key and reason. Paths into a run's own folder need no entry: they are compared as if the folder were one."""

METRICS: tuple[str, ...] = (
    "time", "timestamp", "wall_time", "elapsed", "seconds", "*_seconds", "step_time", "*_per_second", "tokens_per_sec",
)  # fmt: skip
"""Names of metrics that are measured by a clock."""


@dataclass(frozen=True, slots=True)
class Ignored:
    """What is not compared.

    Args:
        patterns: ``FILE:KEY`` with ``*``, besides the list; ``metrics:NAME`` for a metric.
    """

    patterns: Sequence[str] = ()

    def value(self, file: str, key: str) -> bool:
        """Whether a value of a step may differ."""
        listed = any(fnmatchcase(file, name) and fnmatchcase(key, pattern) for name, pattern, _ in VALUES)
        return listed or any(fnmatchcase(f"{file}:{key}", pattern) for pattern in self.patterns)

    def metric(self, name: str) -> bool:
        """Whether a metric may differ."""
        listed = any(fnmatchcase(name, pattern) for pattern in METRICS)
        return listed or any(fnmatchcase(f"metrics:{name}", pattern) for pattern in self.patterns)


@dataclass(frozen=True, slots=True)
class Neutral:
    """Takes a run's own folder out of its values.

    Args:
        output: The folder.
    """

    output: Path

    def __call__(self, text: str) -> str:
        """The text with ``{dir}`` in place of the folder."""
        return text.replace(str(self.output), "{dir}")
