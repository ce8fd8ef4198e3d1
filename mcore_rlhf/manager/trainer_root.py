"""The root of a run whose trainer writes its steps itself: what lies there, what of it may go, what dead processes left.

Its steps are called as the trainer calls them (``checkpoint-50``, ``step-50``). What is committed is answered where it is for every root
(:mod:`.runs`, :mod:`.run.steps`); what is kept, by the rules of :mod:`.run.retention`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from mcore_rlhf.errors import NotACheckpoint, Unsupported
from mcore_rlhf.storage.beneath import remove
from mcore_rlhf.storage.manifest import is_newer
from mcore_rlhf.storage.patience import names_in
from mcore_rlhf.trainers.table import Trainer

from .run import retention, steps
from .run.naming import Naming
from .run.options import Reporter
from .run.retention import LEFTOVER, Retention
from .run.steps import Step
from .runs import naming_by

_GOING_ON = (
    "Resume from them, or give this run a folder of its own; or say that it goes on among them: "
    "StepOptions(on_existing='continue'), which puts newer steps than it saves in quarantine."
)


@dataclass(frozen=True, slots=True)
class TrainerRoot:
    """A folder of steps that one trainer writes.

    Args:
        path: The folder.
        trainer: Whose steps they are.
    """

    path: Path
    trainer: Trainer

    @property
    def naming(self) -> Naming:
        """How its steps are called."""
        return naming_by(self.trainer)

    @property
    def manifest(self) -> str:
        """What the manifest is called in a step."""
        return self.naming.manifest

    def folder_of(self, step: int) -> Path:
        """Where a step appears."""
        return self.path / self.trainer.folder_of(step)

    def best_of(self, step: int) -> Path:
        """Where a step lies, or would: of several folders of it, the one to go on from."""
        found = [one.local for one in self.listed() if one.step == step]
        return found[-1] if found else self.folder_of(step)

    def forget(self, copy: Path) -> None:
        """Take what is ours out of a copy of a committed step, which becomes another one."""
        for name in (self.manifest, steps.NOTE):
            remove(copy / name)

    def listed(self) -> list[Step]:
        """The folders of all steps, oldest first, whatever they are worth.

        Raises:
            LayoutMismatch: Some are another trainer's.
            StorageError: It cannot be listed.
        """
        return [step for step in self.naming.listed(self.path) if not steps.is_hidden(step.path)]

    def is_replaceable(self, folder: Path) -> bool:
        """Whether a folder that is called as a step is one, so that the step may be saved again: the trainer would write over it."""
        return self.trainer.step_of(folder.name) is not None and (
            (folder / self.manifest).is_file() or self.trainer.wrote(folder) or steps.looks_foreign(folder)
        )

    def refuse_others(self) -> None:
        """See :func:`.run.retention.refuse_others`."""
        retention.refuse_others(self.path, self.naming, _GOING_ON)

    def candidates(self, reporter: Reporter) -> list[Step]:
        """The steps that a run may go on from, newest first; those that are passed over are said.

        Raises:
            Unreadable: A newer one cannot be read, and may be sound.
            Unsupported: A newer one was written by a newer release.
            NotACheckpoint: None is committed, and something is there.
        """
        there = self.listed()
        found = list(self._newest_first(there, reporter))
        if not found and any(step.nbytes and not step.quarantined for step in there):
            raise self.nothing_intact()
        return found

    def nothing_intact(self) -> NotACheckpoint:
        """What is to be said where something is there, and nothing to resume from."""
        return NotACheckpoint(
            f"{self.path}: no committed step that is intact\n"
            f"mcore-rlhf steps {self.path} says what is there, and what of {self.trainer.title}'s own becomes one by mcore-rlhf adopt; "
            "or name a step's folder to resume from it as it is."
        )

    def _newest_first(self, there: list[Step], reporter: Reporter) -> Iterator[Step]:
        before = False
        for step in reversed(there):
            if step.resumable:
                before = True
                yield step
                continue
            if not before:
                step.require_read()
                if step.state == "damaged" and not step.quarantined and is_newer(step.path / self.manifest):
                    raise Unsupported(
                        f"{step.path}: {step.why}\nResume with the release that wrote it, or name an older step."
                    )
            why = f"in quarantine: {step.quarantined}" if step.quarantined else f"{step.state}: {step.why}"
            reporter.say("skip", step.step, f"{step.path.name} is not resumed from: {why}")

    def leave_behind(self, step: int, own: Collection[int], went_back_to: int | None) -> list[int]:
        """See :func:`.run.retention.leave_behind`."""
        return retention.leave_behind(self.path, step, own, went_back_to, self.naming)

    def retire(self, keep: Retention, protect: Collection[int], reporter: Reporter) -> None:
        """Delete the committed steps that no rule keeps; the newest one never, nor one that others wrote."""
        planned = retention.plan_deletions(self.path, keep, protect, naming=self.naming)
        for gone in retention.apply(self.path, planned, self.naming):
            reporter.say("delete", gone.step, gone.reason, bytes=gone.nbytes)

    def clean_up(self) -> list[str]:
        """Remove what dead processes left half-written, and put back what they had moved aside; for the holder of the root's lock.

        Returns:
            What was done, one line each.
        """
        done = retention.clean_up(self.path, alone=True, naming=self.naming)
        for match in filter(None, map(LEFTOVER.fullmatch, names_in(self.path))):
            left, lock = self.path / match[0], self.path / f".{match['name']}.lock-{match['transaction']}"
            half = match["what"] == "partial" and self.trainer.step_of(match["name"]) is not None
            if (
                half and not lock.exists() and remove(left)
            ):  # a lock is made first and removed last: a power failure took it
                done.append(f"removed {left}: it was left half-written")
        return done
