"""Writing one step behind the training loop: this rank's share of the files, then the commit.

A file that several ranks fill has one owner: it lays the file out, says where records begin, and puts the checksums of all
pieces together at the end. Nobody holds more than its own bytes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import torch

from mcore_rlhf.engines.base import LiveFile, Segment, Text
from mcore_rlhf.errors import CheckpointError, CoverageError, Incomplete, StorageError
from mcore_rlhf.storage.checksum import combine, crc32
from mcore_rlhf.storage.manifest import FileEntry, Manifest, provenance
from mcore_rlhf.storage.paths import pwrite_all, storage_error
from mcore_rlhf.storage.pt import Pt
from mcore_rlhf.storage.publish import replace_text
from mcore_rlhf.storage.record_file import RecordFile

from ..rlhf.carried import Carried
from .commit import FolderStore, RankPart, Stopped, Transaction, refuse_untaken, why_it_vanished
from .options import LOG, Reporter
from .rng import WORLDS, RngState, file_content
from .snapshot import DATA_FILE, Components, Snapshot, StepFile, as_bytes, dumps, loads
from .steps import RNG_FILE, TRACKER
from .world import World

WINDOW_BYTES = 1 << 20
"""One window is summed and written while it is in the cache."""


@dataclass(slots=True)
class SaveJob:
    """One save on one rank.

    Args:
        transaction: The step's; the coordinator has opened it.
        world: The ranks.
        parts: What the run consists of.
        snapshot: This rank's share.
        reporter: Hears of the outcome.
        report: For the manifest: metrics, stall.
        provenance: For the manifest, besides versions: git revision, hash of the configuration.
        then: What the coordinator does once the step is committed: delete old steps, export.
    """

    transaction: Transaction
    world: World
    parts: Components
    snapshot: Snapshot
    reporter: Reporter
    report: Mapping[str, object] = field(default_factory=dict)
    provenance: Mapping[str, object] = field(default_factory=dict)
    then: Callable[[], None] = lambda: None
    _started: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Write, deliver, and see the step committed.

        Raises:
            CheckpointError: It was not committed; older steps are untouched.
        """
        try:
            self._run()
        except BaseException as failure:
            error = self._cause(failure)
            if not isinstance(error, Stopped):
                self.transaction.store.fail(f"rank {self.world.rank_name}", error)
            self.transaction.abort(str(error) if self.world.is_one_of_several else "")
            self.reporter.say("failed", self.transaction.step, str(error).partition("\n")[0])
            if error is failure:
                raise
            raise error from failure

    def _cause(self, failure: BaseException) -> BaseException:
        """What other ranks are to hear: a file that vanished because another rank has given up is not the cause."""
        stopped = why_it_vanished(self.transaction.store, failure)
        if stopped is not None:
            return stopped
        return StorageError(f"{self.transaction.folder}: {failure}") if isinstance(failure, OSError) else failure

    def _run(self) -> None:
        if self.world.is_one_of_several and not self.world.commits:
            self.transaction.join()
        writer = RankWriter(self.transaction.folder, self.world.rank, self.transaction.store, self.transaction.fsync)
        self._post_values()
        writer.write(self.snapshot.files)
        for name, text in self.snapshot.texts.items():
            writer.save_text(name, text)
        if self.world.commits:
            self._commit(writer)
        else:
            self.transaction.deliver(self._part(writer))
            self.transaction.await_commit()

    def _post_values(self) -> None:
        self.transaction.store.set(f"values-{self.world.rank_name}.pt", dumps(self._own_values()))

    def _own_values(self) -> dict[str, object]:
        """Small things of every rank that end up in one file."""
        values = self.snapshot
        layout = self.world.layout(self.parts.layout)
        return {"rng": values.rng, "layout": layout, "data": values.data, "data_rank": values.data_rank}

    def _commit(self, writer: RankWriter) -> None:
        others = [name for name in self.world.rank_names if name != self.world.rank_name]
        parts = list(self.transaction.parts(others).values())
        self._write_gathered(writer)
        parts.append(self._part(writer))
        refuse_untaken(parts)
        files = {path: entry for part in parts for path, entry in part.files.items()}
        roles = sorted((dict(role) for part in parts for role in part.roles), key=lambda role: role["role"])
        missing = set(self.parts.roles) - {role["role"] for role in roles}
        if missing:
            raise Incomplete(f"{self.transaction.target}: no rank delivered the roles {', '.join(sorted(missing))}")
        seconds = time.monotonic() - self._started
        live = {role: figures for part in parts for role, figures in part.live.items()}
        report = {**self.report, "save_seconds": seconds, "live": live}
        more = {str(key): value for key, value in self.provenance.items()}
        manifest = Manifest(
            files,
            step=self.transaction.step,
            parts=tuple(roles),
            lossless=True,
            provenance=provenance(**more),
            report=report,
        )
        self.transaction.commit(manifest)
        self._after(sum(entry.nbytes for entry in files.values()))

    def _part(self, writer: RankWriter) -> RankPart:
        return RankPart(
            writer.written, tuple(self.snapshot.roles), self.snapshot.live, writer.contributed, writer.taken_from_others
        )

    def _write_gathered(self, writer: RankWriter) -> None:
        values = [self._values(name) for name in self.world.rank_names]
        states: list[RngState] = [value["rng"] for value in values]  # type: ignore[misc]
        layout = WORLDS.join(dict.fromkeys(str(value["layout"]) for value in values))
        writer.save_pt(RNG_FILE, file_content(states, layout))
        data = self.parts.data
        if isinstance(data, Carried) and data.scope == "rank":
            by_rank = {value["data_rank"]: value["data"] for value in values if value["data_rank"] is not None}
            writer.save_pt(DATA_FILE, data.combine([by_rank[rank] for rank in sorted(by_rank)]))  # type: ignore[type-var, misc]
        elif data is not None:
            writer.save_pt(DATA_FILE, self.snapshot.data)

    def _values(self, name: str) -> dict[str, object]:
        if name == self.world.rank_name:
            return self._own_values()
        values = loads(self.transaction.store.get(f"values-{name}.pt", f"rank {name}"))
        assert isinstance(values, dict)
        return values

    def _after(self, nbytes: int) -> None:
        """The step is safe. Nothing that fails from here on is a failed save."""
        seconds = time.monotonic() - self._started
        speed = nbytes / max(seconds, 1e-9) / 1e9
        self.reporter.say("commit", self.transaction.step, seconds=seconds, bytes=nbytes, gb_per_s=speed)
        try:
            replace_text(self.transaction.root / TRACKER, str(self.transaction.step))
            self.then()
        except Exception as error:
            unforeseen = None if isinstance(error, CheckpointError) else error  # with its traceback
            rank, step = self.world.rank, self.transaction.step
            LOG.warning("rank=%d step=%d: after the commit: %s", rank, step, error, exc_info=unforeseen)


