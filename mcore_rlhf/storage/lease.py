"""Who has a place in an object store to itself, where there are no locks: a record, which its holder puts anew every few seconds.

Who wants the place watches the record for a whole period by its own clock. One that changes has a holder that lives. One that stays as it
is for so long has none, and is replaced, if it still is what was watched; clocks of hosts are not compared. Every put has a condition, so
that of two who take a place at once one has it.

A holder counts itself as one for half a period from before it put the record last. After that it puts it once more before it does
anything, or hears who has the place now: so nobody who was stopped, or cut off, goes on beside the one that came after it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import CheckpointError, StorageError
from .manifest import utc_time
from .objects import ObjectStore, Tag, open_url
from .records import Natural, parsed, text_of
from .settings import stores_with
from .store import StorePath
from .threads import begin
from .transactions import new_transaction

PERIOD_S = 60.0
"""For how long a record must stay as it is before its holder counts as gone."""
_BEATS = 6
"""How often the record is put in a period."""
_SURE = 0.5
_PATIENCE_S = 20.0
_ENDS_S = 5.0


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """Who has a place.

    Args:
        owner: A name that nobody else has.
        host: Its machine.
        pid: Its process there.
        since: When it took the place, by its own clock: for people.
        beat: How often it has put the record.
        gone: Whether it has given the place up.
    """

    owner: str
    host: str
    pid: Natural
    since: str
    beat: Natural = 0
    gone: bool = False

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class _Record(NamedTuple):
    """A record as it is now; None for a holder that did not say who it is."""

    tag: Tag
    holder: LeaseHolder | None

    def __str__(self) -> str:
        return str(self.holder or "a process that did not say who it is")

    @property
    def is_free(self) -> bool:
        return self.holder is not None and self.holder.gone


class Lease:
    """A place that one process has at a time. For several threads.

    Args:
        place: What is had, for messages.
        record: Where the record lies.
        say: Hears that somebody else's record is watched before it is taken over.

    Attributes:
        lost: Why this process has it no more; empty as long as nobody else is known to have it.
    """

    def __init__(self, place: StorePath, record: StorePath, say: Callable[[str], None]) -> None:
        self._place, self._say, self._period = place, say, PERIOD_S
        self._store, self._key = _store_of_its_own(record), str(record.path)
        self._me = LeaseHolder(new_transaction(), socket.gethostname(), os.getpid(), utc_time())
        self._tag: Tag | None = None
        self._sure_until = 0.0
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self.lost = ""

    def hold(self) -> None:
        """Take it, or see that it is had still.

        Raises:
            StorageError: Another process has it, or the store does not say.
        """
        if self._thread is None:
            self._take()
        self.check()
        if time.monotonic() >= self._sure_until:
            self._renew()

    def check(self) -> None:
        """Raise what :meth:`hold` does where it is known already that another process has it."""
        if self.lost:
            raise StorageError(self.lost)

    def close(self) -> None:
        """Let others have it at once."""
        self._closing.set()
        if self._thread is None:
            return
        self._thread.join(_ENDS_S)
        if not self.lost:
            self._give_up()

    def _give_up(self) -> None:
        self._store.requests.forgive(once=True)
        with suppress(CheckpointError, OSError):  # who comes next waits for a period then
            self._put(self._tag, gone=True)

    def _take(self) -> None:
        if not self._put(self._free()):
            found = self._read()
            if found is None:
                raise StorageError(f"{self._store}{self._key}: cannot be put\nIs there such a bucket?")
            raise StorageError(self._refusal(found))
        try:
            self._thread = begin("lease", self._beat)
        except StorageError:
            self._give_up()
            raise

    def _free(self) -> Tag | None:
        """What may be replaced: nothing, a record that was given up, or one that stays as it is for a period.

        Raises:
            StorageError: It changes: its holder lives.
        """
        first = found = self._read()
        if first is not None and not first.is_free:
            self._say(
                f"{self._place}: {first} has written here; unless its record changes within {self._period:g} s, it is gone"
            )
        end = time.monotonic() + self._period
        while found is not None and not found.is_free and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, self._period / _BEATS / 2))
            found = self._read()
            if found is not None and first is not None and not found.is_free and found.tag != first.tag:
                raise StorageError(self._refusal(found))
        return found.tag if found is not None else None

    def _beat(self) -> None:
        while not (self.lost or self._closing.wait(self._period / _BEATS)):
            with suppress(CheckpointError, OSError):  # it is tried again; who holds it looks before it does anything
                self._renew()

    def _renew(self) -> None:
        """Put the record anew.

        Raises:
            StorageError: Another process has the place, or the store does not say.
        """
        with self._lock:
            self._store.requests.forgive()
            for _ in range(2):
                if self._closing.is_set() or self._put(self._tag):
                    return
                found = self._read()
                if found is not None and (found.holder is None or found.holder.owner != self._me.owner):
                    self.lost = self._refusal(found, f"\nOf this one, {self._me}, nothing was heard for long enough.")
                    break
                self._tag = found.tag if found is not None else None  # a put whose answer was lost; or it was removed
        self.check()
        raise StorageError(
            f"{self._store}{self._key}: the store is busy with another writer\nLook at who writes there."
        )

    def _put(self, tag: Tag | None, *, gone: bool = False) -> bool:
        began = time.monotonic()
        self._me = replace(self._me, beat=self._me.beat + 1, gone=gone)  # no two puts say the same
        put = self._store.put_if(self._key, text_of(self._me, sparse=True), tag)
        if put is not None:
            self._tag, self._sure_until = put, began + _SURE * self._period
        return put is not None

    def _read(self) -> _Record | None:
        found = self._store.read_whole(self._key)
        if found is None:
            return None
        holder = None
        with suppress(CheckpointError):
            holder = parsed(LeaseHolder, found[0], f"{self._store}{self._key}", sparse=True)
        return _Record(found[1], holder)

    def _refusal(self, found: _Record, more: str = "") -> str:
        return (
            f"{self._place}: another process writes here: {found}{more}\n"
            f"End that one, or give this one another target. One that was killed is taken over from once {self._store}{self._key} "
            f"has not changed for {self._period:g} s."
        )


def _store_of_its_own(path: StorePath) -> ObjectStore:
    """The store, asked for no longer than a record may be late, whatever is waited for elsewhere."""
    from .upload import object_store

    settings = object_store(path).settings
    options = {name: value for name, value in settings.options.items() if name != "timeout"}
    with stores_with(replace(settings, options=options, patience=_PATIENCE_S)):
        return object_store(open_url(str(path)))
