"""Writing one step behind the training loop: this rank's share, then the commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mcore_rlhf.errors import CheckpointError, Incomplete, StorageError
from mcore_rlhf.storage.manifest import Manifest, provenance

from ..rlhf.carried import Carried
from .atomic import write_text
from .components import Components
from .crew import Crew
from .events import LOG, Reporter
from .mailbox import Stopped, why_it_vanished
from .rng import FILE as RNG_FILE
from .rng import WORLDS, RngState, file_tree
from .snapshot import DATA_FILE, Snapshot, dumps, loads
from .transaction import Part, Transaction, refuse_untaken
from .writer import RankWriter

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(slots=True)
class SaveJob:
    """One save on one rank.

    Args:
        transaction: The step's; the coordinator has opened it.
        crew: All ranks that take part.
        parts: What the run consists of.
        snapshot: This rank's share.
        reporter: Hears of the outcome.
        report: For the manifest: metrics, stall.
        provenance: For the manifest, besides versions: git revision, hash of the configuration.
        then: What the coordinator does once the step is committed: delete old steps, export.
    """

    transaction: Transaction
    crew: Crew
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
            error = self._told(failure)
            if not isinstance(error, Stopped):
                self.transaction.mailbox.fail(f"rank {self.crew.me}", error)
            self.transaction.abort(str(error) if self.crew.is_split else "")
            self.reporter.say("failed", self.transaction.step, str(error).partition("\n")[0])
            if error is failure:
                raise
            raise error from failure

    def _told(self, failure: BaseException) -> BaseException:
        """What is to be told: a file that vanished because another rank has given up is not the cause."""
        stopped = why_it_vanished(self.transaction.mailbox, failure)
        if stopped is not None:
            return stopped
        return StorageError(f"{self.transaction.folder}: {failure}") if isinstance(failure, OSError) else failure

    def _run(self) -> None:
        if self.crew.is_split and not self.crew.coordinates:
            self.transaction.join()
        writer = RankWriter(
            self.transaction.folder, self.crew.world.rank, self.transaction.mailbox, self.transaction.fsync
        )
        self._post_values()
        writer.write(self.snapshot.files)
        for name, text in self.snapshot.texts.items():
            writer.save_text(name, text)
        if self.crew.coordinates:
            self._commit(writer)
        else:
            self.transaction.deliver(self._part(writer))
            self.transaction.await_commit()

    def _post_values(self) -> None:
        self.transaction.mailbox.post(f"values-{self.crew.me}.pt", dumps(self._own_values()))

    def _own_values(self) -> dict[str, object]:
        """Small things of every rank that end up in one file."""
        values = self.snapshot
        layout = self.crew.layout(self.parts.layout)
        return {"rng": values.rng, "layout": layout, "data": values.data, "data_rank": values.data_rank}

    def _commit(self, writer: RankWriter) -> None:
        others = [name for name in self.crew.names if name != self.crew.me]
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
        report = {**self.report, "save_seconds": seconds, "live": live}
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

    def _part(self, writer: RankWriter) -> Part:
        return Part(
            writer.written, tuple(self.snapshot.roles), self.snapshot.live, writer.contributed, writer.taken_from_others
        )

    def _write_gathered(self, writer: RankWriter) -> None:
        values = [self._values(name) for name in self.crew.names]
        states: list[RngState] = [value["rng"] for value in values]  # type: ignore[misc]
        layout = WORLDS.join(dict.fromkeys(str(value["layout"]) for value in values))
        writer.save_tree(RNG_FILE, file_tree(states, layout))
        data = self.parts.data
        if isinstance(data, Carried) and data.scope == "rank":
            by_rank = {value["data_rank"]: value["data"] for value in values if value["data_rank"] is not None}
            writer.save_tree(DATA_FILE, data.combine([by_rank[rank] for rank in sorted(by_rank)]))  # type: ignore[type-var, misc]
        elif data is not None:
            writer.save_tree(DATA_FILE, self.snapshot.data)

    def _values(self, name: str) -> dict[str, object]:
        if name == self.crew.me:
            return self._own_values()
        values = loads(self.transaction.mailbox.take(f"values-{name}.pt", f"rank {name}"))
        assert isinstance(values, dict)
        return values

    def _after(self, nbytes: int) -> None:
        """The step is safe. Nothing that fails from here on is a failed save."""
        seconds = time.monotonic() - self._started
        speed = nbytes / max(seconds, 1e-9) / 1e9
        self.reporter.say("commit", self.transaction.step, seconds=seconds, bytes=nbytes, gb_per_s=speed)
        try:
            write_text(self.transaction.root / TRACKER, str(self.transaction.step))
            self.then()
        except Exception as error:
            unforeseen = None if isinstance(error, CheckpointError) else error  # with its traceback
            rank, step = self.crew.world.rank, self.transaction.step
            LOG.warning("rank=%d step=%d: after the commit: %s", rank, step, error, exc_info=unforeseen)