@dataclass(frozen=True, slots=True)
class WrittenPiece:
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


@dataclass(slots=True)
class RankWriter:
    """Writes what one rank contributes to a step.

    Args:
        folder: The step's hidden folder.
        rank: This rank.
        store: Through which ranks talk.
        fsync: Whether to wait until files are on the disk.
        advance: Hears of bytes just written.
    """

    folder: Path
    rank: int
    store: FolderStore
    fsync: bool = True
    advance: Callable[[int], None] = lambda nbytes: None
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
            own = [(file, unfinished.enter_context(self._laid_out(file))) for file in files if self._owns(file)]
            pieces = {file.path: self._fill(file.live, writer) for file, writer in own}
            for file in files:
                if not self._owns(file):
                    self._contribute(file)
            for file, writer in own:
                self._finish(file, writer, pieces[file.path])
        return self.written

    def _owns(self, file: StepFile) -> bool:
        return file.live.writers[0] == self.rank

    def save_pt(self, path: str, content: object) -> None:
        """Write a ``.pt`` file of small values.

        Args:
            path: Relative to the step's folder.
            content: Nested containers of plain values and real tensors.
        """
        with Pt.of(content).create(self._target(path), path) as writer:
            self.written[path] = writer.finish({}, fsync=self.fsync)

    def save_text(self, path: str, text: Text) -> None:
        """Write a small file."""
        content = text() if callable(text) else text
        data, target = content.encode() if isinstance(content, str) else content, self.folder / path
        try:
            self._make_folders(target.parent)
            with target.open("xb") as file:
                file.write(data)
                file.flush()
                if self.fsync:
                    os.fsync(file.fileno())
        except OSError as error:
            raise storage_error(error, target, "write") from error
        self.written[path] = FileEntry(len(data), crc32(data))

    def _create(self, file: StepFile) -> RecordFile:
        assert file.live.container is not None  # of its first writer
        return file.live.container.create(self._target(file.path), file.live.path)

    def _target(self, path: str) -> Path:
        target = self.folder / path
        try:
            self._make_folders(target.parent)
        except OSError as error:
            raise storage_error(error, target.parent, "create") from error
        return target

    def _make_folders(self, folder: Path) -> None:
        """Below the step's own folder only, which is not made anew where the save was given up and it is gone."""
        below = folder.relative_to(self.folder)
        for path in [*reversed(below.parents), below]:
            if path != Path():
                (self.folder / path).mkdir(exist_ok=True)

    def _laid_out(self, file: StepFile) -> RecordFile:
        live = file.live
        writer = self._create(file)
        if len(live.writers) > 1:
            labels = list(live.labels) or writer.open_records
            offsets = {label: writer.offset(live.labels.get(label, label)) for label in labels}
            self.store.set_json(f"layout-{_short(file.path)}", offsets)
        return writer

    def _fill(self, file: LiveFile, writer: RecordFile) -> list[WrittenPiece]:
        def put(label: str, byte_offset: int, data: memoryview) -> None:
            writer.write(file.labels.get(label, label), byte_offset, data)

        return [self._put(segment, put) for segment in file.segments]

    def _contribute(self, file: StepFile) -> None:
        """Write this rank's pieces into a file that another rank has laid out."""
        offsets = self.store.get_json(f"layout-{_short(file.path)}", f"rank {file.live.writers[0]}")
        path = self.folder / file.path
        try:
            fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise storage_error(error, path, "open") from error
        try:

            def put(label: str, byte_offset: int, data: memoryview) -> None:
                pwrite_all(fd, data, int(offsets[label]) + byte_offset)  # type: ignore[call-overload]

            pieces = [self._put(segment, put) for segment in file.live.segments]
            if self.fsync:
                os.fsync(fd)
        except OSError as error:
            raise storage_error(error, path, "write") from error
        finally:
            os.close(fd)
        self.contributed[file.path] = sum(piece.nbytes for piece in pieces)
        written = [[piece.label, piece.byte_offset, piece.nbytes, piece.crc32] for piece in pieces]
        self.store.set_json(f"pieces-{_short(file.path)}-{self.rank}", {"pieces": written})

    def _put(self, segment: Segment, put: Callable[[str, int, memoryview], None]) -> WrittenPiece:
        total, at = 0, 0
        for window in _windows(segment.tensor):
            crc = crc32(window)
            put(segment.label, segment.byte_offset + at, window)
            total = combine(total, crc, len(window)) if at else crc
            at += len(window)
            self.advance(len(window))
        return WrittenPiece(segment.label, segment.byte_offset, at, total)

    def _finish(self, file: StepFile, writer: RecordFile, pieces: list[WrittenPiece]) -> None:
        for rank in file.live.writers[1:]:
            written = self.store.get_json(f"pieces-{_short(file.path)}-{rank}", f"rank {rank}")["pieces"]
            assert isinstance(written, list)
            theirs = [WrittenPiece(*piece) for piece in written]
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
        self.written[file.path] = writer.finish(crcs, fsync=self.fsync)


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


def _windows(tensor: torch.Tensor) -> Iterable[memoryview]:
    """The bytes of a tensor in pieces; those of a GPU come over one at a time."""
    flat = as_bytes(tensor)
    for start in range(0, flat.numel(), WINDOW_BYTES):
        yield flat[start : start + WINDOW_BYTES].cpu().numpy().data


def _short(path: str) -> str:
    """A name for a message about a file."""
    return sha256(path.encode()).hexdigest()[:16]
