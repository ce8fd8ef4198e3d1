"""Which steps a run may resume from: of its root and of its mirror, the newest first."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal

from mcore_rlhf.errors import CheckpointError, Corrupt, NotACheckpoint, StorageError, Unsupported
from mcore_rlhf.storage.manifest import check
from mcore_rlhf.storage.paths import ReadablePath, local_path
from mcore_rlhf.storage.patience import identity, is_still
from mcore_rlhf.storage.store import StorePath
from mcore_rlhf.storage.unfinished import refuse_unfinished, replaced

from . import steps
from .mirror_status import MirrorStatus, resumable
from .options import ManagerOptions, Mirror, Reporter
from .steps import Step


@dataclass(frozen=True, slots=True)
class Resume:
    """What to resume from.

    Args:
        kind: ``none``, ``auto``, ``step`` or ``path``.
        step: The step's number, for ``step``.
        path: A folder, for ``path``.
    """

    kind: Literal["none", "auto", "step", "path"]
    step: int = 0
    path: Path = Path()

    @classmethod
    def parse(cls, which: str | int | Path | None) -> Resume:
        """Understand ``auto``, ``none``, a number, or a path (``~`` and variables are expanded)."""
        text = "" if which is None else str(which).strip()
        if text.lower() in ("", "none", "null"):
            return cls("none")
        if text.lower() == "auto":
            return cls("auto")
        if not isinstance(which, Path) and text.isdecimal():
            return cls("step", step=int(text))
        return cls("path", path=local_path(os.path.expandvars(text)).expanduser().absolute())


@dataclass(frozen=True, slots=True)
class StepToTry:
    """What every rank opens for itself.

    Args:
        where: The folder; empty where it is that of the step in the mirror.
        step: Its number.
        seen: What tells the folder from one that takes its place.
        unread: It, where it cannot be read; as it may be sound, no other is taken instead.
    """

    where: str
    step: int
    seen: tuple[int, int] | None = None
    unread: Step | None = None


@dataclass(slots=True)
class Candidates:
    """Finds steps.

    Args:
        root: The folder of all steps.
        options: The manager's.
        reporter: Hears of steps that are skipped.
    """

    root: Path
    options: ManagerOptions
    reporter: Reporter
    _opened: StorePath | None = None

    def of(self, resume: Resume) -> list[StepToTry]:
        """What to try, in order.

        Raises:
            CheckpointError: What was named does not exist or is damaged; or nothing is intact, and something is there.
        """
        if resume.kind == "step":
            folder = steps.step_folder(self.root, resume.step)
            if not folder.is_dir() and self._is_mirrored(resume.step):
                return [StepToTry("", resume.step)]
            return [_named(folder, self.root)]
        if resume.kind == "path":
            return [_named(resume.path, self.root)]
        there_is = steps.listed(self.root)
        aside = steps.lying_aside((step.step, step.path) for step in there_is)
        visible = [step for step in there_is if not steps.is_hidden(step.path)]
        near = list(self._newest_first(visible))
        there = self._of_mirror(visible, bool(near))
        far = [StepToTry("", step.step) for step, why in there if not why]
        found = sorted([*near, *far], key=_newest_and_near_first)
        newest = found[0].step if found else -1
        if (
            max(aside, default=-1) > newest
        ):  # a run that writes has put it back; one that only reads takes no older one for it
            raise replaced(steps.step_folder(self.root, max(aside)))
        for step in [*visible, *(step for step, _ in there)]:
            if step.step > newest and step.state == "damaged" and not step.quarantined:
                _refuse_newer_release(step)
        if not found and any(step.state != "committed" and step.nbytes and not step.quarantined for step in visible):
            raise self.nothing_intact()  # beginning anew would overwrite what can perhaps be mended
        return found

    def is_still(self, candidate: StepToTry) -> bool:
        """Whether what was to be tried is still there, and no other in its place."""
        return not candidate.where or is_still(Path(candidate.where), candidate.seen)

    def folder(self, candidate: StepToTry) -> ReadablePath:
        """Where one lies."""
        return Path(candidate.where) if candidate.where else steps.step_folder(self._mirror(), candidate.step)

    def nothing_intact(self) -> NotACheckpoint:
        """What is to be said where something is there, and nothing to resume from."""
        beside = f", nor in its mirror {self._mirror_url}" if self._mirror_url else ""
        return NotACheckpoint(
            f"{self.root}: no committed step that is intact{beside}\n"
            f"mcore-rlhf steps {self.root} says what is there and what is wrong with it; begin anew with resume: null."
        )

    def _newest_first(self, visible: Sequence[Step]) -> Iterator[StepToTry]:
        for step in reversed(visible):
            if step.resumable:
                yield StepToTry(str(step.path), step.step, identity(step.path))
            elif step.undecided:
                yield StepToTry(str(step.path), step.step, unread=step)
            else:
                why = f"in quarantine: {step.quarantined}" if step.quarantined else f"{step.state}: {step.why}"
                self.reporter.say("skip", step.step, f"{step.path.name} is not resumed from: {why}")

    @property
    def _mirror_url(self) -> str:
        return self.options.mirror.url if isinstance(self.options.mirror, Mirror) else ""

    def _mirror(self) -> StorePath:
        assert isinstance(self.options.mirror, Mirror)
        if self._opened is None:
            self._opened = self.options.mirror.open()
        return self._opened

    def _is_mirrored(self, step: int) -> bool:
        return bool(self._mirror_url) and steps.is_committed(steps.step_folder(self._mirror(), step))

    def _of_mirror(self, local: Sequence[Step], has_others: bool) -> list[tuple[Step, str]]:
        """See :func:`~.mirror_status.resumable`. Where the mirror cannot be asked, the root's own steps do.

        Raises:
            StorageError: The root has none, and the mirror may.
        """
        if not self._mirror_url:
            return []
        try:
            there = resumable(steps.listed(self._mirror()), local, MirrorStatus.read(self.root))
            for step, _ in takewhile(lambda found: found[1], there):  # the newest first
                step.require_read()
        except (CheckpointError, OSError) as error:
            if not has_others:
                raise StorageError(
                    f"{self.root}: has no step to resume from, and its mirror cannot be read: {error}\n"
                    "Try again when it can be. A run that shall begin anew loads nothing: resume: null."
                ) from error
            self.reporter.say("skip", None, f"the mirror cannot be read, and the root's steps are taken: {error}")
            return []
        for step, why in there:
            if why and step.state != "partial":  # on its way there
                self.reporter.say("skip", step.step, f"{step.path} is not resumed from: {why}")
        return there


def _newest_and_near_first(found: StepToTry) -> tuple[int, bool]:
    return -found.step, not found.where


def _refuse_newer_release(step: Step) -> None:
    """A step that a newer release wrote is not damaged: going on from an older one would leave it behind unasked.

    Raises:
        Unsupported: It is one.
    """
    if steps.is_of_newer_release(step.path):
        raise Unsupported(
            f"{step.path}: {step.why}\n"
            f"Resume with that release; or quarantine the step (mcore-rlhf steps {step.path.parent} --quarantine {step.step}), or "
            "name an older one."
        )


def _named(folder: Path, root: Path) -> StepToTry:
    """A step, or a model, that the user names.

    Raises:
        NotACheckpoint: It does not exist; what is there is listed.
        Corrupt: It has a manifest, and is not what that says.
    """
    if not folder.is_dir():
        refuse_unfinished(folder)
        there = ", ".join(str(step.step) for step in steps.committed(root)) or "none"
        raise NotACheckpoint(f"{folder}: does not exist\nCommitted steps in {root}: {there}.")
    number = steps.step_of(folder)
    if not (folder / steps.MANIFEST).is_file():
        return StepToTry(str(folder), number or 0)
    if number is None:  # a copy under a name of its own
        manifest = steps.read_manifest(folder)
        check(folder, manifest, sizes_only=True).raise_if_any()
        return StepToTry(str(folder), manifest.step or 0)
    if not steps.is_committed(folder):
        why = steps.why_not_committed(folder) or "it is not what it lists"
        raise Corrupt(f"{folder}: is damaged: {why}\nResume from another step: mcore-rlhf steps {folder.parent}")
    return StepToTry(str(folder), number)
