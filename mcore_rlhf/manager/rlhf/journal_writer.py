"""What a producer of rollouts puts into its loop: each finished rollout is written behind it, in groups, into files of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ...errors import StorageError, UsageError
from ...storage.appending import AppendCounts, AppendLog, Pace
from ...storage.paths import local_path
from .journal_files import FORMAT, VERSION, JournalMark, open_folder
from .rollouts import Rollout

_NO_FINGERPRINT: Mapping[str, str] = MappingProxyType({})


class JournalWriter:
    """Writes finished rollouts: one for each process that makes some, be it a thread's, an actor's or a server's. For several threads.

    Args:
        root: The run's root, on a file system that the driver sees too.
        producer: Its name, for people; of two of one name each has files of its own.
        fingerprint: What the rollouts depend on, as texts: the tokenizer's hash, say. Driver and producers that name the same thing must
            agree on it.
        pace: When records reach the disk: in the system's hands after 0.05 s, safe from a power failure after 1 s.
        on_error: ``continue``: a disk that takes no records does not end anything: that is logged, and tried again; ``raise``:
            :meth:`add` raises it.
        on_problem: Hears what is wrong, and None once it is well again; called in another thread.

    Raises:
        UsageError: Something has a value that it cannot have.
        StorageError: The journal cannot be opened.
        CheckpointError: It is another run's, or a newer release's.
    """

    def __init__(
        self,
        root: str | Path,
        producer: str,
        *,
        fingerprint: Mapping[str, str] = _NO_FINGERPRINT,
        pace: Pace | None = None,
        on_error: Literal["continue", "raise"] = "continue",
        on_problem: Callable[[StorageError | None], None] = lambda problem: None,
    ) -> None:
        if pace is not None and not isinstance(pace, Pace):
            raise UsageError(f"pace: expected a JournalPace, such as JournalPace(sync_s=2), found {pace!r}")
        folder, found = open_folder(local_path(root).absolute(), fingerprint)
        mark = JournalMark(FORMAT, VERSION, found.run, dict(fingerprint), producer)
        self._log = AppendLog(folder, producer, mark.to_bytes(), pace or Pace(), on_error, on_problem)

    @property
    def counts(self) -> AppendCounts:
        """What has become of the rollouts so far."""
        return self._log.counts

    @property
    def problem(self) -> StorageError | None:
        """Why the disk takes none now; None where it does."""
        return self._log.problem

    def add(self, rollout: Rollout) -> bool:
        """Write a rollout; does not wait for the disk.

        Returns:
            Whether it will be written; see :meth:`~mcore_rlhf.storage.appending.AppendLog.add`.

        Raises:
            UsageError: It holds what cannot be stored.
            StorageError: With ``on_error="raise"``, the disk takes none.
        """
        return self._log.add(rollout.to_bytes())

    def flush(self, seconds: float | None = None) -> None:
        """Wait until all of them are safe.

        Raises:
            StorageError: The disk refused, or did not answer in so many seconds.
        """
        self._log.flush(seconds)

    def close(self) -> None:
        """Make all of them safe, and end."""
        self._log.close()

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
