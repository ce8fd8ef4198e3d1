"""How ranks talk while a step is written behind the training loop: small files in the step's hidden folder.

No collectives and no sockets, so that it does not disturb training, and that actor, critic and rollout workers may live in
separate ``torch.distributed`` worlds. All that is needed is the file system that they share anyway.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mcore_rlhf.errors import CheckpointError, Incomplete, StorageError
from mcore_rlhf.storage import regular
from mcore_rlhf.storage.paths import storage_error
from mcore_rlhf.storage.staging import new_transaction

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1
_FAILED = "failed-"
_REMOVAL_S = 5.0
"""How long removing a step's files may take."""


class Stopped(CheckpointError):
    """Another rank failed first; its own error says why."""


@dataclass(frozen=True, slots=True)
class Mailbox:
    """Named messages in a folder. Each is written once, as a whole.

    Args:
        folder: Where; all ranks see it.
        timeout: Seconds to wait for a message.
        gone: Whether the whole transaction has ended, so that waiting is in vain.
    """

    folder: Path
    timeout: float
    gone: Callable[[], bool] = field(default=lambda: False)

    def post(self, name: str, data: bytes) -> None:
        """Write a message.

        Raises:
            StorageError: The file system refused.
        """
        path, aside = self.folder / name, self.folder / f".{name}.{os.getpid()}-{new_transaction()}"
        try:
            regular.write_new(aside, data)
            os.rename(aside, path)
        except OSError as error:
            raise storage_error(error, path, "write") from error

    def post_json(self, name: str, content: object) -> None:
        """Write a message of plain values."""
        self.post(name, json.dumps(content).encode())

    def fail(self, who: str, error: BaseException) -> None:
        """Tell everybody that there will be no commit; never raises."""
        try:
            self.post(_FAILED + who, f"{type(error).__name__}: {error}".encode())
        except CheckpointError:
            with suppress(OSError):  # a full disk mostly has room for an empty file; else the others time out
                (self.folder / f"{_FAILED}{who}").touch()

    def take(self, name: str, sender: str) -> bytes:
        """Wait for a message.

        Args:
            name: Its name.
            sender: Who is to write it, for the error.

        Raises:
            Stopped: A rank failed.
            Incomplete: It did not come in time.
        """
        end, pause = time.monotonic() + self.timeout, _FIRST_PAUSE
        while True:
            try:
                return regular.read_bytes(self.folder / name)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise StorageError(f"{self.folder / name}: cannot be read: {error}") from error
            self.check()
            if time.monotonic() > end:
                raise Incomplete(
                    f"{sender} did not deliver its part ({name}) within {self.timeout:g} s\n"
                    "It may hang or have died: look at its log. The step was not committed; older ones are untouched."
                )
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def take_json(self, name: str, sender: str) -> dict[str, object]:
        """Wait for a message of plain values."""
        content: dict[str, object] = json.loads(self.take(name, sender))
        return content

    def check(self) -> None:
        """Stop waiting when somebody has failed.

        Raises:
            Stopped: Somebody has, or the transaction has ended.
        """
        failed = self._failed()
        if failed is not None:
            who, text = failed.name.removeprefix(_FAILED), _read(failed) or "its log says why"
            raise Stopped(f"{who} could not save: {text}")
        if self.gone():
            raise Stopped("the save was given up by the coordinating rank; its log says why")

    def _failed(self) -> Path | None:
        try:
            names = sorted(os.listdir(self.folder))
        except OSError:  # it is being removed
            return None
        return next((self.folder / name for name in names if name.startswith(_FAILED)), None)


def why_it_vanished(mailbox: Mailbox, error: BaseException) -> Stopped | None:
    """What a rank met whose files vanished while it wrote them: mostly that rank 0 is removing a step that was given up.

    Args:
        mailbox: The step's.
        error: What the rank met.
    """
    cause = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(cause, OSError) or cause.errno not in (errno.ENOENT, errno.ESTALE):
        return None
    end = time.monotonic() + _REMOVAL_S
    while time.monotonic() < end:
        try:
            mailbox.check()
        except Stopped as stopped:
            return stopped
        time.sleep(_LONGEST_PAUSE)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        return f"({error})"
