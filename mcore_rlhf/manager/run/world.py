"""The ranks that save and load together: who I am, and the few small things that all of them must agree on.

Everything here runs on the training loop's own thread. Behind it, ranks meet through files (see :mod:`.mailbox`).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from mcore_rlhf.errors import CheckpointError, Incomplete

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class World:
    """Ranks of one ``torch.distributed`` world, or a single process.

    Args:
        rank: This process' global rank.
        size: Number of ranks.
        timeout: Seconds to wait for a rank that does not come.
        group: A gloo group of all ranks; None for a single process.
    """

    rank: int
    size: int
    timeout: float
    group: dist.ProcessGroup | None = None

    @classmethod
    def current(cls, timeout: float = 600.0) -> World:
        """The world of this process. Collective where ``torch.distributed`` is initialized: a gloo group is made."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls(0, 1, timeout)
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        return cls(dist.get_rank(), dist.get_world_size(), timeout, group)

    @property
    def coordinates(self) -> bool:
        """Whether this rank writes the manifest and does what is done once."""
        return self.rank == 0

    @property
    def name(self) -> str:
        """Host and rank, for messages."""
        return f"rank {self.rank} on {socket.gethostname()}"

    def meet(self, what: str, patience: float = 1.0) -> None:
        """Wait until all ranks have come here.

        Args:
            what: What they are about to do, for the message.
            patience: How many times the time-out to wait.

        Raises:
            Incomplete: Some did not come in time; rank 0 names them.
        """
        if self.group is None:
            return
        try:
            dist.monitored_barrier(self.group, timedelta(seconds=patience * self.timeout), wait_all_ranks=True)
        except RuntimeError as error:
            raise Incomplete(
                f"{self.name}: not all ranks came to {what} within {patience * self.timeout:g} s: {_first_line(error)}\n"
                "Every rank must call it. Look at the logs of the ranks that are missing."
            ) from error

    def from_first(self, value: T) -> T:
        """What rank 0 has."""
        if self.group is None:
            return value
        box = [value]
        with self._telling():
            dist.broadcast_object_list(box, src=0, group=self.group, device=torch.device("cpu"))
        return box[0]

    def gathered(self, value: T) -> list[T]:
        """What every rank has, in the order of ranks."""
        if self.group is None:
            return [value]
        values: list[T | None] = [None] * self.size
        with self._telling():
            dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]

    def any_flags(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is up on any rank: one small collective."""
        if self.group is None:
            return list(flags)
        bits = torch.tensor(flags, dtype=torch.uint8)
        with self._telling():
            dist.all_reduce(bits, dist.ReduceOp.MAX, group=self.group)
        return [bool(bit) for bit in bits.tolist()]

    def raise_together(self, error: Exception | None, what: str) -> None:
        """Raise on every rank if any rank has an error: its own where it has one, otherwise what the first one met.

        Raises:
            CheckpointError: Of the class that the first failing rank has.
            Exception: This rank's own, whatever it is.
        """
        errors = self.gathered(None if error is None else told(error))
        failed = [(rank, found) for rank, found in enumerate(errors) if found is not None]
        if error is not None:
            raise error
        if failed:
            rank, (kind, text) = failed[0]
            raise kind(f"{what} failed on rank {rank}: {text}")

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """A rank that died, or never came, is not a riddle of the network's."""
        try:
            yield
        except RuntimeError as error:
            raise Incomplete(
                f"{self.name}: another rank died, or did not come within {self.timeout:g} s: {_first_line(error)}\n"
                "Every rank must make the same calls of the manager. Look at the logs of the other ranks."
            ) from error

    def close(self) -> None:
        """Give the group back, and let go of it: its threads must not outlive the interpreter, which aborts then."""
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def told(error: BaseException) -> tuple[type[CheckpointError], str]:
    """An error as another rank can raise it: of a class that every rank knows, whatever an engine made up."""
    if type(error).__module__ == CheckpointError.__module__ and isinstance(error, CheckpointError):
        return type(error), str(error)
    return CheckpointError, f"{type(error).__name__}: {error}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
