"""What differs although nothing is wrong: the whole list, and why each is on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from .places import MANIFESTS

_IN_MANIFESTS: tuple[tuple[str, str], ...] = (
    ("transaction", "the identity of a commit"),
    ("crc32", "of the manifest as a whole"),
    ("provenance/time", "a time of day"),
    ("report/*seconds", "how long something took"),
    ("report/*time", "how long something took"),
    ("report/*_per_second", "how fast something was"),
    ("files/*/crc32", "of the file as a whole; its content is compared value by value"),
    ("files/*/bytes", "of the file as a whole; its content is compared value by value"),
)

VALUES: tuple[tuple[str, str, str], ...] = (
    *((manifest, key, why) for manifest in MANIFESTS for key, why in _IN_MANIFESTS),
    ("*.pt", "args/iteration", "where this process started; Megatron takes the step from elsewhere in the file"),
    ("*.pt", "args/master_addr", "the launcher's"),
    ("*.pt", "args/master_port", "the launcher's"),
    ("*.pt", "args/rdzv_*", "the launcher's"),
    (
        "training_args.bin",
        "*",
        "a pickle of the arguments, the run's folder among them; Trainer does not load it to resume",
    ),
    ("trainer_state.json", "log_history/*/*time", "measured by a clock"),
    ("trainer_state.json", "log_history/*/*_per_second", "measured by a clock"),
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
