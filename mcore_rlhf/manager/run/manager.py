"""The checkpoint manager: one object that saves and resumes a whole RLHF run, used by every rank."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

from mcore_rlhf.core.account import Report
from mcore_rlhf.errors import Incomplete, Problems, UsageError, headline
from mcore_rlhf.storage.links import enclose
from mcore_rlhf.storage.paths import ReadablePath, local_path

from ..rlhf.state import RlhfState
from .candidates import Resume
from .load import Resumer
from .mirror import PATIENCE_S, Mirroring
from .mirror_hosts import Helper
from .options import LOG, ManagerOptions, Mirror, Reporter
from .policies import AnyOf, BeforeDeadline, Deadline, OnSignal, SaveClock, SavePolicy, SignalFlag
from .retention import clean_up, remember
from .root import RootLock, open_root, remove_unguarded
from .save import Saver
from .snapshot import Components, Data, Role, components
from .steps import step_folder
from .world import World

__all__ = ["CheckpointManager", "ManagerOptions", "Resumed"]


@dataclass(frozen=True, slots=True)
class Resumed:
    """A step that was loaded.

    Args:
        step: Steps that are done; the next one is ``step + 1``.
        path: Where it was loaded from.
        report: What was kept, derived, changed and lost.
    """

    step: int
    path: ReadablePath
    report: Report


class CheckpointManager:
    """Saves and resumes a whole run: models with their optimizers, data, RLHF state, RNG states, in one commit.

    Every rank makes one, with the same arguments, and every rank makes the same calls; :meth:`save`, :meth:`maybe_save`,
    :meth:`load`, :meth:`wait` and :meth:`close` are collective. Use it as a context manager, or call :meth:`close`.

    Args:
        root: Folder of all steps, on a file system that all ranks share: ``output_dir/experiment_name/checkpoints``.
        roles: An engine, a ``torch.nn.Module`` or anything with ``state_dict`` by role (``actor``, ``critic``, ``reward``,
            ``reference``), or a single one, which becomes ``actor``.
        data: The :class:`~.sampler.PromptSampler`, or any loader with ``state_dict``.
        state: The RLHF state.
        options: When to save, what to keep, and so on.

    Raises:
        StorageError: The root cannot be written, not all ranks see it, or another run saves there. On every rank.
    """

    def __init__(
        self,
        root: str | Path,
        roles: Mapping[str, Role] | Role,
        *,
        data: Data | None = None,
        state: RlhfState | None = None,
        options: ManagerOptions | None = None,
    ) -> None:
        self.root = local_path(root).absolute()
        self.options = options or ManagerOptions()
        enclose(self.root, follow=self.options.follow_links or None)
        self._mirror = self.options.mirror if isinstance(self.options.mirror, Mirror) else None
        if self._mirror is not None:
            self._mirror.open()
        self.parts: Components = components(roles, data, state)
        self.world = World.current(self.options.timeout, self.options.worlds)
        self.reporter = Reporter(self.world.rank, self.options.on_event, self.options.tensorboard)
        self.stopping = False
        """Whether a signal asked the run to end; :meth:`maybe_save` has saved, and the loop should leave."""
        self._decisions = Decisions(self.world, self.options, self.reporter)
        self._saver = Saver(self.root, self.parts, self.world, self.options, self.reporter, self._decisions.clock)
        self._lock: RootLock | None = None
        self._helper: Helper | None = None
        self._saving = threading.Lock()
        self._closed = False
        if not self.options.read_only:
            self._open()
        self._decisions.listen()

    def _open(self) -> None:
        hosts = open_root(self.root, self.world)
        try:
            self.world.on_all_ranks(f"opening {self.root}", partial(self._take_root, hosts))
        except BaseException:
            self._let_go()  # an object that was never made is never closed
            raise
        if self._helper is not None:
            self._helper.start()

    def _take_root(self, hosts: Sequence[str]) -> None:
        self._saver.share_memory()
        first = {host: hosts.index(host) for host in hosts}  # of every host its first rank
        if self.world.commits:
            self._lock = RootLock(self.root)
            self._saver.hold = self._lock.hold
            if self._lock.doubt:
                LOG.warning("rank=%d: %s", self.world.rank, self._lock.doubt)
            unguarded = (
                [] if self.world.is_one_of_several else remove_unguarded(self.root)
            )  # another world's may be alive
            for line in [*clean_up(self.root, alone=True), *unguarded]:
                self.reporter.say("clean", None, line)
            if self._mirror is not None:
                going_on = self.options.on_existing == "continue"
                others = {rank: host for host, rank in first.items() if rank != 0}
                self._saver.mirror = Mirroring(
                    self.root, self._mirror, self.reporter, going_on, self.world.host, others
                )
        elif self._mirror is not None and self.world.has_who_commits and self.world.rank in first.values():
            target = self._mirror.open(PATIENCE_S)
            self._helper = Helper(self.root, self._mirror, target, self.world.rank, self.world.host)

    def save(
        self,
        step: int,
        metrics: Mapping[str, float] | None = None,
        *,
        blocking: bool | None = None,
        transaction: str | None = None,
    ) -> None:
        """Save everything as it is now, as ``global_step_<step>``.

        Returns when the live state has been copied aside; the rest happens behind training, unless ``blocking``. An error of
        that part is raised by the next :meth:`save`, :meth:`wait` or :meth:`close`.

        Args:
            step: Training steps that are done; also Megatron's ``iteration``.
            metrics: Numbers to keep with it, for retention of the best.
            blocking: Whether to return only once it is committed; by default as the options say.
            transaction: An id that all worlds are given, where several save together.

        Raises:
            CheckpointError: This save, or the one before it, failed; on every rank. Older steps are untouched. Where the options say
                ``on_error="continue"``, that is an event, and nothing is raised.
        """
        self._check_usable(step)
        if not self._saving.acquire(blocking=False):
            raise UsageError("save() is called from two threads at once; one thread saves, on every rank")
        try:
            self._saver.save(step, _numbers(metrics or {}), self._blocking(blocking), transaction)
        finally:
            self._saving.release()

    def _blocking(self, asked: bool | None) -> bool:
        return not self.options.asynchronous if asked is None else asked

    def maybe_save(self, step: int, metrics: Mapping[str, float] | None = None, *, last: bool = False) -> str | None:
        """Save if a policy wants it, on all ranks or on none: a signal at any one rank counts for all.

        Args:
            step: Training steps that are done.
            metrics: See :meth:`save`.
            last: Whether this was the last step.

        Returns:
            Why it was saved; None where it was not. After a signal the save is complete, and :attr:`stopping` is true.
        """
        self._check_open()
        decided = self._decisions.at(step, last, self._saver.is_due())
        self.stopping = self.stopping or decided.stop
        if decided.reason is not None:
            self.save(step, metrics, blocking=True if decided.stop or last else None)
        return decided.reason

    def load(
        self, which: str | int | Path | None = "auto", *, must_exist: bool = False, optimizer: bool = True
    ) -> Resumed | None:
        """Restore everything, in place.

        All ranks check what they will read, and agree; then every part (roles, data, RNG states) takes what it may refuse,
        with one undo for the whole run; and only when all parts of all ranks have, the first tensor is overwritten.

        Args:
            which: ``auto``: the newest committed step of the root, or of the mirror, that is intact; damaged ones are skipped
                with a line that says why. A number: that step of the root, or else of the mirror. A path: that step, or a single
                model in any format that is read. ``None`` or ``none``: nothing.
            must_exist: Whether finding nothing is an error; it always is for a number or a path.
            optimizer: Whether optimizers are restored, or weights only.

        Returns:
            What was loaded; None where there is nothing to resume.

        Raises:
            CheckpointError: It does not exist, is damaged, does not fit the run, or a part refused it; that part is named, and
                the live state is as before. On every rank. (If a file that was sound cannot be read any more while it is
                copied, the error says so: load again before training on.)
        """
        self._check_open()
        self.world.meet()
        self.world.barrier("load")
        self.wait()
        resumer = Resumer(self.root, self.parts, self.world, self.options, self.reporter, optimizer)
        found = resumer.load(Resume.parse(which), must_exist)
        if found is not None:
            remember(found.folder)
            if found.mirrored:  # it is the root's own
                remember(step_folder(self.root, found.step))
            self._saver.went_back_to = found.step if found.went_back else None
        if self._saver.mirror is not None:
            self._saver.mirror.start()
        return None if found is None else Resumed(found.step, found.folder, found.report)

    def wait(self) -> None:
        """Wait until the last save is committed.

        Raises:
            CheckpointError: It failed; on every rank. Raised once, and not where the options say ``on_error="continue"``.
        """
        self._saver.wait()

    def wait_for_mirror(self, seconds: float | None = None) -> list[int]:
        """Wait until every committed step that shall be in the mirror is there: at the end of a run, where no other will go on.

        Not collective. Where a run has several hosts, call it on all ranks: each host sends what its ranks wrote, and what the others
        have not sent when they end, the rank that commits sends as well.

        Args:
            seconds: How long at most; None for as long as it takes.

        Returns:
            Steps that still wait; empty where all is there, or there is no mirror.
        """
        self._check_open()
        sending = self._saver.mirror or self._helper
        return [] if sending is None else sending.wait(seconds)

    def before_step(self) -> None:
        """Wait until everything that a save copies behind training is in host memory, so that it may change. Not collective.

        With :attr:`ManagerOptions.lazy_snapshot` the roles' optimizers call it before they step. Call it before anything else changes
        weights after a save: an average of weights, a reference that is brought up to date, an offload that gives memory back.

        Raises:
            StorageError: The copy stands still: the file system may hang. Not where the options say ``on_error="continue"``.
        """
        self._saver.before_step()

    def reserve(self) -> None:
        """Make the host memory that an asynchronous save needs, so that the first one is as quick as the others; on all ranks."""
        self._saver.reserve()

    def close(self) -> None:
        """Finish the last save, and let go of everything.

        Raises:
            CheckpointError: That save failed; on every rank, and whatever :attr:`ManagerOptions.on_error` says: what was trained since the
                newest step is lost with this process.
        """
        if self._closed:
            return
        try:
            self._saver.finish()
        finally:
            self._let_go()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._saver.end_alone()
        self._let_go()

    def _let_go(self) -> None:
        self._closed = True
        self._saver.close()
        if self._helper is not None:
            self._helper.close()
        self._decisions.close()
        self.reporter.close()
        self.world.close()
        if self._lock is not None:
            self._lock.release()

    def _check_usable(self, step: int) -> None:
        self._check_open()
        if self.options.read_only:
            raise UsageError("this manager only reads: it was made with read_only=True")
        if type(step) is not int or step < 0:
            raise UsageError(f"step should be a whole number from 0 on, found {step!r}")

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("this manager is closed; make a new one")


@dataclass(frozen=True, slots=True)
class Decision:
    """What all ranks do at a step boundary.

    Args:
        reason: Why to save; None where there is no reason to.
        stop: Whether a signal asked the run to end.
    """

    reason: str | None
    stop: bool


class Decisions:
    """Asks the policies on one rank, and listens to signals on all.

    Args:
        world: The ranks.
        options: Which policies, and whether training goes on where ranks lose each other; see :class:`~.options.ManagerOptions`.
        reporter: Hears of that.
    """

    def __init__(self, world: World, options: ManagerOptions, reporter: Reporter) -> None:
        self._reporter, self._goes_on = reporter, options.on_error == "continue"
        self.clock = SaveClock(options.deadline or Deadline.of_job())
        self._world, self._catch = world, options.catch_signals and not options.read_only
        self._policy = _with_defaults(options.save)
        self._signals = SignalFlag()

    def listen(self) -> None:
        """Catch signals from now on, where that is wanted and possible: in the main thread alone."""
        if self._catch and threading.current_thread() is threading.main_thread():
            self._signals.install()

    def close(self) -> None:
        """Put the handlers back that were there before."""
        self._signals.restore()

    def at(self, step: int, last: bool, is_due: bool) -> Decision:
        """What to do after a step. Collective: a signal at any one rank counts for all.

        Nothing, where ranks have lost each other and the run is to go on: at the next one they meet again.

        Args:
            step: Steps that are done.
            last: Whether this was the last one.
            is_due: Whether a save that failed on this rank is to be tried again now.
        """
        try:
            self._world.meet(asking=False)
            return self._decided(step, last, is_due)
        except Incomplete as error:
            if not self._goes_on:
                raise
            self._reporter.say("failed", step, f"{headline(str(error))}; training goes on")
            return Decision(None, stop=False)

    def _decided(self, step: int, last: bool, is_due: bool) -> Decision:
        number, again = self._agreed(is_due)
        point = self.clock.at(step, signalled=number, last=last)
        reason = self._policy.wants(point) if self._world.is_rank0 else None
        if again and reason is None:
            reason = "the last save failed"
        return Decision(self._world.broadcast(reason), stop=number != 0)

    def _agreed(self, is_due: bool) -> tuple[int, bool]:
        """The signal that any rank has received, and whether a save is due on any."""
        numbers = self._signals.signals
        self._signals.noticed = self._signals.received != 0
        *flags, again = self._world.any_rank([*(self._signals.received == number for number in numbers), is_due])
        return next((int(number) for number, flag in zip(numbers, flags, strict=True) if flag), 0), again


def _with_defaults(policy: SavePolicy) -> SavePolicy:
    """Signals always save; a deadline does, unless the user's own policy looks after it."""
    own = policy.policies if isinstance(policy, AnyOf) else (policy,)
    deadline = () if any(isinstance(part, BeforeDeadline) for part in own) else (BeforeDeadline(),)
    return AnyOf((OnSignal(), *own, *deadline))


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics as plain numbers, whatever counts as one: a tensor of one element, NumPy's.

    Raises:
        UsageError: Some are no numbers; all of them are named.
    """
    found, problems = {}, Problems()
    for name, value in metrics.items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            problems.add(UsageError, f"metrics: {name} should be a number, found {type(value).__name__} {value!r:.40}")
    problems.raise_if_any()
    return found
