"""Which step of a root a command works on, where none was named, and what that passes over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_rlhf.errors import CheckpointError, Corrupt, NotACheckpoint, Problem, Unsupported, UsageError
from mcore_rlhf.storage.manifest import check

from . import steps
from .steps import TRACKER, Step, tracker_text

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class ChosenStep:
    """A step of a root.

    Args:
        root: The root.
        folder: The step's folder.
        why: What made it the one: ``named``, ``newest committed``, ``newest intact`` or ``tracker``.
        passed_over: Newer steps, newest first, each with its state and what is wrong with it.
    """

    root: Path
    folder: Path
    why: str
    passed_over: tuple[Step, ...] = ()

    @property
    def step(self) -> int:
        """Its number."""
        return steps.step_of(self.folder) or 0

    @property
    def undecided(self) -> tuple[Step, ...]:
        """Newer steps about which nobody has decided: neither empty, nor in quarantine."""
        return tuple(step for step in self.passed_over if step.nbytes and not step.quarantined)

    def damage(self) -> list[Problem]:
        """What is wrong with newer steps that are damaged.

        Raises:
            Unsupported: One of them is a newer release's.
        """
        damaged = [step for step in self.undecided if step.state == "damaged"]
        for step in damaged:
            _refuse_newer_release(step)
        advice = f"An older step is {self.folder}; mcore-rlhf steps {self.root} lists them all."
        return [Problem(Corrupt, f"{step.path}: is damaged: {step.why}", advice) for step in damaged]

    def require_newest(self) -> None:
        """Refuse to work on an older step than the newest, unless that was asked for.

        Raises:
            Corrupt: A newer one is damaged.
            UsageError: A newer one is not committed.
            Unsupported: A newer one is of a newer release.
        """
        if not self.undecided:
            return
        damaged = self.damage()
        listed = "; ".join(step.describe() for step in self.undecided[:_SHOWN])
        raise (Corrupt if damaged else UsageError)(
            f"{self.root}: the newest step is not the newest that is committed, {self.folder.name}: {listed}\n"
            f"--newest-intact takes the newest that is committed and whose checksums hold; --step N takes one by its number."
        )


def choose(
    root: Path, step: int | None = None, *, newest_intact: bool = False, progress: Callable[[int], None] | None = None
) -> ChosenStep:
    """Choose a step of a root.

    Args:
        root: The root of a run.
        step: The number of the step that is meant, or None for the newest that is committed. Where all steps are another
            trainer's, for the one that its tracker names.
        newest_intact: Whether every file's checksum must hold as well; damaged steps are passed over.
        progress: Called with the number of bytes just read.

    Raises:
        NotACheckpoint: There is no such step, or none of them is committed and no tracker says which is meant.
        Corrupt: None of them is committed, and some are damaged.
    """
    if step is not None:
        folder = steps.step_folder(root, step)
        if not folder.is_dir():
            raise NotACheckpoint(f"{folder}: does not exist\nmcore-rlhf steps {root} lists the steps.")
        return ChosenStep(root, folder, "named")
    passed_over: list[Step] = []
    for found in steps.newest_first(root):
        if found.resumable and newest_intact:
            found = _checked(found, progress)
        if found.resumable:
            why = "newest intact" if newest_intact else "newest committed"
            return ChosenStep(root, found.path, why, tuple(passed_over))
        passed_over.append(found)
    return _tracked(root, passed_over)


def _checked(step: Step, progress: Callable[[int], None] | None) -> Step:
    """The step, damaged if a checksum does not hold."""
    count = progress or (lambda nbytes: None)
    try:
        manifest = steps.read_manifest(step.path)
        found = check(step.path, manifest, progress=lambda _, nbytes: count(nbytes)).found
        why = found[0].message.splitlines()[0] if found else ""
    except CheckpointError as error:
        why = str(error).splitlines()[0]
    return replace(step, state="damaged", why=why) if why else step


def _tracked(root: Path, found: list[Step]) -> ChosenStep:
    """In a root that others wrote, their tracker is the authority.

    Source: verl ``verl/utils/checkpoint/checkpoint_manager.py`` (``latest_checkpointed_iteration.txt``, the global step);
    RLinf writes none.
    """
    foreign = [step for step in found if step.state == "foreign" and not step.quarantined]
    if foreign and not any(step.state == "damaged" for step in found):
        named = _tracker(root)
        for at, step in enumerate(found):
            if step.step == named and step in foreign:
                return ChosenStep(root, step.path, "tracker", tuple(found[:at]))
    listed = "; ".join(step.describe() for step in found[:_SHOWN]) or "there is no step at all"
    kind = Corrupt if any(step.state == "damaged" for step in found) else NotACheckpoint
    raise kind(
        f"{root}: no committed step in it: {listed}\n"
        f"mcore-rlhf steps {root} says what is there; name one with --step N, or give its folder."
    )


def _tracker(root: Path) -> int | None:
    try:
        text = tracker_text(root / TRACKER)
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() and len(text) < 19 else None


def _refuse_newer_release(step: Step) -> None:
    if steps.is_of_newer_release(step.path):
        raise Unsupported(f"{step.path}: {step.why}\nUse that release; or name an older step with --step N.")
