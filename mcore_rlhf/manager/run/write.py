"""Writing one rank's share of a step's files.

A file that several ranks fill has one owner: it lays the file out, says where records begin, and puts the checksums of all
pieces together at the end. Nobody holds more than its own bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from mcore_rlhf.engines.base import Text
from mcore_rlhf.errors import CoverageError
from mcore_rlhf.storage.beneath import Beneath
from mcore_rlhf.storage.checksum import combine, crc32
from mcore_rlhf.storage.manifest import FileEntry
from mcore_rlhf.storage.paths import pwrite_all, storage_error
from mcore_rlhf.storage.pt import Pt
from mcore_rlhf.storage.publish import sync_file
from mcore_rlhf.storage.record_file import Container, Layout, Raw, RecordFile
from mcore_rlhf.storage.twins import Differs, Twin, put_in_place

from .commit import Messages
from .progress import SaveProgress
from .staging import StepFile
from .stream import Share, Staged, windows


class WrittenPiece(NamedTuple):
    """Bytes of a record that one rank has written.

    Args:
        label: The record.
        byte_offset: Where they begin, from the record's start.
        nbytes: How many.
        crc32: Their CRC-32.
    """

    label: str
    byte_offset: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Earlier:
    """A committed step, whose files are not written again where they would be the same.

    Args:
        folder: Its folder.
        files: Its manifest's.
    """

    folder: Path
    files: Mapping[str, FileEntry] = field(default_factory=dict)


@dataclass(slots=True)
class RankWriter:
    """Writes what one rank contributes to a step.

    Args:
        folder: The step's hidden folder.
        rank: This rank.
        messages: Through which ranks talk.
        fsync: Whether to wait until files are on the disk.
        progress: Hears of files that are begun, and of bytes just written.
        earlier: The step before; None to write whatever is there already as well.
        linked: Of the files that were not written, what each is another name of, relative to the step's folder.
    """

    folder: Path
    rank: int
    messages: Messages
    fsync: bool = True
    progress: SaveProgress = field(default_factory=SaveProgress)
    earlier: Earlier | None = None
    linked: dict[str, str] = field(default_factory=dict)
    written: dict[str, FileEntry] = field(default_factory=dict)
    contributed: dict[str, int] = field(default_factory=dict)
    taken_from_others: dict[str, int] = field(default_factory=dict)

    def write(self, files: Sequence[StepFile]) -> dict[str, FileEntry]:
        """Write the shares of all files.

        Args:
            files: Those that this rank contributes to.

        Returns:
            The files that this rank has completed.

        Raises:
            CheckpointError: A file cannot be written, or another rank failed; unfinished files are removed.
        """
        with ExitStack() as unfinished:
            own = [file for file in files if self._owns(file) and not self._is_linkable(file)]
            laid = [(file, unfinished.enter_context(self._laid_out(file))) for file in own]
            writers, pieces = {file.path: writer for file, writer in laid}, dict[str, list[WrittenPiece]]()
            for file in files:  # in the order in which a stream brings them
                if self._owns(file) and self._is_linkable(file):
                    self._write_or_link(file)
                elif self._owns(file):
                    pieces[file.path] = self._fill(file, writers[file.path])
            for file in files:
                if not self._owns(file):
                    self._contribute(file)
            for file, writer in laid:
                self.written[file.path] = self._finished(file, writer, pieces[file.path], self.fsync)
        return self.written

    def _owns(self, file: StepFile) -> bool:
        return file.live.writers[0] == self.rank

    def _is_linkable(self, file: StepFile) -> bool:
        """Whether it may be the same as one that is there: this rank alone knows it."""
        return self.earlier is not None and len(file.live.writers) == 1

    def _write_or_link(self, file: StepFile) -> None:
        """Give a file that is there already, byte for byte, a second name; write it where there is none."""
        self.progress.moved(file.path)
        container = file.live.timeless or file.live.container
        assert container is not None
        lay_out = partial(container.layout, file.live.path)  # one is good for one file
        if any(isinstance(share, Staged) and share.stream.wraps for share in file.shares):
            self._write_then_link(file, lay_out())
            return
        for folder, name, _ in self._alike(file, lay_out().nbytes):
            with suppress(Differs), Twin(folder, name, lay_out()) as twin:
                entry = self._finished(file, twin, self._fill(file, twin), self.fsync)
                twin.link(Beneath(self.folder), file.path)
                self._note_linked(file.path, folder, name, entry)
                return
        with self._begun(file.path, lay_out()) as writer:
            self.written[file.path] = self._finished(file, writer, self._fill(file, writer), self.fsync)

    def _write_then_link(self, file: StepFile, layout: Layout) -> None:
        """What can be read once only cannot be compared first: it is written, and dropped again, mostly before it comes to the disk."""
        with self._begun(file.path, layout) as writer:
            entry = self._finished(file, writer, self._fill(file, writer), fsync=False)
        for folder, name, there in self._alike(file, entry.nbytes):
            if there.crc32 == entry.crc32:
                with suppress(Differs):
                    mine, moved = Beneath(self.folder), self.progress.moved
                    put_in_place(mine, file.path, folder, name, fsync=self.fsync, moved=moved)
                    self._note_linked(file.path, folder, name, entry)
                    return
        try:
            if self.fsync:
                sync_file(self.folder / file.path)
        except OSError as error:
            raise storage_error(error, self.folder / file.path, "write") from error
        self.written[file.path] = entry

    def _note_linked(self, path: str, folder: Path, name: str, entry: FileEntry) -> None:
        self.written[path] = entry
        self.linked[path] = name if folder == self.folder else f"../{folder.name}/{name}"

    def _alike(self, file: StepFile, nbytes: int) -> Iterator[tuple[Path, str, FileEntry]]:
        """Files of the same length: the role's own of the step before, and what this rank has just written of another role."""
        assert self.earlier is not None
        own = [name for name in self.earlier.files if name.startswith(f"{file.folder}/")]
        for name in sorted(own, key=lambda name: name != file.path):
            entry = self.earlier.files[name]
            if entry.nbytes == nbytes and name.rpartition("/")[2] == file.path.rpartition("/")[2]:
                yield self.earlier.folder, name, entry
        for name, entry in self.written.items():
            if entry.nbytes == nbytes:
                yield self.folder, name, entry

    def save_pt(self, path: str, content: object) -> None:
        """Write a ``.pt`` file of small values.

        Args:
            path: Relative to the step's folder.
            content: Nested containers of plain values and real tensors.
        """
        self._save(path, Pt.of(content))

    def save_text(self, path: str, text: Text) -> None:
        """Write a small file."""
        content = text() if callable(text) else text
        self._save(path, Raw(head=content.encode() if isinstance(content, str) else content))

    def _save(self, path: str, content: Container) -> None:
        """Write a file of which everything is known."""
        self.progress.moved(path)
        with self._begun(path, content.layout(path)) as writer:
            self.written[path] = writer.finish({}, fsync=self.fsync)

    def _begun(self, path: str, layout: Layout) -> RecordFile:
        """A file below the step's own folder only, which is not made anew where the save was given up and it is gone."""
        try:
            folder = Beneath(self.folder)
        except OSError as error:
            raise storage_error(error, self.folder, "write into") from error
        return RecordFile(self.folder / path, layout, folder)

    def _laid_out(self, file: StepFile) -> RecordFile:
        self.progress.moved(file.path)
        live = file.live
        assert live.container is not None  # of its first writer
        writer = self._begun(file.path, live.container.layout(live.path))
        if len(live.writers) > 1:
            labels = list(live.labels) or writer.open_records
            offsets = {label: writer.offset(live.labels.get(label, label)) for label in labels}
            self.messages.notes.say(f"layout-{_short(file.path)}", offsets)
        return writer

    def _fill(self, file: StepFile, writer: RecordFile) -> list[WrittenPiece]:
        self.progress.moved(file.live.path)

        def put(label: str, byte_offset: int, data: memoryview) -> None:
            writer.write(file.live.labels.get(label, label), byte_offset, data)

        return [self._put(share, put) for share in file.shares]

    def _contribute(self, file: StepFile) -> None:
        """Write this rank's pieces into a file that another rank has laid out."""
        self.progress.moved(file.path)
        offsets = self.messages.hear(dict[str, int], f"layout-{_short(file.path)}", f"rank {file.live.writers[0]:05d}")
        path = self.folder / file.path
        try:
            with Beneath(self.folder) as folder:
                fd = folder.fill(file.path)
        except OSError as error:
            raise storage_error(error, path, "open") from error
        try:

            def put(label: str, byte_offset: int, data: memoryview) -> None:
                pwrite_all(fd, data, offsets[label] + byte_offset)

            pieces = [self._put(share, put) for share in file.shares]
            if self.fsync:
                os.fsync(fd)
        except OSError as error:
            raise storage_error(error, path, "write") from error
        finally:
            os.close(fd)
        self.contributed[file.path] = sum(piece.nbytes for piece in pieces)
        self.messages.notes.say(f"pieces-{_short(file.path)}-{self.rank}", pieces)

    def _put(self, share: Share, put: Callable[[str, int, memoryview], None]) -> WrittenPiece:
        total, at = 0, 0
        for window in windows(share):
            crc = crc32(window)
            put(share.label, share.byte_offset + at, window)
            total = combine(total, crc, len(window)) if at else crc
            at += len(window)
            self.progress.moved(nbytes=len(window))
        return WrittenPiece(share.label, share.byte_offset, at, total)

    def _finished(self, file: StepFile, writer: RecordFile, pieces: list[WrittenPiece], fsync: bool) -> FileEntry:
        self.progress.moved(file.path)
        for rank in file.live.writers[1:]:
            theirs = self.messages.hear(list[WrittenPiece], f"pieces-{_short(file.path)}-{rank}", f"rank {rank:05d}")
            pieces += theirs
            taken = self.taken_from_others.get(file.path, 0)
            self.taken_from_others[file.path] = taken + sum(piece.nbytes for piece in theirs)
        by_key: dict[str, list[WrittenPiece]] = {}
        for piece in pieces:
            by_key.setdefault(file.live.labels.get(piece.label, piece.label), []).append(piece)
        crcs = {
            key: _record_crc(f"{file.path}: {key}", by_key.get(key, []), writer.record_nbytes(key))
            for key in writer.open_records
        }
        return writer.finish(crcs, fsync=fsync)


def _record_crc(what: str, pieces: Sequence[WrittenPiece], nbytes: int) -> int:
    """CRC of a record, from those of its pieces; gaps are zeros."""
    total, at = 0, 0
    for piece in sorted(pieces, key=lambda piece: piece.byte_offset):
        if piece.byte_offset < at:
            raise CoverageError(f"{what}: two ranks write byte {piece.byte_offset}")
        total = _with_zeros(total, piece.byte_offset - at)
        total = combine(total, piece.crc32, piece.nbytes)
        at = piece.byte_offset + piece.nbytes
    if at > nbytes:
        raise CoverageError(f"{what}: {at} bytes were written into a record of {nbytes}")
    return _with_zeros(total, nbytes - at)


def _with_zeros(crc: int, nbytes: int) -> int:
    """CRC after some more bytes that nobody writes; doubling, since a record may have gigabytes of them."""
    run, length = crc32(b"\0"), 1
    while nbytes:
        if nbytes & 1:
            crc = combine(crc, run, length)
        run, length, nbytes = combine(run, run, length), length * 2, nbytes >> 1
    return crc


def _short(path: str) -> str:
    """A name for a message about a file."""
    return sha256(path.encode()).hexdigest()[:16]
