"""Saving one step after another: the part that training waits for, and the one that goes on behind it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from mcore_rlhf.errors import CheckpointError, Incomplete, StorageError, UsageError
from mcore_rlhf.families.megatron.folders import TRACKER
from mcore_rlhf.storage.manifest import Manifest, provenance
from mcore_rlhf.storage.publish import replace_text
from mcore_rlhf.storage.waiting import waiting_for

from ..rlhf.carried import Carried
from . import retention, steps
from .background import Background
from .commit import RankPart, Stopped, Transaction, new_transaction, refuse_untaken, why_it_vanished
from .mirror import Mirroring
from .options import LOG, Export, ManagerOptions, Reporter
from .policies import SaveClock
from .retention import Retention, leave_behind, move_aside, refuse_others, remember
from .rng import WORLDS, RngState, file_content
from .snapshot import DATA_FILE, Components, HostStaging, Snapshot, accounted, aside, described, dumps, loads
from .steps import RNG_FILE
from .world import World, raisable
from .write import RankWriter

_FIRST_POLL_S, _LONGEST_POLL_S = 0.002, 0.25
_NOTICE_S = 1.0
"""How long a rank may take to notice that another one has failed, where all that it does is wait."""


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
    _last: int = -1
    _staging: HostStaging = field(default_factory=HostStaging)
    _background: Background = field(init=False)
    _asking: Background = field(init=False)

    def __post_init__(self) -> None:
        self._asking = Background(f"an answer from {self.root}")
        self._background = Background(f"the save into {self.root}")

    def save(self, step: int, metrics: Mapping[str, float] | None, blocking: bool, transaction: str | None) -> None:
        """See :meth:`~.manager.CheckpointManager.save`."""
        self.world.barrier(f"save step {step}")
        self._finish_previous(step)
        started = time.monotonic()
        self.clock.save_started()
        opened = self._prepared(step, transaction)
        copied_at = time.monotonic()
        try:
            self.world.on_all_ranks(f"saving step {step}", partial(self._in_time, partial(self._open, opened, step)))
            snapshot = self.world.on_all_ranks(f"saving step {step}", partial(self._snapshot, opened, blocking))
            accounted(snapshot, self.world)
        except BaseException as error:
            opened.abort(_word_of(self.world, error))
            raise
        now = time.monotonic()
        stall, copying = now - started, now - copied_at
        self.reporter.say("save", step, stall_s=stall, copy_s=copying, bytes=snapshot.nbytes, world=self.world.size)
        report = {"metrics": dict(metrics or {}), "stall_seconds": stall, "step_seconds": self.clock.step_seconds}
        job = SaveJob(
            opened,
            self.world,
            self.parts,
            snapshot,
            self.reporter,
            report=report,
            provenance=self.options.provenance,
            then=partial(self._after, step),
        )
        self._background.start(partial(self._run, job))
        if blocking:
            self.wait()

    def wait(self) -> None:
        """Wait for the last save; its error is raised on all ranks: the cause, rather than that somebody else failed."""
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
        if self.world.group is None:
            return self._background.join(), None
        try:
            self.world.barrier("the end of the save", patience=3)
            with waiting_for(self._background.name):
                self._poll()
        except Incomplete as lost:
            self._background.ended_within(
                3 * self.world.timeout
            )  # it may still wait for the one that is lost, and name it
            return self._outcome(), lost
        return self._outcome(), None

    def _outcome(self) -> BaseException | None:
        if self._background.ended_within(0):
            return self._background.join()
        self._background.given_up = True
        return StorageError(
            f"{self.world.name}: its part of the save into {self.root} has not ended: the file system may hang\n"
            "That step is not committed; older ones are untouched. It is saved again when that part has ended."
        )

    def _poll(self) -> None:
        """Ask each other how far it is; the answers of all decide, so that all stop at once."""
        pause, failed_at = _FIRST_POLL_S, math.inf
        while True:
            ended, now = self._background.ended_within(pause), time.monotonic()
            error = self._background.error if ended else None
            waited = self._background.given_up or isinstance(error, Incomplete)  # a time-out has passed already
            flags = [
                not ended,
                error is not None,
                waited,
                now - failed_at > self.world.timeout,
                now - failed_at > _NOTICE_S,
            ]
            running, failed, waited, late, noticed = self.world.any_rank(flags)
            if not running or late or (waited and noticed):
                return
            if (failed or waited) and failed_at == math.inf:
                failed_at = now
            pause = min(2 * pause, _LONGEST_POLL_S)

    def end_alone(self) -> None:
        """Wait for this rank's part of the last save, without the other ranks: they may not come."""
        error = self._background.join()
        if error is not None:
            self.reporter.say("failed", None, f"while another error was on its way: {error}")

    def reserve(self) -> None:
        """Make the host memory that an asynchronous save needs."""
        self._staging.reserve(described(self.parts, self.world, 0).files)

    def close(self) -> None:
        """Give the memory back; what is not in the mirror is the next start's."""
        self._background.close()
        self._asking.close()
        if self.mirror is not None:
            self.mirror.close()
        self._staging.free()

    def _finish_previous(self, step: int) -> None:
        """Wait for the save before, or refuse; on all ranks alike."""
        if self.options.on_busy == "refuse":
            (busy,) = self.world.any_rank([self._background.busy])
            if busy:
                raise StorageError(
                    f"step {step} is not saved: the one before is still being written\n"
                    "Save less often (mcore-rlhf interval computes how often), or let it wait (on_busy='wait')."
                )
        self.wait()

    def _prepared(self, step: int, transaction: str | None) -> Transaction:
        """The step's transaction: every rank's is that of rank 0."""
        if self.world.is_one_of_several and transaction is None:
            raise UsageError("several worlds save together: give all of them the same transaction id")
        number, identity = self.world.broadcast((step, transaction or new_transaction()))
        return Transaction(self.root, number, identity, self.world.rank_name, self.options.timeout, self.options.fsync)

    def _open(self, prepared: Transaction, step: int) -> None:
        """Open it, on the rank that commits."""
        if step != prepared.step:
            raise UsageError(f"rank 0 saves step {prepared.step}, and {self.world.name} saves step {step}")
        if self.world.commits:
            self.hold()
            if self.options.on_existing == "refuse":
                refuse_others(self.root)
            if self.mirror is not None:
                self.mirror.begins(step, prepared.id)
            self._make_way(prepared)
            for line in prepared.open(steps.is_replaceable):
                self.reporter.say("clean", step, line)
            if self._asking.given_up:  # nobody waits for it any more
                prepared.abort()

    def _in_time(self, ask: Callable[[], None]) -> None:
        """Ask the file system before a save; where it hangs, this rank would be missed by the others, and lost to them.

        Raises:
            StorageError: It does not answer.
        """
        if self.world.group is None:
            return ask()
        limit = self.world.timeout / 2
        if self._asking.ended_within(0):
            self._asking.join()
            self._asking.start(ask)
            if self._asking.ended_within(limit):
                if (error := self._asking.join()) is not None:
                    raise error
                return None
        self._asking.given_up = True
        raise StorageError(
            f"{self.root}: the file system has not answered {self.world.name} within {limit:g} s\n"
            "The step is not saved; older ones are untouched. It is tried again at the next save."
        )

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

    def _snapshot(self, opened: Transaction, blocking: bool) -> Snapshot:
        """A blocking save needs no copy: nothing runs while it is written."""
        self._in_time(partial(self._see, opened))
        snapshot = described(self.parts, self.world, opened.step)
        return snapshot if blocking else aside(snapshot, self._staging)

    def _run(self, job: SaveJob) -> None:
        started = time.monotonic()
        job.run()
        self.clock.save_took(time.monotonic() - started)

    def _after(self, step: int) -> None:
        """What the coordinator does behind training once a step is committed."""
        folder = steps.step_folder(self.root, step)
        self.own.add(step)
        self._last = step
        remember(folder)
        if self.mirror is not None:
            self.mirror.saved()
            self.mirror.then = self._after_mirroring
        for number in leave_behind(self.root, step, self.own, self.went_back_to):
            self.reporter.say(
                "skip", number, f"left behind, and put in quarantine: this run saved step {step} after it"
            )
        for export in self.options.exports:
            if export.wants(step):
                self._export(export, step, folder)
        if self.options.keep is not None:
            self._delete_old(self.options.keep)

    def _delete_old(self, keep: Retention) -> None:
        """What no rule keeps, and what is in the mirror or waits for it too long."""
        waiting = [] if self.mirror is None else [found.step for found in self.mirror.waiting()]
        staying = waiting[-self.mirror.most_waiting :] if self.mirror is not None else []
        protected = {self._last, *staying} if self.went_back_to is None else {self._last, self.went_back_to, *staying}
        for gone in retention.apply(self.root, retention.plan_deletions(self.root, keep, protected)):
            if gone.step in waiting:
                text = f"deleted before it was mirrored, as {len(staying)} newer steps wait: {gone.reason}"
                self.reporter.say("drop", gone.step, text, bytes=gone.nbytes)
            else:
                self.reporter.say("delete", gone.step, gone.reason, bytes=gone.nbytes)

    def _after_mirroring(self) -> None:
        """What stayed because it waited may go now."""
        if self.options.keep is not None:
            self._delete_old(self.options.keep)

    def _export(self, export: Export, step: int, folder: Path) -> None:
        """A by-product that cannot be made neither stops training nor keeps old steps from being deleted."""
        try:
            self.reporter.say("export", step, str(export.run(folder)))
        except CheckpointError as error:
            self.reporter.say("failed", step, f"the step is safe, but its export to {export.format} failed: {error}")


