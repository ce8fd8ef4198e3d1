"""One save on one rank, behind training: it writes, delivers and commits, and begins again where that fails and may be tried again."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from mcore_rlhf.errors import CheckpointError, Incomplete, StorageError, headline, in_a_line
from mcore_rlhf.families.megatron.folders import TRACKER
from mcore_rlhf.storage import threads
from mcore_rlhf.storage.manifest import Manifest, provenance
from mcore_rlhf.storage.paths import storage_error
from mcore_rlhf.storage.publish import replace_text

from ..rlhf.carried import Carried
from ..rlhf.journal_files import FOLDER as JOURNAL
from ..rlhf.journal_files import run_of
from .background import Left
from .commit import RankPart, Stopped, Transaction, refuse_untaken, why_it_vanished
from .failed import FailedSave
from .options import LOG, Reporter
from .progress import SaveProgress
from .rng import WORLDS, RngState, file_content
from .snapshot import DATA_FILE, Components, Snapshot, dumps, loads
from .steps import RNG_FILE
from .world import World
from .write import Earlier, RankWriter

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_AWAKE_S = 0.05
"""How often a save that waits for its next attempt says that it is alive."""
_HERE = "here-"
"""What a rank's note is called that has come to a further attempt; the rank's name follows."""
_FULL = {errno.ENOSPC, errno.EDQUOT}


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
        ours: Notes on the coordinator that the step is this run's, as soon as it is committed.
        then: What the coordinator does after that: delete old steps, export.
        retries: How often a save that failed is tried again; the same on all ranks.
        begin: What the coordinator opens the transaction of a further attempt with.
        make_room: What the coordinator does about a full disk.
        earlier: Finds the step whose files are linked where they would be the same; None where none is to be.
        done_with: Hears that nothing of what was copied is read any more; also where the save failed, or was left to itself before.
        failed: Why the first attempt failed before this one could begin; None where it was opened.
        progress: How far it is.
        delivered: Whether this rank has said all that the commit waits for, so that it may be made without a further word of its.
        committed: Whether this rank has made it.
    """

    transaction: Transaction
    world: World
    parts: Components
    snapshot: Snapshot
    reporter: Reporter
    report: Mapping[str, object] = field(default_factory=dict)
    provenance: Mapping[str, object] = field(default_factory=dict)
    ours: Callable[[], None] = lambda: None
    then: Callable[[SaveProgress], None] = lambda progress: None
    retries: int = 0
    begin: Callable[[Transaction], None] = lambda transaction: None
    make_room: Callable[[], None] = lambda: None
    earlier: Callable[[], Earlier | None] = lambda: None
    done_with: Callable[[], None] = lambda: None
    failed: BaseException | None = None
    progress: SaveProgress = field(default_factory=SaveProgress)
    delivered: bool = False
    committed: bool = False
    _started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.transaction.alive = self.progress.moved

    def run(self) -> None:
        """Write, deliver, and see the step committed.

        Raises:
            CheckpointError: It was not committed; older steps are untouched.
        """
        try:
            self._attempts()
        finally:
            self._let_go()
            self.done_with()

    def unstarted(self, error: StorageError) -> None:
        """There is no thread for it: the others hear of that, and the copy is not waited for."""
        self._lost(self._ended_by(error, 0))
        self._let_go()
        self.done_with()

    def _let_go(self) -> None:
        """Training need not wait for a copy that nobody will write."""
        if self.snapshot.stream is not None:
            self.snapshot.stream.cancel()

    def _attempts(self) -> None:
        first, error, attempt = self.transaction, self.failed, 0
        while True:
            if error is not None:
                if attempt == self.retries or self.progress.given_up or not isinstance(error, Exception):
                    self._lost(error)
                    raise error
                attempt += 1
                self._pause(error, attempt)
                if self.progress.given_up:
                    raise error
            try:
                if self._begun(first, attempt):
                    self._run()
                return
            except BaseException as failure:
                error = self._ended_by(failure, attempt)

    def _pause(self, error: BaseException, attempt: int) -> None:
        """Before a further attempt: twice as long as before the last one."""
        pause = min(_FIRST_PAUSE_S * 2 ** (attempt - 1), _LONGEST_PAUSE_S)
        text = f"{in_a_line(error)}; tried again in {pause:g} s ({attempt} of {self.retries})"
        self.reporter.say("retry", self.transaction.step, text, attempt=attempt)
        end = time.monotonic() + pause
        while (left := end - time.monotonic()) > 0 and not self.progress.given_up:
            self.progress.moved()
            time.sleep(min(left, _AWAKE_S))

    def _begun(self, first: Transaction, attempt: int) -> bool:
        """Open the transaction of an attempt, or see it opened; False where the one before was committed after all."""
        if attempt == 0:
            return True
        before, self.transaction = self.transaction, first.again(attempt)
        name = self.world.rank_name
        if self.world.commits:
            self.begin(self.transaction)
            for other in self.world.rank_names:  # who has not seen the folder would not see that it is gone again
                if other != name:
                    self.transaction.messages.get(f"{_HERE}{other}", f"rank {other}")
        elif before.is_published():
            return False
        else:
            self.transaction.join(patience=2)  # the rank that commits may yet have to notice that the last one failed
            self.transaction.messages.notes.put(f"{_HERE}{name}", b"")
        return True

    def _ended_by(self, failure: BaseException, attempt: int) -> BaseException:
        """Tell the others that an attempt has failed, and clean up; what it failed of."""
        error = self._cause(failure)
        if error is not failure:
            error.__cause__ = failure
        if not isinstance(error, Stopped):
            self.transaction.messages.fail(f"rank {self.world.rank_name}", error)
        said = attempt > 0 and self.world.commits  # the others may still wait for this attempt to begin
        self.transaction.abort(str(error) if said else word_of(self.world, error))
        if self.world.commits and is_full(error) and not self.progress.given_up:
            self.make_room()
        return error

    def _lost(self, error: BaseException) -> None:
        """The step will not be there; where that was said when the save stood still, it is not said again."""
        if not self.progress.given_up:
            self.reporter.say("failed", self.transaction.step, in_a_line(error))
            if self.world.commits:
                FailedSave.note(self.transaction.root, self.transaction.step, error)

    def give_up(self) -> Left:
        """Leave it to itself, as it stands still; called from another thread."""
        self.progress.given_up = True
        self._let_go()
        what = "what follows the commit" if self.committed else "the save"
        still, step, root = f"{self.progress.still_s:.3g} s", self.transaction.step, self.transaction.root
        text = f"{root}: {what} of step {step} has made no progress for {still} on {self.world.name}: {self.progress}\n"
        text += "The file system may hang. "
        if self.committed:
            LOG.warning(
                "%sThe step is committed; old steps may lie there for longer, and by-products be missing.", text
            )
            return Left(None)
        unknown = "Whether the step is committed is not known here: mcore-rlhf steps says it. "
        outcome = unknown if self.delivered else "The step is not committed; older ones are untouched. "
        error = StorageError(f"{text}{outcome}The next save starts afresh.")
        self.reporter.say("failed", self.transaction.step, headline(str(error)))
        with suppress(StorageError):  # what hangs may be the very folder that these go into
            threads.begin("mcore_rlhf word", self._tell_of, error)
        return Left(error)

    def _tell_of(self, error: CheckpointError) -> None:
        self.transaction.messages.fail(f"rank {self.world.rank_name}", error)
        FailedSave.note(self.transaction.root, self.transaction.step, error)

    def _cause(self, failure: BaseException) -> BaseException:
        """What other ranks are to hear: a file that vanished because another rank has given up is not the cause."""
        stopped = why_it_vanished(self.transaction.messages, failure)
        if stopped is not None:
            return stopped
        return StorageError(f"{self.transaction.folder}: {failure}") if isinstance(failure, OSError) else failure

    def _run(self) -> None:
        if not self.world.has_who_commits:
            self.transaction.join()
        folder, messages = self.transaction.folder, self.transaction.messages
        fsync = self.transaction.fsync
        writer = RankWriter(folder, self.world.rank, messages, fsync, self.progress, self.earlier())
        self.progress.moved("what ranks say to each other")
        self._post_values()
        writer.write(self.snapshot.files)
        if self.snapshot.stream is not None:
            self.snapshot.stream.finish()
            self.done_with()  # another world may need the memory, and this one waits for its part
        for name, text in self.snapshot.texts.items():
            writer.save_text(name, text)
        if self.world.commits:
            self._commit(writer)
        else:
            self.progress.moved("the commit")  # one that was given up may have written what is there no more
            self.delivered = True
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
        if linked := {path: source for part in parts for path, source in part.linked.items()}:
            report["linked"] = linked
        if journal := run_of(self.transaction.root):
            report[JOURNAL] = journal
        more = {str(key): value for key, value in self.provenance.items()}
        manifest = Manifest(
            files,
            step=self.transaction.step,
            parts=tuple(roles),
            lossless=True,
            provenance=provenance(**more),
            report=report,
        )
        self.progress.moved("the commit")
        self.delivered = True
        self.transaction.commit(manifest)
        if self.progress.given_up:  # it hung in the rename itself: the step is whole, and newer ones may be there
            return
        self.committed = True
        self._after(sum(entry.nbytes for entry in files.values()))

    def _part(self, writer: RankWriter) -> RankPart:
        roles, live = tuple(self.snapshot.roles), self.snapshot.live
        contributed, taken = writer.contributed, writer.taken_from_others
        return RankPart(writer.written, roles, live, contributed, taken, self.world.host, writer.linked)

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
        """The step is safe. Nothing that fails from here on is a failed save, nor keeps from what follows it: a full disk is freed."""
        seconds = time.monotonic() - self._started
        speed = nbytes / max(seconds, 1e-9) / 1e9
        self.reporter.say("commit", self.transaction.step, seconds=seconds, bytes=nbytes, gb_per_s=speed)
        root, tracked = self.transaction.root, str(self.transaction.step)
        track, forget = partial(replace_text, root / TRACKER, tracked), partial(FailedSave.forget, root)
        for follow in (self.ours, track, forget, self._then):
            try:
                follow()
            except Exception as error:
                told = storage_error(error, root, "finish") if isinstance(error, OSError) else error
                unforeseen = None if isinstance(told, CheckpointError) else error  # with its traceback
                rank, step = self.world.rank, self.transaction.step
                LOG.warning("rank=%d step=%d: after the commit: %s", rank, step, told, exc_info=unforeseen)

    def _then(self) -> None:
        if not self.progress.given_up:  # a later save does it
            self.then(self.progress)


def word_of(world: World, error: BaseException) -> str:
    """What other worlds are to read of a save that was given up. Any rank of the world that commits says it: one disk may not take it."""
    return str(error) if world.is_one_of_several and world.has_who_commits else ""


def is_full(error: BaseException) -> bool:
    """Whether a disk is full, on this rank or on one that said so."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return True
        cause = cause.__cause__
    return any(os.strerror(number) in str(error) for number in _FULL)
