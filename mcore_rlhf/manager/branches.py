"""Steps that a run leaves behind: it went back, or began anew, and they are newer than what it saves now.

``auto`` would take the newest step, which is none of this run's, and rules on what to keep count by number. So what is left
behind is put in quarantine: nothing is lost, resume passes over it, and no rule counts it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from . import steps


def left_behind(root: Path, step: int, own: Collection[int]) -> list[int]:
    """Newer steps that are not this run's.

    Args:
        root: The folder of all steps.
        step: The newest step of this run.
        own: All steps that this run has saved.
    """
    return [found.step for found in steps.committed(root) if found.step > step and found.step not in own]


def leave_behind(root: Path, step: int, own: Collection[int]) -> list[int]:
    """Put newer steps that are not this run's in quarantine.

    Returns:
        Their numbers.

    Raises:
        StorageError: A note cannot be written.
    """
    found = left_behind(root, step, own)
    for number in found:
        steps.quarantine(steps.step_folder(root, number), f"left behind by a run that saved step {step} after it")
    return found


def move_aside(folder: Path, name: str) -> Path | None:
    """Make way for a step where something lies that this release did not write, or cannot read.

    Args:
        folder: Where the step will appear.
        name: Identity of the transaction.

    Returns:
        Where it lies now; None where there was nothing, or a step of ours, which is replaced.

    Raises:
        OSError: It cannot be renamed.
    """
    found = steps.found_at(folder)
    if found is None or folder.is_symlink() or not any(folder.iterdir()):
        return None
    if found.state in ("committed", "damaged") and not steps.is_of_newer_release(folder):
        return None
    aside = folder.with_name(f"{folder.name}.found-{name}")
    folder.rename(aside)
    return aside
