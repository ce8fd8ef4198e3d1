"""The durable tier: committed steps of a root are sent to an object store behind training, and published there once more.

A thread of the rank that commits does it, with one of every other host (:mod:`.mirror_hosts`): each sends what its host's ranks wrote.
What training waits for is the root alone; a store that is slow, full or away costs a line in the log and a longer list of steps that
wait.

* A step keeps its transaction in the mirror: its files lie below ``.tx-<transaction>``, a name that no other content ever has. So a
  process that goes on after a kill sends what is not there yet; and a file is there only if it had the manifest's CRC-32 when it was read.
* What the mirror holds is asked of the mirror; ``mirror.json`` in the root says it to people, and what must not be forgotten while the
  mirror is away: that steps in it which are newer than what this run saves now are left behind.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, StorageError, UsageError, log_of
from mcore_rlhf.storage.manifest import Manifest
from mcore_rlhf.storage.paths import human
from mcore_rlhf.storage.publish import replace_text
from mcore_rlhf.storage.records import text_of
from mcore_rlhf.storage.threads import begin

from . import retention, steps
from .mirror_hosts import Ended, Helpers, Job, missing, publication_of, send, shares
from .mirror_status import STATUS, Boundary, MirrorStatus, by_number, settled
from .steps import Step, is_hidden

if TYPE_CHECKING:
    from mcore_rlhf.storage.upload import StorePublication

    from .options import Mirror, Reporter

_log = log_of("mcore_rlhf.manager")

PATIENCE_S = 20.0
"""How long one request is tried again; then the thread looks up, and begins the step again where it was."""
STILL_S = 20.0
"""Where the store takes nothing for so long, that is said."""
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_ENDING_S = 5.0
_POLL_S = 0.1


class _Gone(Exception):
    """The step was deleted, or saved again, while it was sent."""


class Mirroring:
    """Sends the steps of a root to its mirror, on a thread of its own.

    Args:
        root: The folder of all steps.
        mirror: Where to, and how.
        reporter: Hears of what is done.
        go_on: Whether a mirror may hold steps that this run has neither loaded nor sent.
        host: This process's.
        helpers: Of every other host the rank that sends with it, and the host.

    Raises:
        UsageError: The mirror's URL names no store that can be written to.
    """

    def __init__(
        self, root: Path, mirror: Mirror, reporter: Reporter, go_on: bool, host: str, helpers: Mapping[int, str]
    ) -> None:
        self._root, self._options, self._reporter, self._go_on = root, mirror, reporter, go_on
        self._hosts, self._host = Helpers(root, host, helpers), host
        self._target = mirror.open(PATIENCE_S)
        found = MirrorStatus.read(root)
        same = found is not None and found.url == mirror.url
        self._status = replace(found, failed={}, problem="") if found and same else MirrorStatus(mirror.url)
        self._changing, self._wake, self._ended = threading.Lock(), threading.Event(), threading.Event()
        self.then: Callable[[], None] = lambda: None
        """What is done when a step is there."""
        self._there: dict[int, Step] | None = None
        self._error: Exception | None = None
        self._begun = False
        self._moved, self._stands = 0.0, False
        self._thread: threading.Thread | None = None

    @property
    def most_waiting(self) -> int:
        """How many steps that wait are kept in the root."""
        return self._options.most_waiting

    def start(self) -> None:
        """Begin, with what an earlier run has left; a second call does nothing, but where the system gave no thread for it."""
        if self._thread is None and not self._ended.is_set():
            try:
                self._thread = begin("mcore_rlhf mirror", self._run)
            except StorageError as error:
                self._failed(error)
            else:
                atexit.register(self.close)

    def begins(self, step: int, transaction: str) -> None:
        """A step is about to be saved: newer ones in the mirror will be left behind.

        Raises:
            StorageError: The mirror has failed since the last call, and ``on_error`` is ``raise``.
        """
        error, self._error = self._error, None
        if error is not None and self._options.on_error == "raise":
            raise StorageError(f"the mirror {self._options.url}: {error}") from error
        known = self._status.boundary
        if not self._begun and not (known is not None and known.committed):
            self._change(boundary=Boundary(step, transaction))

    def saved(self) -> None:
        """A step was committed in the root."""
        boundary = self._status.boundary
        if not self._begun and boundary is not None:
            self._change(boundary=replace(boundary, committed=True))
        self._begun = True
        self._wake.set()
        self.start()

    def waiting(self) -> list[Step]:
        """Steps of the root that are to be sent and are not there yet, oldest first."""
        return self._waiting(steps.listed(self._root))

    def wait(self, seconds: float | None) -> list[int]:
        """Wait until all is there.

        Args:
            seconds: How long at most; None for as long as it takes.

        Returns:
            Steps that still wait.
        """
        end = None if seconds is None else time.monotonic() + seconds
        self.start()
        while found := self.waiting():
            if self._thread is None or not self._thread.is_alive() or (end is not None and time.monotonic() >= end):
                break
            time.sleep(_POLL_S)
        return [step.step for step in found]

    def close(self) -> None:
        """Stop; what is on its way is given up after the piece that is being sent, and the next start goes on with it."""
        self._ended.set()
        self._wake.set()
        atexit.unregister(self.close)
        if self._thread is not None:
            self._thread.join(_ENDING_S)
        self._hosts.close()

    def _run(self) -> None:
        pause = _PAUSE_S
        while not self._ended.is_set():
            self._wake.clear()
            try:
                self._catch_up()
            except Ended:
                return
            except Exception as error:  # whatever it is, training goes on
                self._failed(error)
                self._ended.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                continue
            pause = _PAUSE_S
            self._wake.wait()

    def _catch_up(self) -> None:
        """Send what waits, the newest step first: it is what a resume wants."""
        if self._there is None:
            self._look()
        self._settle()
        newest = steps.newest(self._root)  # before it is asked what waits: what is saved meanwhile is not settled
        while waiting := self.waiting():
            self._look_up()
            self._send_step(waiting[-1])
            self._delete_old()
            self.then()
            self._settle()
            newest = steps.newest(self._root)
        self._hosts.settled("" if newest is None else newest.transaction)
        if self._status.problem:
            self._change(problem="")

    def _look(self) -> None:
        """Ask the mirror what it holds, and whether this run may write there."""
        self._target.store.forget()
        found = {step.step: step for step in steps.listed(self._target)}
        known = self._status.ours or self._go_on or retention.is_of_this_run(self._target)
        held = [number for number, step in found.items() if step.state == "committed"]
        if held and not known:
            raise UsageError(
                f"holds committed steps that this run has neither loaded nor sent ({', '.join(map(str, held[-5:]))}): nothing is sent. "
                "Resume from them (load('auto')), give this run a mirror of its own, or say on_existing='continue'"
            )
        self._there = found
        self._change(ours=True, mirrored=self._mirrored())

    def _settle(self) -> None:
        """Tell the mirror what the root knows: which steps are left behind, which are in quarantine."""
        here = {step.step: step for step in steps.listed(self._root) if not is_hidden(step.path)}
        status = settled(self._status, here)
        for step in list(self._seen().values()):
            local = here.get(step.step)
            if step.state != "committed" or step.quarantined:
                continue
            reason = ""
            if local is not None and local.quarantined and local.transaction == step.transaction:
                reason = local.quarantined
            elif status.leaves_behind(step, local):
                reason = f"left behind by a run that saved step {status.boundary and status.boundary.after} after it"
            if reason:
                steps.quarantine(step.path, reason)
                self._seen()[step.step] = replace(step, quarantined=reason)
                self._reporter.say("skip", step.step, f"put in quarantine in the mirror: {reason}")
        if status.boundary is not None:
            self._change(boundary=None)

    def _seen(self) -> dict[int, Step]:
        return self._there if self._there is not None else {}

    def _mirrored(self) -> dict[int, str]:
        return {number: step.transaction for number, step in self._seen().items() if step.state == "committed"}

    def _waiting(self, local: Sequence[Step]) -> list[Step]:
        status = self._status
        found = [step for step in local if not is_hidden(step.path) and status.of(step) == "waiting"]
        if self._options.keep is None:
            return found
        then = {**self._seen(), **{step.step: step for step in found}}
        going = {gone.step for gone in retention.planned(sorted(then.values(), key=by_number), self._options.keep)}
        return [step for step in found if step.step not in going]

    def _send_step(self, step: Step) -> None:
        """Send one step; one that is damaged in the root, or gone, is no reason to stop."""
        started = time.monotonic()
        try:
            nbytes = self._publish(step)
        except _Gone:
            return
        except (Corrupt, Incomplete) as error:
            why = str(error).partition("\n")[0]
            self._change(failed={**self._status.failed, step.transaction: why})
            self._reporter.say("failed", step.step, f"the step is not mirrored: {error}")
            return
        self._seen()[step.step] = replace(step, path=steps.step_folder(self._target, step.step), quarantined="")
        self._change(mirrored=self._mirrored(), problem="")
        seconds, left = time.monotonic() - started, self.waiting()
        self._reporter.say(
            "mirror", step.step, seconds=seconds, bytes=nbytes, gb_per_s=nbytes / max(seconds, 1e-9) / 1e9,
            waiting=len(left), waiting_bytes=sum(one.nbytes for one in left),
        )  # fmt: skip

    def _publish(self, step: Step) -> int:
        """Send what is not there, and publish; returns the bytes that were sent."""
        target = steps.step_folder(self._target, step.step)
        with publication_of(target, self._options.memory, step.transaction) as publication:
            try:
                manifest = self._same(step)
                todo = missing(manifest.files.items(), publication)
                self._send(step, manifest, todo, publication)
                self._same(step)
                publication.commit(manifest)
            except (_Gone, Corrupt, Incomplete):  # what was sent is of no use
                raise
            except BaseException:
                publication.leave()
                raise
        with suppress(CheckpointError):  # of the step that was replaced
            steps.release(target)
        return sum(entry.nbytes for _, entry in todo)

    def _send(self, step: Step, manifest: Manifest, todo: Sequence[Job], publication: StorePublication) -> None:
        """Send what is not there: this host's share, and then what the others' hosts have not sent."""
        mine = shares(manifest, self._hosts.hosts)[self._host]
        try:
            if not {name for name, _ in todo} <= {name for name, _ in mine}:
                self._hosts.ask(step.step, step.transaction)
            self._send_files(step, [job for job in todo if job in mine], publication)
            if not self._hosts.wait(self._look_up):
                self._send_files(step, missing(todo, publication), publication)
        finally:
            self._hosts.withdraw()

    def _send_files(self, step: Step, jobs: Sequence[Job], publication: StorePublication) -> None:
        self._moves()
        self._stands = False
        try:
            send(publication, step.local, jobs, self._look_at_sending, self._moves)
        except CheckpointError:
            self._same(step)
            raise

    def _look_up(self) -> None:
        if self._ended.is_set():
            raise Ended

    def _moves(self) -> None:
        self._moved = time.monotonic()

    def _look_at_sending(self) -> None:
        self._look_up()
        still = time.monotonic() - self._moved
        if self._stands == (still > STILL_S):
            return
        self._stands = not self._stands
        if self._stands:
            problem = f"stands still: the store has taken nothing for {still:.0f} s"
            self._trouble(problem, problem)
        else:
            self._change(problem="")

    def _same(self, step: Step) -> Manifest:
        """The manifest of a step that is still the one that was found.

        Raises:
            _Gone: It was deleted, or saved again.
        """
        try:
            manifest = steps.read_manifest(step.path)
        except CheckpointError:
            if steps.is_committed(step.path):
                raise
            raise _Gone from None
        if manifest.transaction != step.transaction:
            raise _Gone
        return manifest

    def _delete_old(self) -> None:
        """What the mirror's own rules do not keep."""
        if self._options.keep is None:
            return
        visible = sorted(self._seen().values(), key=by_number)
        for gone in retention.apply(self._target, retention.planned(visible, self._options.keep)):
            del self._seen()[gone.step]
            self._reporter.say("delete", gone.step, f"in the mirror: {gone.reason}", bytes=gone.nbytes)
        self._change(mirrored=self._mirrored())

    def _failed(self, error: Exception) -> None:
        self._there, self._error = None, error
        problem = str(error).partition("\n")[0] or type(error).__name__
        if problem == self._status.problem:
            return
        unforeseen = None if isinstance(error, CheckpointError | OSError) else error
        if unforeseen is not None:
            _log.warning("the mirror %s: %s", self._options.url, error, exc_info=unforeseen)
        self._trouble(problem, str(error))

    def _trouble(self, problem: str, text: str) -> None:
        """Say why nothing is sent now."""
        self._change(problem=problem)
        waits, values = "", dict[str, float]()
        with suppress(CheckpointError):  # the root itself may be what fails
            left = self.waiting()
            nbytes = sum(step.nbytes for step in left)
            values = {"waiting": len(left), "waiting_bytes": nbytes}
            waits = f"{len(left)} steps wait ({human(nbytes)}), and "
        said = f"the mirror {self._options.url}: {text}\nTraining goes on, {waits}it is tried again"
        self._reporter.say("failed", None, said, **values)

    def _change(self, **changes: Any) -> None:
        """Remember something, and say it to whoever looks into the root."""
        with self._changing:
            changed = replace(self._status, **changes)
            if changed == self._status:
                return
            self._status = changed
            try:
                replace_text(self._root / STATUS, text_of(changed, indent=1).decode() + "\n")
            except CheckpointError as error:
                _log.warning("%s: cannot be written: %s", self._root / STATUS, error)
