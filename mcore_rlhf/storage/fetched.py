"""What was fetched of far files, kept in one local file, so that no byte travels twice: read ahead, in pieces, by many threads.

The file has no name: it is gone with the process, however that ends. A range that is asked for is fetched exactly, ranges that lie
close together as one.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import threading
import weakref
from abc import abstractmethod
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from mcore_rlhf.core.execute import Range

from ..errors import Incomplete
from .paths import pwrite_all, storage_error
from .store import Store
from .threads import Pool

PIECE_NBYTES = 8 << 20
"""Bytes of one request at most: at 30 ms each, 16 connections carry 4 GB/s."""

END_NBYTES = 256 << 10
"""What is fetched at once of a file's end, where the directory of a zip lies, and around any other small read."""

_SMALL_NBYTES = 64 << 10
"""A read of more than this is one of tensors, and is fetched exactly."""

_WHOLE_NBYTES = 1 << 20
"""A file that is no longer is fetched as a whole."""

_GAP_NBYTES = 64 << 10
"""Ranges with less than this between them are fetched as one."""

_GRID_NBYTES = 1 << 20
"""Files begin in the local one at multiples of this, so that what is dropped of one is nothing of another."""

_PUNCH_HOLE = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, man 2 fallocate


_start = attrgetter("start")


@dataclass(slots=True)
class _Extent:
    """A range of a file that was fetched, or is being fetched; while somebody waits for it or reads it, it stays."""

    start: int
    stop: int
    arrived: Future[None]
    readers: int = 0


