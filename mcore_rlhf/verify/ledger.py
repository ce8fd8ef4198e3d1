"""A ledger of everything that was read: at its end, every record of the source has been held against its checksum."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from mcore_rlhf.core.catalog import Record
from mcore_rlhf.core.execute import WINDOW_BYTES, SourceBytes
from mcore_rlhf.errors import Corrupt, Problems
from mcore_rlhf.families.source import StoredFile
from mcore_rlhf.storage.checksum import combine, crc32

Span = tuple[int, int, int]
"""Start and stop in bytes from a record's start, and the CRC-32 of what lies between."""


@dataclass(slots=True)
class _Seen:
    """The spans of one record that were read, disjoint and in order."""

    spans: list[Span] = field(default_factory=list)

    def add(self, start: int, stop: int, crc: int) -> None:
        """Note a span, joined to the one before it; what overlaps a known span is left to be read again at the end."""
        at = bisect_right(self.spans, (start, stop, 1 << 32))
        if at and self.spans[at - 1][1] > start:
            return
        if at < len(self.spans) and self.spans[at][0] < stop:
            return
        if at and self.spans[at - 1][1] == start:
            before = self.spans[at - 1]
            self.spans[at - 1] = (before[0], stop, combine(before[2], crc, stop - start))
        else:
            self.spans.insert(at, (start, stop, crc))

    def covers(self, start: int, stop: int) -> bool:
        """Whether one known span holds the whole range."""
        at = bisect_right(self.spans, (start, 1 << 62, 0))
        return at > 0 and self.spans[at - 1][1] >= stop


def read_checksums(files: Iterable[StoredFile]) -> None:
    """Read the checksums of files where their format puts that off, so as to hear of damage before the work begins.

    Raises:
        CheckpointError: Files are damaged.
    """
    for file in files:
        len(file.records)


@dataclass(slots=True)
class Ledger:
    """Collects checksums of what passes by; is the executor's ``Checksums``.

    Args:
        files: The files of the source, with the checksums that they store.
    """

    files: Iterable[StoredFile]
    _seen: dict[tuple[str, str], _Seen] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def crc32(self, data: memoryview) -> int:
        """Checksum of a window."""
        return crc32(data)

    def combine(self, first: int, second: int, second_nbytes: int) -> int:
        """Checksum of two adjacent pieces."""
        return combine(first, second, second_nbytes)

    def saw(self, record: Record, byte_offset: int, nbytes: int, crc32: int) -> None:
        """Note what a range of a source record had for a checksum when it was read."""
        with self._lock:
            seen = self._seen.setdefault((record.file, record.key), _Seen())
            seen.add(byte_offset, byte_offset + nbytes, crc32)

    def wants(self, record: Record, byte_offset: int, nbytes: int) -> bool:
        """Whether a range of a record has not been seen yet."""
        with self._lock:
            seen = self._seen.get((record.file, record.key))
            return seen is None or not seen.covers(byte_offset, byte_offset + nbytes)

    def tasks(
        self, source: SourceBytes, problems: Problems, progress: Callable[[int], None]
    ) -> Iterator[Callable[[], None]]:
        """Tasks that read what nobody has read yet, and hold every record against its stored checksum.

        Args:
            source: Where to read.
            problems: Told of every record that is damaged. Tasks may run in several threads.
            progress: Called with the number of bytes just read.
        """
        for file in self.files:
            for key, offset, nbytes, expected in file.records:
                yield lambda f=file.path, k=key, o=offset, n=nbytes, e=expected: self._check(  # type: ignore[misc]
                    source, problems, progress, f, k, o, n, e
                )
            if file.whole is not None:
                yield lambda file=file: self._check_whole(source, problems, progress, file)  # type: ignore[misc]

    def _check(
        self,
        source: SourceBytes,
        problems: Problems,
        progress: Callable[[int], None],
        file: str,
        key: str,
        offset: int,
        nbytes: int,
        expected: int,
    ) -> None:
        crc, position = 0, 0
        for start, stop, seen in [*self._seen.get((file, key), _Seen()).spans, (nbytes, nbytes, 0)]:
            crc = _read_on(crc, source, progress, file, offset + position, offset + start)
            crc = combine(crc, seen, stop - start)
            position = stop
        if crc != expected:
            problems.add(
                Corrupt,
                f"{file}: {key} ({nbytes} bytes) has CRC-32 {crc:08x}, but the file says {expected:08x}: its bytes are damaged",
                "Copy the file again from where it was written.",
            )

    def _check_whole(
        self, source: SourceBytes, problems: Problems, progress: Callable[[int], None], file: StoredFile
    ) -> None:
        """Hold a file against the checksum of all its bytes: only what lies between records is read, which have their own."""
        crc, position = 0, 0
        for _, offset, nbytes, expected in sorted(file.records, key=lambda record: record[1]):
            if offset >= position:
                crc = _read_on(crc, source, progress, file.path, position, offset)
                crc, position = combine(crc, expected, nbytes), offset + nbytes
        crc = _read_on(crc, source, progress, file.path, position, file.nbytes)
        if crc != file.whole:
            problems.add(
                Corrupt,
                f"{file.path}: is damaged: CRC-32 {crc:08x}, the manifest says {file.whole:08x}",
                "Copy the file again from where it was written.",
            )


def _read_on(crc: int, source: SourceBytes, progress: Callable[[int], None], file: str, start: int, stop: int) -> int:
    """The checksum of what was read so far and of a range of a file."""
    for at in range(start, stop, WINDOW_BYTES):
        size = min(WINDOW_BYTES, stop - at)
        data = source.view(file, at, size)
        crc = combine(crc, crc32(data), size)
        del data
        source.release(file, at, size)
        progress(size)
    return crc
