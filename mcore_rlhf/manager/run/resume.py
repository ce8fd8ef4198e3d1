"""Which step a run resumes from, and loading it: the newest that is committed and intact, or the one that is named."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from mcore_rlhf.core.account import Fate
from mcore_rlhf.engines.stateful import Undo
from mcore_rlhf.errors import Corrupt, NotACheckpoint, StorageError, Unsupported
from mcore_rlhf.storage.manifest import check
from mcore_rlhf.storage.paths import local_path

from . import steps
from .branches import left_behind
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
        return cls("path", path=local_path(os.path.expandvars(text)).expanduser().absolute())


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
        started = time.monotonic()
        candidates = self._agreed(resume)
        tried: list[_Candidate] = []
        while todo := [candidate for candidate in candidates if candidate not in tried]:
            tried.append(todo[0])
            prepared = self._prepared(todo[0], skip=resume.kind == "auto")
            if prepared is not None:
                self._apply(prepared, started)
                return prepared
            if len(todo) == 1 and resume.kind == "auto":  # another run may meanwhile have replaced what was listed
                candidates = self._agreed(resume)
        if must_exist or tried:
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
        visible = [step for step in listed if step.path.name == steps.step_folder(self.root, step.step).name]
        newest = found[0].step if found else -1
        for step in visible:
            if step.step > newest and step.state == "damaged" and not step.quarantined:
                _refuse_newer_release(step)
        if not found and any(step.state != "committed" and step.nbytes and not step.quarantined for step in visible):
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

    def _apply(self, load: StepLoad, started: float) -> None:
        """All ranks install, or none has; only then the first tensor is overwritten."""
        with Undo() as undo:
            together(self.crew, f"restoring {load.folder.name}", partial(load.install, undo))
        together(self.crew, f"copying {load.folder.name}", load.fill)
        self._tell(load, time.monotonic() - started)

    def _tell(self, load: StepLoad, seconds: float) -> None:
        if self.crew.world.rank != 0:
            return
        for fate, text in load.report.lines:
            LOG.log(30 if fate is Fate.LOST else 20, "rank=0 step=%d event=load %s: %s", load.step, fate.value, text)
        self.reporter.say(
            "load", load.step, f"resumed from {load.folder.name}; next step {load.step + 1}",
            seconds=seconds, bytes=load.nbytes, gb_per_s=load.nbytes / max(seconds, 1e-9) / 1e9,
        )  # fmt: skip
        newer = left_behind(self.root, load.step, ()) if self.root.is_dir() else []
        if newer and load.folder.parent == self.root and not self.options.read_only:
            LOG.warning(
                "rank=0 step=%d: newer steps are there (%s); the first save of this run puts them in quarantine, so that "
                "nothing resumes from what it leaves behind", load.step, ", ".join(map(str, newer)),
            )  # fmt: skip


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
        why = steps.why_not_committed(folder) or "it is not what it lists"
        raise Corrupt(f"{folder}: is damaged: {why}\nResume from another step: mcore-rlhf steps {folder.parent}")
    return _Candidate(folder, number)
