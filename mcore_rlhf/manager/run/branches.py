"""Steps that a run leaves behind: it went back, or began anew, and they are newer than what it saves now.

``auto`` would take the newest step, which is none of this run's, and rules on what to keep count by number. So what is left
behind is put in quarantine: nothing is lost, resume passes over it, and no rule counts it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from mcore_rlhf.errors import UsageError

from . import steps

_OF_THIS_RUN: set[Path] = set()
"""What this process has loaded or committed, by whichever manager: a run may open several, one after the other."""
_SHOWN = 10


def remember(folder: Path) -> None:
    """Note that this run has loaded or committed a step, or a model in it."""
    _OF_THIS_RUN.add(folder.resolve())


def refuse_others(root: Path) -> None:
    """Refuse to save among the steps of another run, which rules on what to keep would then count, and delete.

    Args:
        root: The folder of all steps.

    Raises:
        UsageError: There are committed steps, and this run has neither loaded nor written any of them.
    """
    if any(folder.is_relative_to(root.resolve()) for folder in _OF_THIS_RUN):
        return
    found = [step.step for step in steps.committed(root)]
    if found:
        listed = ", ".join(map(str, found[-_SHOWN:]))
        raise UsageError(
            f"{root}: holds committed steps that this run has neither loaded nor written ({listed})\n"
            "Resume from them: manager.load('auto'), in YAML runner.resume_dir: auto. Or give this run a root of its own. Or say that "
            "it goes on among them: ManagerOptions(on_existing='continue'), in YAML checkpoint.on_existing: continue; newer steps than "
            "it saves are then put in quarantine, and older ones are counted, and deleted, by the rules on what to keep."
        )


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
