"""What a step's folder is called, and the hidden folders beside it."""

from __future__ import annotations

import re
from pathlib import Path

from mcore_rlhf.storage import regular

MANIFEST = "manifest.json"
"""The last file of a step that is written."""

RESERVED = ("data", "rlhf", "rng", "exports", MANIFEST)
"""Names in a step, or beside steps, that no role may have."""

_STEP = re.compile(r"global_step_(0|[1-9][0-9]{0,17})")
_ASIDE = re.compile(r"\.global_step_(0|[1-9][0-9]{0,17})\.(?:partial|old)-.+")
_LOCK = re.compile(r"\.(global_step_(?:0|[1-9][0-9]{0,17}))\.lock-.+")


def tracker_text(tracker: Path) -> str:
    """What a tracker says, whoever wrote it.

    Raises:
        OSError: It is missing, is no file, or cannot be read.
    """
    return regular.read_line(tracker)


def step_folder(root: Path, step: int) -> Path:
    """The folder of a step: ``<root>/global_step_50``."""
    return root / f"global_step_{step}"


def step_of(path: Path) -> int | None:
    """The step whose folder this is, by its name; None where it is not a step's folder."""
    match = _STEP.fullmatch(path.name)
    return int(match.group(1)) if match else None


def step_of_aside(path: Path) -> int | None:
    """The step that this hidden folder belongs to: one being written, replaced or deleted."""
    match = _ASIDE.fullmatch(path.name)
    return int(match.group(1)) if match else None


def target_of_lock(path: Path) -> Path | None:
    """The step's folder that this lock file guards; None where it is not such a lock."""
    match = _LOCK.fullmatch(path.name)
    return path.with_name(match.group(1)) if match else None


def is_hidden(path: Path) -> bool:
    """Whether this is not a step yet, or no longer."""
    return path.name.startswith(".")
