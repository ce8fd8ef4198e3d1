"""Committing the steps that a trainer writes with its own code: aside, with a manifest, by one rename; and finding the one to go on from.

The trainer's files lie in the step as it wrote them, so its own resume reads them, with this package or without. What is added is that a
step is there as a whole or not at all, whatever moment the process is killed at; that damage is noticed before it is loaded; rules on what
is kept; and events. Every trainer's seam (``mcore_rlhf.integrations``) uses this, and does nothing else of the kind itself.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from mcore_rlhf.errors import CheckpointError, Incomplete, Problems, UsageError, headline
from mcore_rlhf.formats.registry import detect, is_model
from mcore_rlhf.storage import reading
from mcore_rlhf.storage.beneath import Beneath, make_folder, move, remove_beneath, remove_empty, write_over
from mcore_rlhf.storage.links import enclose
from mcore_rlhf.storage.manifest import FileEntry, Manifest, provenance
from mcore_rlhf.storage.paths import local_path
from mcore_rlhf.storage.publish import LocalPublication
from mcore_rlhf.storage.transactions import new_transaction
from mcore_rlhf.trainers.known import trainer_named
from mcore_rlhf.trainers.table import Trainer

from .run.candidates import Resume
from .run.events import EVENTS_NAME, EventLog
from .run.failed import FailedSave
from .run.options import LOG, Hook, Reporter, check_values
from .run.retention import Retention, remember
from .run.root import RootLock, open_root, remove_small
from .run.together import GOES_AFTER, Together, Write, damage_of_share
from .run.world import World
from .trainer_root import TrainerRoot

OURS = "mcore_rlhf"
"""A folder in a step, of what we add to its trainer's files."""
_LONGEST_TRACKER = 1 << 20


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How a trainer's steps are committed.

    Args:
        keep: What is kept of committed steps; None for everything, or for what the trainer's own setting says where it has one.
        on_error: What a save that fails is: an error of the training (``raise``), or something that is said (``continue``); a mistake in
            the calls is raised in any case. Either way nothing is published, and older steps are untouched. Where no later save has gone
            well, the end of the run says so: see :meth:`TrainerSteps.close`.
        on_existing: What happens among committed steps that this run has neither loaded nor written: see
            :class:`~.run.options.ManagerOptions`.
        fsync: Whether a step is on the disk before it appears.
        check: What is verified before a step is loaded: every byte (``bytes``), or lengths only (``sizes``).
        timeout: Seconds to wait for a rank that does not come.
        on_event: Hears of everything that happens; None for a line each in ``events.jsonl`` of the root.
        provenance: For every manifest: git revision, hash of the configuration.

    Raises:
        UsageError: Something has a value that it cannot have; all of it is named.
    """

    keep: Retention | None = None
    on_error: Literal["raise", "continue"] = "raise"
    on_existing: Literal["refuse", "continue"] = "refuse"
    fsync: bool = True
    check: Literal["bytes", "sizes"] = "bytes"
    timeout: float = 600.0
    on_event: Hook | None = None
    provenance: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = Problems()
        check_values(self, _CHOICES, problems)
        problems.raise_if_any()


_CHOICES = {"on_error": ("raise", "continue"), "on_existing": ("refuse", "continue"), "check": ("bytes", "sizes")}


class TrainerSteps:
    """Saves and finds the steps of one run. Every rank makes one, and makes the same calls: all of them are collective.

    Args:
        root: The folder in which the trainer has its steps, on a file system that all ranks share.
        trainer: Its name, as in ``mcore-rlhf``'s table of trainers.
        options: See :class:`StepOptions`.
        world: Who makes the calls, where that is not every rank.
    """

    def __init__(
        self, root: str | Path, trainer: str, options: StepOptions | None = None, world: World | None = None
    ) -> None:
        self.options = options or StepOptions()
        self.root = TrainerRoot(local_path(root).absolute(), _known(trainer))
        self.world = world or World.current(self.options.timeout)
        enclose(self.root.path)
        self.reporter = Reporter(self.world.rank, self.options.on_event or EventLog(self.root.path / EVENTS_NAME))
        self._lock: RootLock | None = None
        self._opened = False
        self._own = set[int]()
        self._went_back_to: int | None = None
        self._unsaved = ""

    def resume(self, which: str | int | Path | None, *, must_exist: bool = False) -> Path | None:
        """The folder that the trainer is to load: every byte of it is what was committed, and all ranks were given the same.

        Args:
            which: ``auto``: the newest committed step that is intact; damaged ones are passed over with a line that says why. A number:
                that step. A path: that folder; one without a manifest is the trainer's own, and taken as it is. None: nothing.
            must_exist: Whether finding nothing is an error.

        Raises:
            CheckpointError: What was named is damaged or does not exist; nothing is intact, and something is there. On every rank.
        """
        self.world.meet()
        self._open()
        choice = Resume.parse(which)
        folders = self.world.broadcast(self.world.on_all_ranks("looking for a step", partial(self._to_try, choice)))
        for step, folder in folders:
            found = self._found_in(folder)
            if not found.found:
                return self._taken(folder, step, went_back=choice.kind != "auto" or (step, folder) != folders[0])
            if choice.kind != "auto":
                found.raise_if_any()
            found.raise_if_unread()
            self.reporter.say(
                "skip", step, f"{folder.name} is not resumed from: damaged: {headline(found.found[0].message)}"
            )
        if folders:
            raise self.root.nothing_intact()
        if must_exist:
            raise UsageError(f"{self.root.path}: holds no step to resume from")
        return None

    def _to_try(self, choice: Resume) -> list[tuple[int, Path]]:
        if not self.world.is_rank0:
            return []
        if choice.kind == "none":
            if self.options.on_existing == "refuse":
                self.root.refuse_others()
            return []
        if choice.kind == "auto":
            return [(step.step, step.local) for step in self.root.candidates(self.reporter)]
        folder = self.root.best_of(choice.step) if choice.kind == "step" else choice.path
        if not folder.is_dir():
            numbers = dict.fromkeys(str(step.step) for step in self.root.listed() if step.resumable)
            there = ", ".join(numbers) or "none"
            raise UsageError(f"{folder}: does not exist\nCommitted steps in {self.root.path}: {there}.")
        return [(self.number_of(folder), folder)]

    def number_of(self, folder: Path) -> int:
        """The step that a folder is, by its manifest or else its name; zero where neither says."""
        path = folder / self.root.manifest
        said = Manifest.read(path).step if path.is_file() else None
        return self.root.trainer.step_of(folder.name) or 0 if said is None else said

    def _found_in(self, folder: Path) -> Problems:
        """What is wrong with a step; every rank reads its share, and all hear of everything."""
        problems = Problems()
        if (folder / self.root.manifest).is_file():
            try:
                problems.extend(damage_of_share(self.world, folder / self.root.manifest, self.options.check == "sizes"))
            except CheckpointError as error:
                problems.add_error(error)
        everything = Problems()
        for found in self.world.all_gather(problems.found):
            everything.extend(found)
        return everything

    def goes_on_from(self, folder: Path) -> None:
        """Note that the trainer has loaded a step, which somebody else has verified: newer ones are left behind at the next save."""
        self._taken(folder, self.number_of(folder), went_back=True)

    def _taken(self, folder: Path, step: int, went_back: bool) -> Path:
        remember(folder)
        self._own.add(step)
        self._went_back_to = step if went_back else None
        self.reporter.say("load", step, f"{self.root.trainer.title} loads {folder}")
        return folder

    def save(
        self,
        step: int,
        write: Write,
        *,
        within: bool = False,
        name: str = "",
        metrics: Mapping[str, float] | None = None,
        protect: Collection[int] = (),
        trackers: Collection[str] = (),
        mark: str = "",
    ) -> Path | None:
        """Have the trainer write a step aside, and publish it.

        Args:
            step: Its number.
            write: Called on every rank with a hidden folder; whatever lies there when all have returned is the step.
            within: Whether the trainer makes a folder of the step's name there by itself, whose content is the step.
            name: What its folder is called, where the trainer's names say more than the number.
            metrics: Numbers to keep with it, for retention of the best.
            protect: Steps that stay, whatever the rules say.
            trackers: Files beside the step by which the trainer finds it: they are kept in it, and laid into the root after the commit.
            mark: A file that the trainer may have laid where the step goes, to say that it is not whole: it is taken away, as ours is
                whole or not there.

        Returns:
            Where the step lies; None where the save failed and :attr:`StepOptions.on_error` is to go on.

        Raises:
            Exception: What the trainer's code raised, on the rank that it did; a CheckpointError on all others. Nothing is published.
        """
        try:
            self.world.meet()
            self.world.barrier(f"save step {step}")  # which names who does not come
            self._open()
            target = self.root.path / name if name else self.root.folder_of(step)
            self._clear(target, mark)
            path = self._saved(step, target, write, (target.name if within else "", trackers), metrics or {})
        except Exception as error:  # whatever a trainer's own code raises
            self.reporter.say("failed", step, f"not saved: {type(error).__name__}: {headline(str(error))}")
            if isinstance(error, UsageError):  # a mistake is never gone on with
                raise
            if self.world.is_rank0:
                FailedSave.note(self.root.path, step, error)
            if self.options.on_error == "raise":
                raise
            self._unsaved = (
                f"{self.root.path}: step {step} was not saved, nor any after it: what was trained since the newest step is lost with this "
                f"process: {type(error).__name__}: {headline(str(error))}"
            )
            return None
        self._unsaved = ""
        remember(path)
        self._own.add(step)
        if self.world.is_rank0:
            self._after(step, path, protect, trackers)
        return path

    def _clear(self, target: Path, mark: str) -> None:
        if not mark:
            return
        self.world.barrier(f"save {target.name}")  # each rank has laid it by then
        if self.world.is_rank0:
            with suppress(OSError):  # what is something else stays, and the save says so
                remove_beneath(target, mark)
                remove_empty(target)

    def publish(self, step: int, aside: Path, metrics: Mapping[str, float] | None = None) -> Path | None:
        """Publish a step that the trainer has written by itself into a folder of another name, on the same file system.

        Args:
            step: Its number.
            aside: The folder, which is there no more afterwards.
            metrics: See :meth:`save`.

        Raises:
            CheckpointError: See :meth:`save`.
        """
        within = self.root.folder_of(step).name

        def write(staging: Path) -> None:
            if self.world.is_rank0:
                move(aside, staging / within)

        return self.save(step, write, within=True, metrics=metrics)

    def _saved(
        self, step: int, target: Path, write: Write, places: tuple[str, Collection[str]], metrics: Mapping[str, float]
    ) -> Path:
        started = time.monotonic()
        folder = Together(
            self.world,
            target,
            partial(self._begun, target),
            partial(self._arrange, *places),
            partial(self._manifest, step, metrics),
            lambda: self.reporter.say("save", step, stall_s=time.monotonic() - started),
            min(GOES_AFTER, self.options.timeout) if self.options.on_error == "raise" else None,
        )
        nbytes = folder.publish(partial(self._written, step, write))
        seconds = time.monotonic() - started
        if self.world.is_rank0:
            self.reporter.say("commit", step, seconds=seconds, bytes=nbytes, gb_per_s=nbytes / max(seconds, 1e-9) / 1e9)
        return target

    def _written(self, step: int, write: Write, staging: Path) -> None:
        """Have the trainer write; what it raises is said at once, as the other ranks may be long in coming to hear it."""
        try:
            write(staging)
        except Exception as error:
            LOG.warning(
                "step=%d: %s: not written: %s: %s", step, self.world.name, type(error).__name__, headline(str(error))
            )
            raise

    def _begun(self, target: Path) -> LocalPublication:
        assert self._lock is not None
        self._lock.hold()
        if self.options.on_existing == "refuse":
            self.root.refuse_others()
        made = LocalPublication(
            target, True, self.options.fsync, self.root.is_replaceable, self.root.manifest, new_transaction()
        )
        made.__enter__()
        for line in made.recovered:
            self.reporter.say("clean", None, line)
        return made

    def _arrange(self, within: str, trackers: Collection[str], staging: Path) -> None:
        """Move up what the trainer wrote into a folder of the step's name, and its trackers into one of ours.

        What its trainer would not take for a step of its own is not published.
        """
        with Beneath(staging) as folder:
            inner = staging / within
            for path in sorted(inner.iterdir()) if within and inner.is_dir() else ():
                folder.move(f"{within}/{path.name}", path.name)
            if within:
                folder.remove(within)
            for name in trackers:
                if (staging / name).is_file():
                    folder.make(OURS)
                    folder.move(name, f"{OURS}/{name}")
        trainer = self.root.trainer
        if not trainer.wrote(staging) or (missing := trainer.missing(staging)):
            lacking = ", ".join(missing if trainer.wrote(staging) else trainer.marks)
            raise Incomplete(
                f"{staging}: {trainer.title} wrote no step of its own: {lacking} is not there; nothing was published"
            )

    def track(self, folder: Path, trackers: Collection[str]) -> None:
        """Lay a committed step's trackers into the root, for the trainer's own look-up; rank 0 does."""
        for name in trackers if self.world.is_rank0 else ():
            kept = folder / OURS / name
            if kept.is_file():
                write_over(self.root.path / name, reading.read_bytes(kept, _LONGEST_TRACKER), fsync=self.options.fsync)

    def _manifest(
        self, step: int, metrics: Mapping[str, float], staging: Path, files: Mapping[str, FileEntry]
    ) -> Manifest:
        trainer = self.root.trainer
        places = {role: staging / name if name else staging for role, names in trainer.roles.items() for name in names}
        parts = [{"role": role, "format": detect(at).name} for role, at in places.items() if is_model(at)]
        more = {str(key): value for key, value in self.options.provenance.items()}
        return Manifest(
            files,
            step=step,
            parts=parts,
            provenance=provenance(**more, trainer=trainer.name, ranks=self.world.size),
            report={"metrics": dict(metrics)},
        )

    def _after(self, step: int, path: Path, protect: Collection[int], trackers: Collection[str]) -> None:
        """The step is safe. Nothing that fails from here on is a failed save."""
        try:
            FailedSave.forget(self.root.path)
            self.track(path, trackers)
            for number in self.root.leave_behind(step, self._own, self._went_back_to):
                self.reporter.say(
                    "skip", number, f"left behind, and put in quarantine: this run saved step {step} after it"
                )
            if self.options.keep is not None:
                self.root.retire(self.options.keep, protect, self.reporter)
        except Exception as error:
            LOG.warning("step=%d: after the commit: %s", step, error)

    def _open(self) -> None:
        """Take the root, once: nobody else saves there, and what dead runs left is cleaned up. Collective."""
        if self._opened:
            return
        open_root(self.root.path, self.world)
        self.world.on_all_ranks(f"opening {self.root.path}", self._take)
        self._opened = True

    def _take(self) -> None:
        if not self.world.is_rank0:
            return
        make_folder(self.root.path)
        self._lock = RootLock(self.root.path)
        for line in [*self.root.clean_up(), *remove_small(self.root.path)]:
            self.reporter.say("clean", None, line)

    def close(self) -> None:
        """Let go of the root; another run may save there.

        Raises:
            Incomplete: The last save failed, and :attr:`StepOptions.on_error` was to go on; on every rank, and once.
        """
        if lost := self.end():
            raise Incomplete(lost)

    def end(self) -> str:
        """Let go of the root, where the trainer's script goes on, and may save what it has by itself: that the last save failed is logged.

        Returns:
            What :meth:`close` raises; empty where nothing is lost.
        """
        if self._lock is not None:
            self._lock.release()
        self.reporter.close()
        self.world.close()
        lost, self._unsaved = self._unsaved, ""
        if lost:
            LOG.error("%s", lost)
        return lost

    def __enter__(self) -> TrainerSteps:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(CheckpointError):
            self.end()


def _known(name: str) -> Trainer:
    found = trainer_named(name)
    if found is None:
        raise UsageError(f"trainer: {name!r} is not known: mcore-rlhf has no table of how its steps are called")
    return found


__all__ = ["StepOptions", "TrainerSteps"]
