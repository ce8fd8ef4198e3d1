"""The rollout journal: what was sampled between two saves outlives a crash, and is trained on exactly once.

Producers, in whatever processes, write each finished rollout (:class:`~.journal_writer.JournalWriter`). After a crash the driver gives
them back::

    journal = RolloutJournal(root, max_staleness=4)
    manager.load("auto")                                         # what was trained on is what the step says, and nothing else
    while batch := sampler.next_batch():                         # prompts in flight come again, under the same ids
        for prompt in batch:
            rollouts, missing = journal.take(prompt, state.weight_version)
            ...                                                  # only what is missing is sampled
        ...
        manager.maybe_save(step)                                 # what no step can ask for any more goes, behind the commit

Which rollouts were trained on is not written here a second time: a step that is resumed knows it, and its sampler issues every other
prompt, once. The journal only answers whether a sample of an issued prompt is finished already. So losing a record, or having it twice,
costs at most the time to sample it again, and never a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ...errors import CheckpointError, Problems, UsageError, headline, log_of
from ...storage.framed import payload_at
from ...storage.paths import local_path
from ..run import steps
from .consumed import Consumed, consumed_by
from .journal_files import JournalFolder, JournalSegment, StoredRollout, open_folder
from .prompts import Prompt
from .rollouts import Rollout, SampleKey

_log = log_of(__name__)


class TakenRollouts(NamedTuple):
    """What the journal has of a prompt.

    Args:
        rollouts: The finished ones of its pending samples.
        missing: Its pending samples that are to be sampled.
    """

    rollouts: tuple[Rollout, ...]
    missing: tuple[int, ...]


@dataclass(slots=True)
class JournalCounts:
    """What the driver has met.

    Args:
        finished: Rollouts in the journal that were not given back yet.
        given: Given back.
        newer: Of these, those of newer weights than the present ones: the crash has lost those.
        stale: Dropped, as their weights were too old.
        other: Dropped, as another prompt stands in their place now, or another seed is its sample's.
        lost: Dropped, as they could not be read any more.
    """

    finished: int = 0
    given: int = 0
    newer: int = 0
    stale: int = 0
    other: int = 0
    lost: int = 0


@dataclass(slots=True)
class RolloutJournal:
    """Gives finished rollouts back, on the driver: in one process of a run.

    Args:
        root: The run's root.
        max_staleness: How many versions older than the present weights a rollout may be; None for any.
        fingerprint: See :class:`~.journal_writer.JournalWriter`.
        counts: See :class:`JournalCounts`.

    Raises:
        UsageError: ``max_staleness`` is no number of versions.
        CheckpointError: It cannot be opened, or holds segments of another run or a newer release; all are named.
    """

    root: Path
    max_staleness: int | None = None
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    counts: JournalCounts = field(default_factory=JournalCounts)
    _files: JournalFolder = field(init=False)
    _finished: dict[tuple[int, int], dict[int, StoredRollout]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.max_staleness is not None and (type(self.max_staleness) is not int or self.max_staleness < 0):
            raise UsageError(f"max_staleness: expected a whole number from 0 on, or None, found {self.max_staleness!r}")
        self.root = local_path(self.root).absolute()
        self._files = JournalFolder(*open_folder(self.root, self.fingerprint))
        self.refresh()
        problems = Problems()
        found = [self._files.mark.stranger_in(self.root), *(one.problem for one in self._files.segments.values())]
        for problem in filter(None, found):
            problems.add_error(problem)
        problems.raise_if_any()
        _log.info("%s: %d finished rollouts", self._files.folder, self.counts.finished)

    def refresh(self) -> int:
        """Look at what producers have added since; how many rollouts there are now.

        Raises:
            StorageError: The folder cannot be listed.
        """
        for found in self._files.read():
            key = found.place.key
            group = self._finished.setdefault((key.epoch, key.position), {})
            known = group.get(key.sample)
            self.counts.finished += known is None
            if known is None or found.place.version > known.place.version:
                group[key.sample] = found
        return self.counts.finished

    def take(self, prompt: Prompt, version: int) -> TakenRollouts:
        """The finished rollouts of a prompt that the sampler has issued. Each is given once.

        Args:
            prompt: It.
            version: Of the present weights; what is too old for it is dropped, and counted, as is what cannot be read.
        """
        group = self._finished.pop((prompt.epoch, prompt.position), {})
        self.counts.finished -= len(group)
        wanted = {sample: group[sample] for sample in prompt.pending if sample in group}
        rollouts = [one for found in wanted.values() if (one := self._taken(found, prompt, version)) is not None]
        self.counts.given += len(rollouts)
        self.counts.newer += sum(one.version > version for one in rollouts)
        done = {one.sample for one in rollouts}
        return TakenRollouts(tuple(rollouts), tuple(sample for sample in prompt.pending if sample not in done))

    def _taken(self, found: StoredRollout, prompt: Prompt, version: int) -> Rollout | None:
        if found.place.prompt_id != prompt.prompt_id:
            self.counts.other += 1
            return None
        if self.max_staleness is not None and version - found.place.version > self.max_staleness:
            self.counts.stale += 1
            return None
        try:
            data = payload_at(found.path, found.number, found.offset, found.nbytes)
            if data is not None:
                rollout = Rollout.from_bytes(data, f"{found.path}: record {found.number}")
                if rollout.seed in (0, prompt.sample_seeds[rollout.sample]):
                    return rollout
                self.counts.other += 1  # of a run that had another seed, and began in this root
                return None
        except CheckpointError as error:
            _log.warning("%s; it is sampled again", headline(str(error)))
        self.counts.lost += 1
        return None

    def trim(self, consumed: Callable[[SampleKey], bool] | None = None) -> int:
        """Remove the segments of which no step that is there can ask for anything. Nothing is raised: what is not removed stays.

        A :class:`~mcore_rlhf.CheckpointManager` does that after each commit; it is for loops whose steps are another's, or whose ``data``
        says nothing of prompts.

        Args:
            consumed: Says what the oldest of them has trained on, where steps are not this package's; by default its ``data/data.pt``.

        Returns:
            How many have gone.
        """
        try:
            seen = consumed or self._by_oldest()
            if seen is None:
                return 0
            self.refresh()
            self._forget(seen)
            return self._files.remove([one for one in self._files.segments.values() if _is_done(one, seen)])
        except CheckpointError as error:
            _log.warning("the rollout journal is not trimmed: %s", headline(str(error)))
            return 0

    def _by_oldest(self) -> Callable[[SampleKey], bool] | None:
        there = [step for step in steps.listed(self.root) if step.state in ("committed", "unreadable")]
        if not there:
            return None
        found = consumed_by(there[0].path)
        if isinstance(found, Consumed):
            return found.__contains__
        _log.warning("the rollout journal is not trimmed: %s", headline(found))
        return None

    def _forget(self, consumed: Callable[[SampleKey], bool]) -> None:
        """No resume asks for these any more."""
        for (epoch, position), group in list(self._finished.items()):
            if all(consumed(SampleKey(epoch, position, sample)) for sample in group):
                del self._finished[epoch, position]
                self.counts.finished -= len(group)


def _is_done(segment: JournalSegment, consumed: Callable[[SampleKey], bool]) -> bool:
    return segment.problem is None and all(consumed(place.key) for place in segment.held)
