"""What to tell of a job that failed: which rank, why, and where it stood."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_LINES = 30


class WorkerError(RuntimeError):
    """A job failed on some rank.

    Args:
        rank: The rank that failed first, or that the others were waiting for.
        reason: What happened there.
        details: Traceback or stacks, and the end of the log.
    """

    def __init__(self, rank: int, reason: str, details: str) -> None:
        super().__init__(f"rank {rank} {reason}\n{details}")
        self.rank = rank
        self.reason = reason
        self.details = details

    @property
    def recoverable(self) -> bool:
        """Whether every rank has come back, so that the workers can go on."""
        return self.reason == "raised"


@dataclass(frozen=True, slots=True)
class Reports:
    """The files into which the workers of a pool write.

    Args:
        folder: Of the pool: ``worker_N.log`` (what was printed) and ``worker_N.stacks`` (dumped at a time-out).
    """

    folder: Path

    def read(self, name: str) -> str:
        """All of a file; nothing if it is not there."""
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def tail(self, name: str) -> str:
        """The last lines of a file."""
        return "\n".join(self.read(name).splitlines()[-_LINES:])

    def raised(self, rank: int, traceback: str) -> WorkerError:
        """A rank raised; its traceback comes last, where readers look."""
        return WorkerError(rank, "raised", f"{self.tail(f'worker_{rank}.log')}\n{traceback}".strip())

    def died(self, rank: int) -> WorkerError:
        """A rank's process ended."""
        return WorkerError(rank, "died", self.tail(f"worker_{rank}.log"))

    def unfinished(self, first: WorkerError | None, waiting: int, count: int, timeout: float) -> WorkerError:
        """A job in which workers ended or did not come back: their stacks tell whether they hung.

        Args:
            first: The first failure that was reported, if any.
            waiting: A rank that has not come back.
            count: Ranks of the job.
            timeout: Seconds that it had.
        """
        stacks = {rank: self.tail(f"worker_{rank}.stacks") for rank in range(count)}
        if first is not None and not stacks[first.rank]:
            return first if first.reason == "died" else WorkerError(first.rank, "raised, others hang", first.details)
        # those that sit in a collective wait for the one that does not
        suspects = [rank for rank, stack in stacks.items() if stack and "distributed_c10d" not in stack]
        details = "\n".join(f"rank {rank}:\n{stack}" for rank, stack in stacks.items())
        return WorkerError((suspects or [waiting])[0], f"was not done in {timeout:g} s", details)
