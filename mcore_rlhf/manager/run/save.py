"""Saving one step after another: the part that training waits for, and the one that goes on behind it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mcore_rlhf.errors import CheckpointError, Incomplete, StorageError, Unreadable, UsageError, headline, in_a_line
from mcore_rlhf.storage import threads
from mcore_rlhf.storage.host_pool import HostPool
from mcore_rlhf.storage.waiting import waiting_for

from ..rlhf.consumed import consumed_by
from ..rlhf.journal import RolloutJournal
from ..rlhf.journal_files import has_journal
from . import retention, steps
from .background import Background, Left, wait_together
from .commit import Stopped, Transaction, new_transaction
from .failed import FailedSave
from .fence import Fence
from .job import SaveJob, is_full
from .later import RetryCount
from .mirror import Mirroring
from .options import LOG, Export, ManagerOptions, Reporter
from .policies import SaveClock
from .progress import SaveProgress
from .retention import leave_behind, move_aside, refuse_others, remember
from .root import remove_rest
from .snapshot import Components, Snapshot, accounted, described, staged
from .staging import HostStaging, needed
from .steps import Step
from .world import World, raisable
from .write import Earlier


@dataclass(slots=True)
class Saver:
    """Saves steps on one rank; all ranks call its methods alike.

    Args:
        root: The folder of all steps.
        parts: What the run consists of.
        world: The ranks.
        options: The manager's.
        reporter: Hears of what is done.
        clock: Measures saves for the policies.
        own: Steps that this run has committed, on the rank that commits.
        went_back_to: The step of the root that was loaded though there were newer ones; it is kept while the run goes on.
        hold: Sees, on the rank that commits, that this run still has the root to itself.
        mirror: Sends committed steps away, on the rank that commits.
        unsaved: Why the last save failed, where training went on without; None where it did not fail.
    """

    root: Path
    parts: Components
    world: World
    options: ManagerOptions
    reporter: Reporter
    clock: SaveClock
    own: set[int] = field(default_factory=set)
    went_back_to: int | None = None
    hold: Callable[[], None] = lambda: None
    mirror: Mirroring | None = None
    unsaved: Exception | None = None
    _job: SaveJob | None = None
    _last: int = -1
    _wanted: str = ""
    _host_memory: HostStaging | None = None
    _behind: Fence | None = None
    _background: Background = field(init=False)
    _asking: Background = field(init=False)
    _later: RetryCount = field(init=False)
    _journal: RolloutJournal | None = None

    def __post_init__(self) -> None:
        self._asking = Background(f"an answer from {self.root}")
        self._background = Background(f"the save into {self.root}")
        self._later = RetryCount(self.options, self.reporter)

    @property
    def _staging(self) -> HostStaging:
        """Made by who first copies anything."""
        self._host_memory = self._host_memory or HostStaging()
        return self._host_memory

    @property
    def _fence(self) -> Fence:
        """Made by who first copies behind training."""
        self._behind = self._behind or Fence(self.world, self.options, self.reporter)
        return self._behind

    def save(self, step: int, metrics: Mapping[str, float] | None, blocking: bool, transaction: str | None) -> None:
        """See :meth:`~.manager.CheckpointManager.save`."""
        try:
            self._save(step, metrics, blocking, transaction)
        except Exception as error:
            if self.world.is_one_of_several and transaction is not None:  # the others may wait for this one
                Transaction(self.root, step, transaction, self.world.rank_name, 0).abort(str(error))
            if not self._later.takes(step, error):
                if not self._is_endured(error):
                    raise
                self._lost(step, error)
            self.unsaved = error
            return
        if blocking:
            self.wait()

    def _save(self, step: int, metrics: Mapping[str, float] | None, blocking: bool, transaction: str | None) -> None:
        self.world.meet()
        self.world.barrier(f"save step {step}")
        self._finish_previous(step)
        started = time.monotonic()
        self.clock.save_started()
        opened = self._prepared(step, transaction)
        copied_at = time.monotonic()
        try:
            failed = self._opened(opened, step)
            snapshot = self.world.on_all_ranks(f"saving step {step}", partial(described, self.parts, self.world, step))
            accounted(snapshot, self.world)
            if not blocking:  # otherwise nothing runs while it is written
                self._share_memory(snapshot)
                self.world.on_all_ranks(f"copying step {step}", partial(self._copy, snapshot))
            self._see_waves(snapshot, failed)
        except BaseException as error:
            self._staging.give_back()
            opened.abort(str(error) if self.world.is_one_of_several else "")
            raise
        report: dict[str, object] = {"metrics": dict(metrics or {}), "step_seconds": self.clock.step_seconds}
        report["stall_seconds"] = time.monotonic() - started
        self._job = job = SaveJob(
            opened,
            self.world,
            self.parts,
            snapshot,
            self.reporter,
            report=report,
            provenance=self.options.provenance,
            ours=partial(self._note, step),
            then=partial(self._after, step),
            retries=self._later.retries,
            begin=self._begin,
            make_room=partial(self._make_room, step),
            earlier=self._earlier,
            done_with=partial(self._staging.give_back, snapshot.stream),
            failed=failed,
        )
        self.unsaved, lazy, nbytes = None, bool(snapshot.still), snapshot.nbytes
        overdue = None if self.options.save_timeout is None else self._overdue
        self._background.start(partial(self._run, job), overdue, job.unstarted)
        if snapshot.stream is not None and not snapshot.stream.ended:
            self._fence.begin(snapshot.stream, step, report)
            if not lazy:
                self._fence.wait()
        now = time.monotonic()
        self.reporter.say(
            "save", step, stall_s=now - started, copy_s=now - copied_at, bytes=nbytes, world=self.world.size
        )

    def _see_waves(self, snapshot: Snapshot, failed: BaseException | None) -> None:
        """Note whether the copy of any rank is there only once; then it is not for this step to be tried again."""
        wraps = self.world.is_one_of_several or (snapshot.stream is not None and snapshot.stream.wraps)
        self._later.begins(self._later.may_be_in_waves and self.world.any_rank([wraps])[0])
        if failed is not None and self._later.in_waves:
            raise failed

    def is_due(self) -> bool:
        """Whether this rank has a save that failed, and is to be tried again with what there is now."""
        return self._later.is_due(self._background.ended_within(0) and self._background.error is not None)

    def before_step(self) -> None:
        """See :meth:`~.manager.CheckpointManager.before_step`."""
        if self._behind is not None:
            self._behind.wait()

    def wait(self) -> None:
        """Wait for the last save; its error is raised on all ranks, unless training is to go on without that step."""
        try:
            self._wait()
        except Exception as error:
            self._go_on(error)

    def _go_on(self, error: Exception) -> None:
        if not self._is_endured(error):
            raise error
        LOG.warning("rank=%d: training goes on: %s", self.world.rank, in_a_line(error))

    def finish(self) -> None:
        """Wait for the last save; its error is raised in any case: no training is left that could go on.

        Raises:
            Exception: It failed, or the one before it, and none has been saved since.
        """
        self._wait()
        if self.unsaved is not None:
            raise self.unsaved

    def _is_endured(self, error: Exception) -> bool:
        """Whether training goes on without what could not be saved; a mistake in the calls themselves is never endured."""
        if self.options.on_error == "raise" or isinstance(error, UsageError):
            return False
        self.unsaved = error
        return True

    def _lost(self, step: int, error: Exception) -> None:
        """Say that a save failed before anything of it went on behind training."""
        self.reporter.say("failed", step, f"{in_a_line(error)}; training goes on")
        if self.world.commits:  # the file system may be what hangs
            with suppress(StorageError):
                threads.begin("mcore_rlhf word", FailedSave.note, self.root, step, error)

    def _wait(self) -> None:
        """See :meth:`wait`: the cause, rather than that somebody else failed."""
        error, lost = self._ended_everywhere()
        if lost is not None and error is None:
            raise lost
        causes = [] if lost is not None else self.world.all_gather(_told(error))
        found = [cause for cause in causes if cause is not None]
        if error is not None and (lost is not None or not isinstance(error, Stopped)):
            raise error from lost
        if found:
            _, kind, text = min(found, key=lambda cause: cause[0])
            raise kind(text) from error

    def _ended_everywhere(self) -> tuple[BaseException | None, Incomplete | None]:
        """Wait until the last save has ended on all ranks; or, where it has failed on one, for a while.

        A rank whose disk hangs can still say so. Were it waited for, the ranks would lose each other, and every later save with it.

        Returns:
            What this rank's part raised, or that it hangs; and what is to be said where another rank is not there.
        """
        if self.world.meeting is None:
            return self._background.join(), None
        try:
            self.world.barrier("the end of the save", patience=3)
            with waiting_for(self._background.name):
                wait_together(self.world, self._background)
        except Incomplete as lost:
            self._background.ended_within(
                3 * self.world.timeout
            )  # it may still wait for the one that is lost, and name it
            return self._outcome(), lost
        return self._outcome(), None

    def _outcome(self) -> BaseException | None:
        if self._background.ended_within(0):
            return self._background.join()
        text = f"{self.world.name}: its part of the save into {self.root} has not ended: the file system may hang\n"
        text += "That step is not committed; older ones are untouched. "
        if self.options.save_timeout is None:
            self._background.given_up = True
            return StorageError(f"{text}It is saved again when that part has ended.")
        assert self._job is not None
        self._job.progress.given_up = True
        self.reporter.say("failed", self._job.transaction.step, headline(text))
        self._background.leave(StorageError(f"{text}The next save starts afresh."))
        return self._background.join()

    def _overdue(self) -> Left | None:
        """Leave the save to itself where it stands still."""
        job, limit = self._job, self.options.save_timeout
        if job is None or limit is None or job.progress.still_s < limit:
            return None
        return job.give_up()

    def end_alone(self) -> None:
        """Wait for this rank's part of the last save, without the other ranks: they may not come."""
        error = self._background.join()
        if error is not None:
            self.reporter.say("failed", None, f"while another error was on its way: {error}")

    def reserve(self) -> None:
        """Make the host memory that an asynchronous save needs."""
        snapshot = self.world.on_all_ranks("reserving memory", partial(described, self.parts, self.world, 0))
        self._share_memory(snapshot)
        if not self._background.busy:  # what is being saved has made it
            self._staging.reserve(snapshot.files)

    def share_memory(self) -> None:
        """Be one of those of this host that save here, and take no more of its memory together than they may."""
        if self.options.max_host_memory is not None:  # other worlds save at other times
            pool = HostPool(self.root, self.options.max_host_memory, self.options.timeout / 2)
            self._host_memory = HostStaging(pool, keeps=not self.world.is_one_of_several)

    def _share_memory(self, snapshot: Snapshot) -> None:
        """Each is given as large a part as of what all copy, so all say that first; collective."""
        if self._staging.pool is not None:
            self.world.on_all_ranks("sharing memory", partial(self._staging.pool.say, needed(snapshot.files)))

    def close(self) -> None:
        """Give the memory back; what is not in the mirror is the next start's."""
        self._background.close()
        self._asking.close()
        if self._behind is not None:
            self._behind.close()
        if self.mirror is not None:
            self.mirror.close()
        if self._host_memory is not None:
            self._host_memory.free()

    def _finish_previous(self, step: int) -> None:
        """Wait for the save before, or refuse; on all ranks alike."""
        if self.options.on_busy == "refuse" and self.world.any_rank([self._background.busy])[0]:
            raise StorageError(
                f"step {step} is not saved: the one before is still being written\n"
                "Save less often (mcore-rlhf interval computes how often), or let it wait (on_busy='wait')."
            )
        try:
            self._wait()
            self._later.ended_well()
        except Exception as error:
            if not self._later.takes(step, error):
                self._go_on(error)

    def _prepared(self, step: int, transaction: str | None) -> Transaction:
        """The step's transaction: every rank's is that of rank 0."""
        if self.world.is_one_of_several and transaction is None:
            raise UsageError("several worlds save together: give all of them the same transaction id")
        number, identity = self.world.broadcast((step, transaction or new_transaction()))
        return Transaction(self.root, number, identity, self.world.rank_name, self.options.timeout, self.options.fsync)

    def _opened(self, prepared: Transaction, step: int) -> BaseException | None:
        """Open it, and see it opened; what that failed of, where it is tried again behind training.

        All ranks know of it before any engine is asked what is to be saved: those may have their ranks meet, in groups that training has.
        """
        self._wanted = prepared.id
        try:
            for do in (partial(self._open, prepared, step), partial(self._see, prepared)):
                self.world.on_all_ranks(f"saving step {step}", partial(self._in_time, do))
        except Exception as error:
            (final,) = self.world.any_rank([not isinstance(error, StorageError | Unreadable)])
            if final or not self.options.save_retries:
                raise
            prepared.abort()
            return error
        return None

    def _open(self, prepared: Transaction, step: int) -> None:
        if step != prepared.step:
            raise UsageError(f"rank 0 saves step {prepared.step}, and {self.world.name} saves step {step}")
        if self.world.commits:
            self._begin(prepared)
            if self._wanted != prepared.id:  # nobody waits for it any more
                prepared.abort()

    def _begin(self, prepared: Transaction) -> None:
        """See that the root is this run's, make way, and open a transaction: at once, or at a further attempt."""
        self.hold()
        if self.options.on_existing == "refuse":
            refuse_others(self.root)
        if self.mirror is not None:
            self.mirror.begins(prepared.step, prepared.id)
        self._make_way(prepared)
        try:
            found = prepared.open(steps.is_replaceable)
        except StorageError as error:
            if is_full(error):
                self._make_room(prepared.step)
            raise
        for line in found:
            self.reporter.say("clean", prepared.step, line)

    def _in_time(self, ask: Callable[[], None]) -> None:
        """Ask the file system before a save; where it hangs, this rank would be missed by the others, and lost to them.

        Raises:
            StorageError: It does not answer.
        """
        if self.world.meeting is None and self.options.save_timeout is None:
            ask()
            return
        limit = min(self.world.timeout / 2, self.options.save_timeout or math.inf)
        self._asking.start(ask)
        if not self._asking.ended_within(limit):
            text = f"{self.root}: the file system has not answered {self.world.name} within {limit:g} s\n"
            self._asking.leave(
                StorageError(f"{text}The step is not saved; older ones are untouched. The next save starts afresh.")
            )
            self._wanted = ""
        if (error := self._asking.join()) is not None:
            raise error

    def _make_way(self, prepared: Transaction) -> None:
        """What lies where the step goes, and is none of ours, would end the run: it is renamed, and nothing is lost."""
        aside = move_aside(prepared.target, prepared.id)
        if aside is not None:
            text = f"{prepared.target.name} has no manifest that this release can read; it was kept as {aside.name}"
            self.reporter.say("skip", prepared.step, text)

    def _see(self, opened: Transaction) -> None:
        """Wait until a slow file system shows the folder; from then on, a folder that is not there is one that was removed."""
        if self.world.has_who_commits and not self.world.commits:
            opened.join()

    def _copy(self, snapshot: Snapshot) -> None:
        """Copy it now, or begin to: as the options say, and as much memory as there is."""
        snapshot.still = self._fence.of(self.parts.roles) if self.options.lazy_snapshot else {}
        stream = staged(snapshot, self._staging)
        if not (snapshot.still or stream.wraps):
            stream.run()
            stream.finish()

    def _run(self, job: SaveJob) -> None:
        started = time.monotonic()
        job.run()
        self.clock.save_took(time.monotonic() - started)

    def _note(self, step: int) -> None:
        """A step is this run's, whatever becomes of what follows its commit."""
        self.own.add(step)
        self._last = step
        remember(steps.step_folder(self.root, step))

    def _after(self, step: int, progress: SaveProgress) -> None:
        """What the coordinator does behind training once a step is committed."""
        folder = steps.step_folder(self.root, step)
        if self.mirror is not None:
            self.mirror.saved()
            self.mirror.then = self._delete_old  # what stayed because it waited may go
        for number in leave_behind(self.root, step, self.own, self.went_back_to):
            self.reporter.say(
                "skip", number, f"left behind, and put in quarantine: this run saved step {step} after it"
            )
        for export in self.options.exports:
            if export.wants(step):
                with progress.unhurried():
                    self._export(export, step, folder)
        self._delete_old()
        with progress.unhurried():
            self._trim_journal(step, folder)

    def _trim_journal(self, step: int, folder: Path) -> None:
        """Where the run keeps a rollout journal, files of it go of which no step can ask for anything any more."""
        if self._journal is None:
            if not has_journal(self.root) or isinstance(consumed_by(folder), str):
                return  # another loader's: whoever trims says what it did
            self._journal = RolloutJournal(self.root)
        if gone := self._journal.trim():
            self.reporter.say(
                "clean", step, f"{gone} files of the rollout journal: all in them was trained on", files=gone
            )

    def _make_room(self, step: int) -> None:
        """Delete what the rules would let go if a step that found no room were there.

        The newest that is there stays in any case, and so do the best: this one may never come to be better than they are.
        """
        with suppress(CheckpointError):  # the disk has failed once already
            self._delete_old(Step(step, steps.step_folder(self.root, step), "committed"))
            if (newest := steps.newest(self.root)) is not None:
                self._trim_journal(step, newest.local)

    def _earlier(self) -> Earlier | None:
        """The newest step, where what is in it already is to be linked; not one that cannot be read: then all is written."""
        if not self.options.link_unchanged:
            return None
        with suppress(CheckpointError):
            if (found := steps.newest(self.root)) is not None:
                assert isinstance(found.path, Path)
                return Earlier(found.path, steps.read_manifest(found.path).files)
        return Earlier(self.root)

    def _delete_old(self, coming: Step | None = None) -> None:
        """What no rule keeps, and what is in the mirror or waits for it too long.

        Args:
            coming: A step that is to be counted as if it were there.
        """
        for line in remove_rest(self.root):
            self.reporter.say("clean", None, line)
        if (keep := self.options.keep) is None:
            return
        waiting = [] if self.mirror is None else [found.step for found in self.mirror.waiting()]
        staying = waiting[-self.mirror.most_waiting :] if self.mirror is not None else []
        protected = {self._last, *staying} if self.went_back_to is None else {self._last, self.went_back_to, *staying}
        for gone in retention.apply(self.root, retention.plan_deletions(self.root, keep, protected, coming=coming)):
            if gone.step in waiting:
                text = f"deleted before it was mirrored, as {len(staying)} newer steps wait: {gone.reason}"
                self.reporter.say("drop", gone.step, text, bytes=gone.nbytes)
            else:
                self.reporter.say("delete", gone.step, gone.reason, bytes=gone.nbytes)

    def _export(self, export: Export, step: int, folder: Path) -> None:
        """A by-product that cannot be made neither stops training nor keeps old steps from being deleted."""
        try:
            self.reporter.say("export", step, str(export.run(folder)))
        except CheckpointError as error:
            self.reporter.say("failed", step, f"the step is safe, but its export to {export.format} failed: {error}")


def _told(error: BaseException | None) -> tuple[bool, type[CheckpointError], str] | None:
    """What other ranks hear: whether it is only that another one failed, the class and the text."""
    return None if error is None else (isinstance(error, Stopped), *raisable(error))
