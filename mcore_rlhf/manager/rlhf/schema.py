"""The names in ``rlhf_state.json``, which writing and reading share; docs/reference/rlhf-state.md describes them."""

from __future__ import annotations

import re

from ...errors import CheckpointError, Problems

Files = dict[str, dict[str, object]]
"""Tensor files by stem: what ``rlhf/<stem>.pt`` holds."""

COUNTERS = (
    "iteration", "rollout_step", "optimizer_steps", "prompts_consumed", "samples_consumed", "tokens_consumed",
    "epoch", "ppo_epoch", "minibatch",
)  # fmt: skip
FIELDS = (
    "format", "version", "algorithm", "counters", "weight_version", "kl", "statistics", "schedules", "best",
    "in_flight", "buffers", "extra", "tensors",
)  # fmt: skip
BUFFER_FIELDS = ("meta", "tensors")

EXTRA, IN_FLIGHT = "extra", "in_flight"
"""Stems of the tensor files that are not buffers."""

_STEM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def is_stem(name: object) -> bool:
    """Whether a name can be a file's: one that cannot lead out of the folder."""
    return isinstance(name, str) and _STEM.fullmatch(name) is not None


def check_buffer_name(name: str, place: str, problems: Problems, kind: type[CheckpointError]) -> None:
    """A buffer's name is the name of its file; note it where it cannot be."""
    if not is_stem(name) or name in (EXTRA, IN_FLIGHT):
        problems.add(
            kind,
            f"{place}: a buffer's name must be a plain file name, other than {EXTRA!r} and {IN_FLIGHT!r}",
            "It has letters, digits, '_', '-' and '.', and starts with a letter or digit.",
        )
