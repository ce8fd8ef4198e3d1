"""The ranks that save and load together: one ``torch.distributed`` world, or several that save one step in one commit.

Everything here runs on the training loop's own thread. Behind it, ranks meet through files (see :mod:`.commit`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch.distributed as dist

from mcore_rlhf.errors import CheckpointError, Incomplete, StorageError, UsageError, headline

from .meeting import Meeting

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Worlds:
    """Several worlds that save one step in one commit: actor, critic and rollout workers under Ray.

    Each world has a manager of its own with its own roles. All are given the same transaction id at every save (a driver makes
    it with :func:`~.commit.new_transaction`), find each other through the file system, and the first one listed commits.

    Args:
        mine: Name of this process' world.
        sizes: Ranks of every world, the coordinating one first: ``{"actor": 8, "critic": 4}``.
    """

    mine: str
    sizes: Mapping[str, int]


@dataclass(slots=True, eq=False)
class World:
    """Ranks of one ``torch.distributed`` world, or a single process.

    Args:
        rank: This process' global rank.
        size: Number of ranks.
        timeout: Seconds to wait for a rank that does not come.
        meeting: Where its ranks meet; None for a single process.
        worlds: This world and the others that save with it, where there are several.

    Raises:
        UsageError: This world has another size than ``worlds`` says.
    """

    rank: int
    size: int
    timeout: float
    meeting: Meeting | None = None
    worlds: Worlds | None = None
    rank_names: tuple[str, ...] = field(init=False)
    """Every rank's of all worlds: names of its messages; RNG states are stored in this order."""

    def __post_init__(self) -> None:
        sizes, mine = ({"": self.size}, "") if self.worlds is None else (self.worlds.sizes, self.worlds.mine)
        if sizes.get(mine) != self.size:
            raise UsageError(f"worlds: {mine!r} should have {sizes.get(mine)} ranks, and this world has {self.size}")
        self.rank_names = tuple(_name(world, rank) for world, size in sizes.items() for rank in range(size))

    @classmethod
    def current(cls, timeout: float = 600.0, worlds: Worlds | None = None) -> World:
        """The world of this process. Collective where ``torch.distributed`` is initialized: its ranks meet.

        Raises:
            Incomplete: Some did not come in time; they are named.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls(0, 1, timeout, worlds=worlds)
        meeting = Meeting(dist.get_rank(), dist.get_world_size(), timeout)
        world = cls(dist.get_rank(), dist.get_world_size(), timeout, meeting, worlds)
        world.meet()
        return world

    @property
    def is_rank0(self) -> bool:
        """Whether this rank does what is done once in this world."""
        return self.rank == 0

    @property
    def commits(self) -> bool:
        """Whether this rank writes the manifest: rank 0 of the first world."""
        return self.rank_name == self.rank_names[0]

    @property
    def has_who_commits(self) -> bool:
        """Whether :attr:`commits` is true of a rank of this world."""
        return self.rank_names[0] == _name(self.worlds.mine if self.worlds else "", 0)

    @property
    def is_one_of_several(self) -> bool:
        """Whether other worlds save the same step."""
        return self.worlds is not None

    @property
    def rank_name(self) -> str:
        """``00003``, or ``critic-00003`` where there are several worlds."""
        return _name(self.worlds.mine if self.worlds else "", self.rank)

    @property
    def index(self) -> int:
        """This rank's number among those of all worlds."""
        return self.rank_names.index(self.rank_name)

    def layout(self, layout: str) -> str:
        """How this world's models are cut, by a name that no other world has."""
        return f"{self.worlds.mine}: {layout}" if self.worlds else layout

    @property
    def name(self) -> str:
        """Host and rank, for messages."""
        return f"rank {self.rank} on {self.host}"

    @property
    def host(self) -> str:
        """The machine that this process runs on."""
        return socket.gethostname()

    def barrier(self, what: str, patience: float = 1.0) -> None:
        """Wait until all ranks have come here.

        Args:
            what: What they are about to do, for the message.
            patience: How many times the time-out to wait.

        Raises:
            Incomplete: Some did not come in time; they are named.
        """
        if self.meeting is None:
            return
        try:
            self.meeting.barrier(patience * self.timeout)
        except RuntimeError as error:
            self.meeting.breaks()
            raise Incomplete(
                f"{self.name}: not all ranks came to {what} within {patience * self.timeout:g} s: {self._who_is_missing(error)}\n"
                "Every rank must call it. Look at the logs of the ranks that are missing."
            ) from error

    def meet(self, *, asking: bool = True) -> None:
        """Meet anew, where ranks have lost each other since they last met; collective.

        Args:
            asking: Whether the others are asked, by a look at the store that they share; else it is what this rank has met itself.

        Raises:
            Incomplete: Some did not come in time.
        """
        if self.meeting is not None and (asking or self.meeting.broken):
            with self._explaining():
                self.meeting.renew()

    def share(self, names: Sequence[T]) -> Sequence[T]:
        """Those of which this rank takes care, where each rank does a part."""
        return names[self.rank :: self.size]

    def broadcast(self, value: T) -> T:
        """What rank 0 has."""
        if self.meeting is None:
            return value
        with self._explaining():
            return self.meeting.broadcast(value)

    def all_gather(self, value: T) -> list[T]:
        """What every rank has, in the order of ranks."""
        if self.meeting is None:
            return [value]
        with self._explaining():
            return self.meeting.all_gather(value)

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is up on any rank: one small collective."""
        if self.meeting is None:
            return list(flags)
        with self._explaining():
            return self.meeting.any_rank(flags)

    def on_all_ranks(self, what: str, action: Callable[[], T], patience: float | None = None) -> T:
        """Do something on every rank; if it fails on one, it fails on all.

        Args:
            what: It, for messages.
            action: Does it.
            patience: Seconds that a rank on which it fails waits for the others, where these may wait for that rank themselves, in a
                collective within the action; it goes then, and tells them that it did. None for the time-out.

        Raises:
            CheckpointError: This rank's own error, or that of the first rank that has one.
        """
        result: T | None = None
        error: Exception | None = None
        try:
            result = action()
        except OSError as failure:
            error = StorageError(f"{what}: {failure}")
        except Exception as failure:  # whatever it is, the others must not wait for this rank
            error = failure
        except BaseException as failure:
            error = _of_dcp(what, failure)
            if error is None:
                raise
            error.__cause__ = failure
        if patience is not None and self.meeting is not None:
            self._come(self.meeting, error, patience)
        self.raise_on_all(error, what)
        return result  # type: ignore[return-value]

    def _come(self, meeting: Meeting, error: Exception | None, patience: float) -> None:
        """Come to where errors are told, and go again where this rank has one and the others do not come."""
        with self._explaining():
            meeting.comes()
            if error is None and meeting.is_left:
                raise RuntimeError("it failed, and has gone")
            goes = error is not None and not meeting.all_come(patience)
        if goes and error is not None:
            meeting.breaks()
            raise error

    def raise_on_all(self, error: Exception | None, what: str) -> None:
        """Raise on every rank if any rank has an error: its own where it has one, otherwise what the first one met.

        Raises:
            CheckpointError: Of the class that the first failing rank has.
            Exception: This rank's own, whatever it is.
        """
        try:
            errors = self.all_gather(None if error is None else raisable(error))
        except Incomplete as lost:
            if error is None:
                raise
            raise error from lost  # the others wait elsewhere, and what they wait for is this
        failed = [(rank, found) for rank, found in enumerate(errors) if found is not None]
        if error is not None:
            raise error
        if failed:
            rank, (kind, text) = failed[0]
            raise kind(f"{what} failed on rank {rank}: {text}")

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """A rank that died, or never came, is not a riddle of the network's."""
        try:
            yield
        except RuntimeError as error:
            if self.meeting is not None:
                self.meeting.breaks()
            raise Incomplete(
                f"{self.name}: another rank died, or did not come within {self.timeout:g} s: {self._who_is_missing(error)}\n"
                "Every rank must make the same calls of the manager. Look at the logs of the other ranks."
            ) from error

    def _who_is_missing(self, error: RuntimeError) -> str:
        """The ranks that have not come, on every rank alike; what the group says of it, where nobody knows them."""
        missing = [] if self.meeting is None else self.meeting.missing()
        if not missing:
            return headline(str(error))
        return f"without rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"

    def close(self) -> None:
        """Let go of the others."""
        self.meeting = None


def raisable(error: BaseException) -> tuple[type[CheckpointError], str]:
    """An error as another rank can raise it: of a class that every rank knows, whatever an engine made up."""
    if type(error).__module__ == CheckpointError.__module__ and isinstance(error, CheckpointError):
        return type(error), str(error)
    return CheckpointError, f"{type(error).__name__}: {error}"


def _of_dcp(what: str, failure: BaseException) -> CheckpointError | None:
    """What ``dcp.save`` and ``dcp.load`` raise on all ranks alike, as an error with what each rank met; None of anything else.

    Theirs is no ``Exception``, and its text is a traceback of each rank. Source: torch 2.13.0, ``distributed/checkpoint/api.py``.
    """
    if type(failure).__module__ != "torch.distributed.checkpoint.api":
        return None
    found = getattr(failure, "failures", {})
    met = "; ".join(f"rank {rank}: {type(one).__name__}: {one}" for rank, (one, _) in found.items())
    return StorageError(f"{what}: {met or failure}")


def _name(world: str, rank: int) -> str:
    return f"{world}-{rank:05d}" if world else f"{rank:05d}"