@dataclass(slots=True)
class _Kept:
    """What is there of one file: disjoint extents in order, and where it begins in the local file."""

    base: int
    extents: list[_Extent] = field(default_factory=list)

    def within(self, start: int, stop: int) -> list[_Extent]:
        """Those that have a byte of a range."""
        first = max(0, bisect_right(self.extents, start, key=_start) - 1)
        found = self.extents[first : bisect_left(self.extents, stop, lo=first, key=_start)]
        return found if not found or found[0].stop > start else found[1:]

    def forget(self, start: int) -> None:
        """Drop the extent that begins there."""
        del self.extents[bisect_left(self.extents, start, key=_start)]

    def missing(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """What of a range is in none."""
        for extent in self.within(start, stop):
            if extent.start > start:
                yield start, extent.start
            start = max(start, extent.stop)
        if start < stop:
            yield start, stop


class Fetched:
    """The bytes of far files, as far as anybody asked for them. For several threads.

    Args:
        fetch: Fetches bytes of a file: its name, start and stop.
        length: Says how long a file is.
        connections: Requests at a time.
        folder: Where the local file lies; None for the system's temporary one.
        limit: Bytes that are kept at most, by default half of what is free there; what was fetched first is dropped, and fetched
            anew where it is asked for again.
    """

    def __init__(
        self,
        fetch: Callable[[str, int, int], bytes],
        length: Callable[[str], int],
        connections: int,
        folder: Path | None = None,
        limit: int | None = None,
    ) -> None:
        self._fetch, self._length = fetch, length
        self._folder = folder or Path(tempfile.gettempdir())
        try:
            self._limit = shutil.disk_usage(self._folder).free // 2 if limit is None else limit
            self._fd, name = tempfile.mkstemp(prefix=".fetched-", dir=self._folder)
            os.unlink(name)
        except OSError as error:
            raise storage_error(error, self._folder, "keep what is fetched") from error
        self._pool = Pool(connections, "fetch")
        self._files: dict[str, _Kept] = {}
        self._order: OrderedDict[tuple[str, int], _Extent] = OrderedDict()
        self._nbytes = self._end = 0
        self._lock = threading.Lock()
        weakref.finalize(self, _let_go, self._fd, self._pool)

    def expect(self, ranges: Iterable[Range]) -> None:
        """Begin to fetch what will be asked for; ranges that lie close together travel as one."""
        wanted = list(_merged(ranges))
        lengths = {
            file: self._length(file) for file, _, _ in wanted
        }  # of a published folder its manifest says them, which is read here
        with self._lock:
            for file, start, stop in wanted:
                self._begin(file, lengths[file], start, stop)

    def holds(self, file: str, offset: int, nbytes: int) -> bool:
        """Whether a range is there, or on its way."""
        with self._lock:
            kept = self._files.get(file)
            return kept is not None and not any(kept.missing(offset, offset + nbytes))

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Bytes of a file, which end where the file does.

        Raises:
            CheckpointError: They cannot be fetched, or not be kept.
        """
        length = self._length(file)
        stop = min(offset + nbytes, length)
        if stop <= offset:
            return b""
        with self._lock:
            self._begin(file, length, offset, stop)
            kept = self._files[file]
            needed = kept.within(offset, stop)
            for extent in needed:
                extent.readers += 1
        try:
            for extent in needed:
                extent.arrived.result()
            return os.pread(self._fd, stop - offset, kept.base + offset)
        finally:
            with self._lock:
                for extent in needed:
                    extent.readers -= 1
                self._drop_oldest()

    def _begin(self, file: str, length: int, start: int, stop: int) -> None:
        kept = self._files.get(file)
        if kept is None:
            kept = self._files[file] = _Kept(self._end)
            self._end += -(-length // _GRID_NBYTES) * _GRID_NBYTES
        for first, last in list(kept.missing(start, stop)):
            for at in range(first, last, PIECE_NBYTES):
                end = min(at + PIECE_NBYTES, last)
                extent = _Extent(at, end, self._pool.submit(self._bring, file, kept.base, at, end))
                kept.extents.insert(bisect_right(kept.extents, at, key=_start), extent)
                self._order[file, at] = extent
                self._nbytes += end - at

    def _bring(self, file: str, base: int, start: int, stop: int) -> None:
        try:
            data = self._fetch(file, start, stop)
            pwrite_all(self._fd, memoryview(data), base + start)
        except BaseException as error:
            with self._lock:
                self._forget(file, start)
            if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
                raise storage_error(error, self._folder, "keep what is fetched") from error
            raise
        with self._lock:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        while self._nbytes > self._limit:
            oldest = next((key for key, one in self._order.items() if one.arrived.done() and not one.readers), None)
            if oldest is None:
                return
            file, extent = oldest[0], self._order[oldest]
            self._forget(*oldest)
            _punch(self._fd, self._files[file].base + extent.start, extent.stop - extent.start)

    def _forget(self, file: str, start: int) -> None:
        extent = self._order.pop((file, start))
        self._files[file].forget(start)
        self._nbytes -= extent.stop - extent.start


class FetchingStore(Store):
    """A store to which every request is a journey: what it fetched is kept, and around a small read more is fetched.

    Args:
        connections: Requests at a time.
    """

    def __init__(self, connections: int = 16) -> None:
        self._connections = connections
        self._kept: Fetched | None = None
        self._making = threading.Lock()

    @abstractmethod
    def fetch(self, file: str, start: int, stop: int) -> bytes:
        """Bytes of a file, by one request.

        Raises:
            StorageError: The store refuses, cannot be reached, or the file has changed since its length was told.
        """

    def pread(self, file: str, nbytes: int, offset: int) -> bytes:
        """See :meth:`Store.pread`.

        Raises:
            StorageError: See :meth:`fetch`.
        """
        length, kept = self.length(file), self._fetched()
        nbytes = max(0, min(nbytes, length - offset))
        if nbytes <= _SMALL_NBYTES and not kept.holds(file, offset, nbytes):
            whole = length <= _WHOLE_NBYTES
            start = 0 if whole else max(0, min(offset, length - END_NBYTES))
            kept.expect([(file, start, length if whole else END_NBYTES)])
        return kept.read(file, offset, nbytes)

    def expect(self, ranges: Iterable[Range]) -> None:
        """See :meth:`Store.expect`."""
        self._fetched().expect(ranges)

    def drop(self) -> None:
        """Keep nothing of what was fetched."""
        with self._making:
            self._kept = None

    def _fetched(self) -> Fetched:
        with self._making:
            if self._kept is None:
                self._kept = Fetched(self._whole, self.length, self._connections)
            return self._kept

    def _whole(self, file: str, start: int, stop: int) -> bytes:
        data = self.fetch(file, start, stop)
        if len(data) != stop - start:
            raise Incomplete(f"{self}{file}: {stop - start} bytes at {start} were asked for, and {len(data)} came.")
        return data


def _let_go(fd: int, pool: Pool) -> None:
    pool.shutdown(wait=False)  # nothing is under way: that would hold the object; and this may be one of its threads
    os.close(fd)


def _merged(ranges: Iterable[Range]) -> Iterator[tuple[str, int, int]]:
    """File, start and stop of ranges, those that lie close together as one."""
    file, start, stop = "", 0, 0
    for one, at, nbytes in sorted(ranges):
        if one == file and at <= stop + _GAP_NBYTES:
            stop = max(stop, at + nbytes)
            continue
        if stop > start:
            yield file, start, stop
        file, start, stop = one, at, at + nbytes
    if stop > start:
        yield file, start, stop


def _punch(fd: int, offset: int, nbytes: int) -> None:
    """Give a range of a file back to the disk; where the file system cannot, it stays."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate(fd, _PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(nbytes))
