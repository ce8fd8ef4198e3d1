"""What the ranks of a model tell each other while training waits: small things only, and never behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from mcore_rlhf.errors import CheckpointError, Unsupported

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Failed:
    text: str


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that a model is dealt out to, as a group.

    Args:
        ranks: Global ranks, in order.
        group: Their process group; None for that of all.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, ranks: tuple[int, ...]) -> Ranks:
        """A group of these ranks, each of which calls."""
        whole = len(ranks) == dist.get_world_size()
        return cls(ranks, None if whole else dist.new_group(list(ranks), use_local_synchronization=True))

    def shared(self, action: Callable[[], T], tell: Callable[[T], object]) -> tuple[T, list[object]]:
        """Do something on every rank, and tell the others of it; what fails on one, fails on all. Collective.

        Args:
            action: What to do.
            tell: What the others hear of its result.

        Returns:
            The result, and what each rank told, in the order of the ranks.

        Raises:
            Unsupported: It failed on another rank.
        """
        failure: Exception | None = None
        told: object
        try:
            result = action()
            told = tell(result)
        except Exception as error:  # whatever it is, the others wait for this rank
            failure, told = error, _Failed(str(error) if isinstance(error, CheckpointError) else repr(error))
        everyone: list[object] = [None] * len(self.ranks)
        dist.all_gather_object(everyone, told, self.group)
        if failure is not None:
            raise failure
        for rank, other in zip(self.ranks, everyone, strict=True):
            if isinstance(other, _Failed):
                raise Unsupported(f"rank {rank}: {other.text}")
        return result, everyone