@dataclass(slots=True)
class SaveJob:
    """One save on one rank.

    Args:
        transaction: The step's; the coordinator has opened it.
        world: The ranks.
        parts: What the run consists of.
        snapshot: This rank's share.
        reporter: Hears of the outcome.
        report: For the manifest: metrics, stall.
        provenance: For the manifest, besides versions: git revision, hash of the configuration.
        then: What the coordinator does once the step is committed: delete old steps, export.
    """

    transaction: Transaction
    world: World
    parts: Components
    snapshot: Snapshot
    reporter: Reporter
    report: Mapping[str, object] = field(default_factory=dict)
    provenance: Mapping[str, object] = field(default_factory=dict)
    then: Callable[[], None] = lambda: None
    _started: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Write, deliver, and see the step committed.

        Raises:
            CheckpointError: It was not committed; older steps are untouched.
        """
        try:
            self._run()
        except BaseException as failure:
            error = self._cause(failure)
            if not isinstance(error, Stopped):
                self.transaction.messages.fail(f"rank {self.world.rank_name}", error)
            self.transaction.abort(_word_of(self.world, error))
            self.reporter.say("failed", self.transaction.step, str(error).partition("\n")[0])
            if error is failure:
                raise
            raise error from failure

    def _cause(self, failure: BaseException) -> BaseException:
        """What other ranks are to hear: a file that vanished because another rank has given up is not the cause."""
        stopped = why_it_vanished(self.transaction.messages, failure)
        if stopped is not None:
            return stopped
        return StorageError(f"{self.transaction.folder}: {failure}") if isinstance(failure, OSError) else failure

    def _run(self) -> None:
        if not self.world.has_who_commits:
            self.transaction.join()
        writer = RankWriter(self.transaction.folder, self.world.rank, self.transaction.messages, self.transaction.fsync)
        self._post_values()
        writer.write(self.snapshot.files)
        for name, text in self.snapshot.texts.items():
            writer.save_text(name, text)
        if self.world.commits:
            self._commit(writer)
        else:
            self.transaction.deliver(self._part(writer))
            self.transaction.await_commit()

    def _post_values(self) -> None:
        self.transaction.messages.notes.put(f"values-{self.world.rank_name}.pt", dumps(self._own_values()))

    def _own_values(self) -> dict[str, object]:
        """Small things of every rank that end up in one file."""
        values = self.snapshot
        layout = self.world.layout(self.parts.layout)
        return {"rng": values.rng, "layout": layout, "data": values.data, "data_rank": values.data_rank}

    def _commit(self, writer: RankWriter) -> None:
        others = [name for name in self.world.rank_names if name != self.world.rank_name]
        parts = list(self.transaction.parts(others).values())
        self._write_gathered(writer)
        parts.append(self._part(writer))
        refuse_untaken(parts)
        files = {path: entry for part in parts for path, entry in part.files.items()}
        roles = sorted((dict(role) for part in parts for role in part.roles), key=lambda role: role["role"])
        missing = set(self.parts.roles) - {role["role"] for role in roles}
        if missing:
            raise Incomplete(f"{self.transaction.target}: no rank delivered the roles {', '.join(sorted(missing))}")
        seconds = time.monotonic() - self._started
        live = {role: figures for part in parts for role, figures in part.live.items()}
        hosts: dict[str, list[str]] = {}
        for part in parts:
            hosts.setdefault(part.host, []).extend(sorted(part.files))
        report = {**self.report, "save_seconds": seconds, "live": live, **({"hosts": hosts} if len(hosts) > 1 else {})}
        more = {str(key): value for key, value in self.provenance.items()}
        manifest = Manifest(
            files,
            step=self.transaction.step,
            parts=tuple(roles),
            lossless=True,
            provenance=provenance(**more),
            report=report,
        )
        self.transaction.commit(manifest)
        self._after(sum(entry.nbytes for entry in files.values()))

    def _part(self, writer: RankWriter) -> RankPart:
        roles, live = tuple(self.snapshot.roles), self.snapshot.live
        return RankPart(writer.written, roles, live, writer.contributed, writer.taken_from_others, self.world.host)

    def _write_gathered(self, writer: RankWriter) -> None:
        values = [self._values(name) for name in self.world.rank_names]
        states: list[RngState] = [value["rng"] for value in values]  # type: ignore[misc]
        layout = WORLDS.join(dict.fromkeys(str(value["layout"]) for value in values))
        writer.save_pt(RNG_FILE, file_content(states, layout))
        data = self.parts.data
        if isinstance(data, Carried) and data.scope == "rank":
            by_rank = {value["data_rank"]: value["data"] for value in values if value["data_rank"] is not None}
            writer.save_pt(DATA_FILE, data.combine([by_rank[rank] for rank in sorted(by_rank)]))  # type: ignore[type-var, misc]
        elif data is not None:
            writer.save_pt(DATA_FILE, self.snapshot.data)

    def _values(self, name: str) -> dict[str, object]:
        if name == self.world.rank_name:
            return self._own_values()
        values = loads(self.transaction.messages.get(f"values-{name}.pt", f"rank {name}"))
        assert isinstance(values, dict)
        return values

    def _after(self, nbytes: int) -> None:
        """The step is safe. Nothing that fails from here on is a failed save."""
        seconds = time.monotonic() - self._started
        speed = nbytes / max(seconds, 1e-9) / 1e9
        self.reporter.say("commit", self.transaction.step, seconds=seconds, bytes=nbytes, gb_per_s=speed)
        try:
            replace_text(self.transaction.root / TRACKER, str(self.transaction.step))
            self.then()
        except Exception as error:
            unforeseen = None if isinstance(error, CheckpointError) else error  # with its traceback
            rank, step = self.world.rank, self.transaction.step
            LOG.warning("rank=%d step=%d: after the commit: %s", rank, step, error, exc_info=unforeseen)


def _word_of(world: World, error: BaseException) -> str:
    """What other worlds are to read of a save that was given up. Any rank of the world that commits says it: one disk may not take it."""
    return str(error) if world.is_one_of_several and world.has_who_commits else ""


def _told(error: BaseException | None) -> tuple[bool, type[CheckpointError], str] | None:
    """What other ranks hear: whether it is only that another one failed, the class and the text."""
    return None if error is None else (isinstance(error, Stopped), *raisable(error))
