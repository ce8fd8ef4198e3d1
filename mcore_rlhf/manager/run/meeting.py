"""Where the ranks of one ``torch.distributed`` world meet: small collectives on a gloo group of the manager's own, which can be made anew.

A rank that does not come leaves a group that nobody can use any more. A run that goes on after a failed save needs another one, and may
not disturb the groups that training makes: this one is none of ``torch.distributed``'s list, whose names count how many were made.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

T = TypeVar("T")


class Meeting:
    """A gloo group of all ranks, which :meth:`renew` makes. Collective: all ranks make one, and call its methods alike.

    What goes through it are values of this run's own processes, which nobody else can send.

    Args:
        rank: This rank.
        size: How many there are.
        timeout: Seconds to wait for a rank that does not come.

    Attributes:
        broken: Whether this rank has lost the others since they last met.
    """

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self._rank, self._size, self._timeout = rank, size, timedelta(seconds=timeout)
        shared = PrefixStore("mcore_rlhf", c10d._get_default_store())
        # Every rank makes its managers in the same order, as they are collective: so the ranks find each other's.
        self._store = PrefixStore(f"{shared.add(f'made by {rank}', 1)}", shared)
        self._number = self._met = 0
        self.broken = False
        self._group: Any = None  # torch's stubs know of no backend what it can do

    def _made(self) -> dist.ProcessGroupGloo:
        store = PrefixStore(f"group/{self._number}", self._store)
        return dist.ProcessGroupGloo(store, self._rank, self._size, self._timeout)

    def breaks(self) -> None:
        """Tell everybody that this group is of no use any more; never raises."""
        self.broken = True
        with suppress(RuntimeError):  # the rank that keeps the store is the one that died
            self._store.set(f"broken/{self._number}", "1")

    def renew(self) -> None:
        """Make the next group, where there is none, or any rank has said that this one is broken.

        Raises:
            RuntimeError: Not all ranks came; :meth:`missing` says which.
        """
        broken = False
        while self._store.check([f"broken/{self._number}"]):
            broken, self._number = True, self._number + 1
        if broken or self._group is None:
            self._group, self._met = None, 0  # its threads end
            self.comes()
            self._group = self._made()
        self.broken = False

    def _live(self) -> Any:
        if self._group is None:
            raise RuntimeError("ranks have lost each other, and not met again")
        return self._group

    def barrier(self, seconds: float) -> None:
        """Wait until all ranks have come here.

        Raises:
            RuntimeError: Some have not; :meth:`missing` says which.
        """
        live = self._live()
        self.comes()
        live.monitored_barrier(timedelta(seconds=seconds), True)

    def comes(self) -> None:
        """Say that this rank has come as far as it now is, where all ranks come alike."""
        self._met += 1
        self._store.set(f"came/{self._rank}", f"{self._number} {self._met}")

    def all_come(self, seconds: float) -> bool:
        """Whether all others come as far as this rank has said that it has, within so many seconds."""
        deadline = time.monotonic() + seconds
        while self.missing() and time.monotonic() < deadline:
            time.sleep(0.1)
        return not self.missing()

    @property
    def is_left(self) -> bool:
        """Whether any rank has said that this group is of no use any more."""
        return bool(self._store.check([f"broken/{self._number}"]))

    def missing(self) -> list[int]:
        """The ranks that have not come as far as this one last said that it has; none where nobody can say. Never raises."""
        came: dict[int, tuple[int, int]] = {}
        with suppress(RuntimeError):  # the rank that keeps the store may be one of them
            for rank in range(self._size):
                key = f"came/{rank}"
                number, met = self._store.get(key).split() if self._store.check([key]) else (-1, 0)
                came[rank] = int(number), int(met)
        return [rank for rank, at in came.items() if at < (self._number, self._met)] if self._met else []

    def broadcast(self, value: T) -> T:
        """What rank 0 has."""
        data = _bytes(value) if self._rank == 0 else torch.empty(0, dtype=torch.uint8, device="cpu")
        length = torch.tensor([data.numel()], device="cpu")
        self._live().broadcast(length, 0).wait()
        data = data if self._rank == 0 else torch.empty(int(length), dtype=torch.uint8, device="cpu")
        self._live().broadcast(data, 0).wait()
        found: T = _value(data)
        return found

    def all_gather(self, value: T) -> list[T]:
        """What every rank has, in the order of ranks."""
        data = _bytes(value)
        lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self._size)]
        self._live().allgather([lengths], [torch.tensor([data.numel()], device="cpu")]).wait()
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: data.numel()] = data
        found = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(self._size)]
        self._live().allgather([found], [padded]).wait()
        return [_value(part[: int(length)]) for part, length in zip(found, lengths, strict=True)]

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is up on any rank."""
        bits, options = torch.tensor(flags, dtype=torch.uint8, device="cpu"), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]
        self._live().allreduce([bits], options).wait()
        return [bool(bit) for bit in bits.tolist()]


def _bytes(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _value(data: torch.Tensor) -> Any:
    return pickle.loads(bytes(data.numpy().data))  # noqa: S301  of a rank of this run
