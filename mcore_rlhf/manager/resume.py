"""Which step a run resumes from, and loading it: the newest that is committed and intact, or the one that is named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from mcore_rlhf.errors import Corrupt, NotACheckpoint, StorageError
from mcore_rlhf.formats.report import Fate
from mcore_rlhf.storage.manifest import check

from . import steps
from .components import Components
from .crew import Crew
from .events import LOG, Reporter
from .loading import StepLoad, together
from .settings import ManagerOptions
from .steps import Step


class _Damaged(Exception):
    """What makes an automatic resume try an older step. A model that does not fit is not damage: it would not fit that one."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


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
        return cls("path", path=Path(os.path.expandvars(text)).expanduser().absolute())


@dataclass(frozen=True, slots=True)
class _Candidate:
    folder: Path
    step: int


@dataclass(slots=True)
class Resumer:
    """Finds a step and loads it, on all ranks together.

    Args:
        root: The folder of all steps.
        parts: What the run consists of.
        crew: All ranks.
        options: The manager's.
        reporter: Hears of steps that are skipped, and of the one that is loaded.
        optimizer: Whether optimizers are restored.
    """

    root: Path
    parts: Components
    crew: Crew
    options: ManagerOptions
    reporter: Reporter
    optimizer: bool

    def load(self, resume: Resume, must_exist: bool) -> StepLoad | None:
        """Load what was asked for.

        Returns:
            The step that was loaded; None where there was none and none had to be.

        Raises:
            CheckpointError: See :meth:`~.checkpoint_manager.CheckpointManager.load`.
        """
        if resume.kind == "none":
            return None
        candidates = self._agreed(resume)
        for candidate in candidates:
            prepared = self._prepared(candidate, skip=resume.kind == "auto")
            if prepared is not None:
                self._apply(prepared)
                return prepared
        if must_exist or candidates:
            raise self._nothing_intact()
        if self.crew.world.rank == 0:
            self.reporter.say("load", None, f"nothing to resume in {self.root}: starting from the beginning")
        return None

    def _nothing_intact(self) -> NotACheckpoint:
        return NotACheckpoint(
            f"{self.root}: no committed step that is intact\n"
            f"mcore-rlhf steps {self.root} says what is there and what is wrong with it; begin anew with resume: null."
        )

    def _agreed(self, resume: Resume) -> list[_Candidate]:
        """What to try, in order, as rank 0 sees it."""
        found = together(self.crew, "resuming", lambda: self._candidates(resume) if self.crew.world.coordinates else [])
        return self.crew.world.from_first(found)

    def _candidates(self, resume: Resume) -> list[_Candidate]:
        if resume.kind == "step":
            return [_named(steps.step_folder(self.root, resume.step), self.root)]
        if resume.kind == "path":
            return [_named(resume.path, self.root)]
        listed = steps.listed(self.root)
        found = list(self._newest_first(listed))
        if not found and any(step.state == "damaged" and not step.quarantined for step in listed):
            raise self._nothing_intact()  # beginning anew would overwrite what can perhaps be mended
        return found

    def _newest_first(self, listed: list[Step]) -> Iterator[_Candidate]:
        for step in reversed(listed):
            if step.resumable:
                yield _Candidate(step.path, step.step)
            elif step.path.name == steps.step_folder(self.root, step.step).name:
                why = f"in quarantine: {step.quarantined}" if step.quarantined else f"{step.state}: {step.why}"
                self.reporter.say("skip", step.step, f"{step.path.name} is not resumed from: {why}")

    def _prepared(self, candidate: _Candidate, skip: bool) -> StepLoad | None:
        load = StepLoad(candidate.folder, candidate.step, self.parts, self.crew, self.options.rng, self.optimizer)
        try:
            self._prepare(load)
        except _Damaged as damaged:
            error = damaged.error
            if not skip:
                raise error from None
            self.reporter.say("skip", candidate.step, f"{candidate.folder.name} is not resumed from: {error}")
            return None
        return load

    def _prepare(self, load: StepLoad) -> None:
        """Whether a step that cannot be loaded is damaged, or does not fit, its checksums say: its text may say anything."""
        what = load.folder.name
        try:
            together(self.crew, f"loading {what}", load.prepare)
        except Exception as error:
            self._check(load, whole=True)
            unread = (
                isinstance(error, StorageError) or load.manifest is None
            )  # on any one rank, and now perhaps it can be
            if self.crew.world.any_flags([unread])[0]:
                raise _Damaged(error) from error
            raise
        if self.options.check == "bytes":
            self._check(load, whole=self.crew.is_split)  # worlds load one by one, and must come to the same step

    def _check(self, load: StepLoad, whole: bool) -> None:
        world = self.crew.world
        try:
            together(
                self.crew, f"checking {load.folder.name}", partial(load.check_bytes, world.rank, world.size, whole)
            )
        except Exception as error:
            raise _Damaged(error) from error

    def _apply(self, load: StepLoad) -> None:
        together(self.crew, "restoring the data and the RLHF state", load.apply_small)
        together(self.crew, "restoring the models", load.apply)
        self._tell(load)

    def _tell(self, load: StepLoad) -> None:
        if self.crew.world.rank != 0:
            return
        for fate, text in load.report.lines:
            LOG.log(30 if fate is Fate.LOST else 20, "rank=0 step=%d event=load %s: %s", load.step, fate.value, text)
        self.reporter.say("load", load.step, f"resumed from {load.folder.name}; next step {load.step + 1}")
        newer = (
            [step.step for step in steps.committed(self.root) if step.step > load.step] if self.root.is_dir() else []
        )
        if newer and load.folder.parent == self.root:
            LOG.warning(
                "rank=0 step=%d: newer steps are there (%s), and resume: auto will take them; quarantine them (mcore-rlhf steps "
                "--quarantine) if this run replaces them", load.step, ", ".join(map(str, newer)),
            )  # fmt: skip


def _named(folder: Path, root: Path) -> _Candidate:
    """A step, or a model, that the user names.

    Raises:
        NotACheckpoint: It does not exist; what is there is listed.
        Corrupt: It has a manifest, and is not what that says.
    """
    if not folder.is_dir():
        there = ", ".join(str(step.step) for step in steps.committed(root)) or "none"
        raise NotACheckpoint(f"{folder}: does not exist\nCommitted steps in {root}: {there}.")
    number = steps.step_of(folder)
    if not (folder / steps.MANIFEST).is_file():
        return _Candidate(folder, number or 0)
    if number is None:  # a copy under a name of its own
        manifest = steps.read_manifest(folder)
        check(folder, manifest, sizes_only=True).raise_if_any()
        return _Candidate(folder, manifest.step or 0)
    if not steps.is_committed(folder):
        why = next((step.why for step in steps.listed(folder.parent) if step.path == folder), "it is not what it lists")
        raise Corrupt(f"{folder}: is damaged: {why}\nResume from another step: mcore-rlhf steps {folder.parent}")
    return _Candidate(folder, number)
