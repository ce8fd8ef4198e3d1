"""The files of a rollout journal: ``<root>/journal/journal.json``, which says of which run it is, and every producer's segments."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...errors import (
    CheckpointError,
    Corrupt,
    Incomplete,
    LayoutMismatch,
    NotACheckpoint,
    Unreadable,
    Unsupported,
    UsageError,
    shown,
)
from ...installation import to_upgrade
from ...storage.appending import SUFFIX
from ...storage.beneath import Beneath, make_folder, open_there_to_lock, remove_beneath, write_new
from ...storage.framed import Frame, FrameReader
from ...storage.paths import ReadablePath, cannot_open, storage_error
from ...storage.publish import sync_folder
from ...storage.reading import parse_json, read_bytes
from ...storage.records import record_of, shorten, text_of
from ..run import steps
from .rollouts import StoredPlace, read_place

FOLDER, MARK = "journal", "journal.json"
FORMAT, VERSION = "mcore_rlhf_rollouts", 1
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


@dataclass(frozen=True, slots=True)
class JournalMark:
    """Of which run a journal, or a segment of it, is.

    Args:
        format: What it is.
        version: Of the format.
        run: The run's id.
        fingerprint: What rollouts depend on, by names of the user's choice: the tokenizer's hash, the dataset's.
        producer: Who wrote a segment.
        replaces: Journals beside which steps of the root had been saved when this one was begun: it is their successor.
    """

    format: str
    version: int
    run: str
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    producer: str = ""
    replaces: Sequence[str] = ()

    def to_bytes(self) -> bytes:
        """As JSON."""
        return text_of(self)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> JournalMark:
        """From JSON.

        Raises:
            Unsupported: A newer release wrote it.
            Corrupt: It is something else.
        """
        try:
            content = parse_json(data)
        except ValueError as error:
            raise Corrupt(
                f"{where}: is no JSON: {error}\nMove it away: its rollouts are made again; of {MARK}, the folder it lies in."
            ) from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise Corrupt(f"{where}: is not of a rollout journal\nMove it away: it does not belong there.")
        if content.get("version") != VERSION:
            raise Unsupported(
                f"{where}: version {shown(content.get('version'))} of the rollout journal; this release reads {VERSION}\n"
                f"Upgrade ({to_upgrade()}), or move the file away: its rollouts are made again."
            )
        return record_of(cls, content, where)

    def require_same(self, other: JournalMark, where: str) -> None:
        """See that a segment, or a producer, is of this journal's run.

        Raises:
            LayoutMismatch: It is another's; all differences are named.
        """
        found = [] if self.run == other.run else [f"run: expected {shown(self.run)}, found {shown(other.run)}"]
        for name in sorted(self.fingerprint.keys() & other.fingerprint.keys()):
            if self.fingerprint[name] != other.fingerprint[name]:
                expected, got = shown(self.fingerprint[name]), shown(other.fingerprint[name])
                found.append(f"{shown(name)}: expected {expected}, found {got}")
        if found:
            raise LayoutMismatch(
                f"{where}: rollouts of another run, or made otherwise: {'; '.join(found)}\n"
                "Move it away, or give this run a root of its own; to begin anew, remove the journal folder of the root."
            )

    def stranger_in(self, root: ReadablePath) -> LayoutMismatch | None:
        """What is wrong where the newest step of a root was saved beside another journal: somebody copied this one's folder here.

        Data and seed may be the same, so that each rollout would fit. A root without steps says nothing: its journal was begun here, or
        somebody knows better; nor does a step of a mirror, since the root that it came from is gone, and its journal with it.
        """
        with suppress(CheckpointError):
            newest = steps.newest(root)
            beside = "" if newest is None else journal_beside(newest.path)
            if newest is not None and beside and beside != self.run and beside not in self.replaces:
                return LayoutMismatch(
                    f"{root / FOLDER}: rollouts of another run: step {newest.step} was saved beside the journal {shown(beside)}, and "
                    f"this is {shown(self.run)}\nPut that one back, or remove the folder: what it holds is sampled again."
                )
        return None


def journal_beside(step: ReadablePath) -> str:
    """Which journal lay beside a step when it was saved; empty where there was none.

    Raises:
        CheckpointError: Its manifest cannot be read.
    """
    found = steps.read_manifest(step).report.get(FOLDER)
    return found if isinstance(found, str) else ""


def run_of(root: Path) -> str:
    """The id of a root's journal; empty where there is none, or none that can be read now."""
    with suppress(OSError, CheckpointError):
        return JournalMark.from_bytes(read_bytes(root / FOLDER / MARK), str(root / FOLDER)).run
    return ""


def open_folder(root: Path, fingerprint: Mapping[str, str]) -> tuple[Path, JournalMark]:
    """The folder of a root's journal, made where there is none, and of which run it is; driver and producers alike.

    Args:
        root: The run's root.
        fingerprint: See :class:`JournalMark`.

    Raises:
        UsageError: The fingerprint is none.
        StorageError: It cannot be read or written.
        CheckpointError: It is of another run, or another version.
    """
    if not all(isinstance(one, str) for item in fingerprint.items() for one in item):
        raise UsageError(f"fingerprint: expected names and texts, found {shorten(dict(fingerprint))}")
    folder = root / FOLDER
    path = folder / MARK
    mine = JournalMark(FORMAT, VERSION, os.urandom(16).hex(), dict(fingerprint))
    try:
        make_folder(folder)
        if folder.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
        with suppress(FileExistsError):
            _make_mark(path, mine, root)
        found = JournalMark.from_bytes(read_bytes(path), str(path))
    except OSError as error:
        raise storage_error(error, path, "open", "the rollout journal") from error
    found.require_same(JournalMark(FORMAT, VERSION, found.run, dict(fingerprint)), str(path))
    return folder, found


def has_journal(root: ReadablePath) -> bool:
    """Whether a root has a rollout journal."""
    folder = root / FOLDER
    return isinstance(folder, Path) and folder.is_dir() and not folder.is_symlink()


def read_folder(root: ReadablePath) -> JournalFolder:
    """The journal of a root, to look at; nothing is made.

    Raises:
        NotACheckpoint: There is none.
        CheckpointError: It cannot be read.
    """
    folder = root / FOLDER
    if not (isinstance(folder, Path) and has_journal(root)):
        raise NotACheckpoint(
            f"{folder}: there is no rollout journal\nGive the root of a run whose producers write one."
        )
    try:
        data = read_bytes(folder / MARK)
    except FileNotFoundError:
        raise Incomplete(
            f"{folder / MARK}: is not there: nothing says of which run the journal is\n"
            "Put it back: the next start makes a new one, to which what lies there is another run's, and is sampled again."
        ) from None
    except OSError as error:
        raise cannot_open(error, folder / MARK) from error
    return JournalFolder(folder, JournalMark.from_bytes(data, str(folder / MARK)))


def _make_mark(path: Path, mark: JournalMark, root: Path) -> None:
    """Written aside, then given its name: of several that begin at once, one wins, and nobody sees half of it."""
    if path.exists():
        return
    beside = {journal_beside(one.path) for one in steps.committed(root, quarantined=True)}
    mark = replace(mark, replaces=sorted(beside - {""}))
    aside = path.with_name(f".{path.name}.tmp-{mark.run}")
    try:
        write_new(aside, mark.to_bytes(), fsync=True)
        with Beneath(path.parent) as folder:
            folder.link(aside, path.name)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        write_new(path, mark.to_bytes(), fsync=True)
    finally:
        remove_beneath(path.parent, aside.name)
    sync_folder(path.parent)
    sync_folder(path.parent.parent)


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """Where a finished rollout lies.

    Args:
        place: Which one it is.
        path, number, offset, nbytes: The segment, and the frame in it.
    """

    place: StoredPlace
    path: Path
    number: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class JournalSegment:
    """One file of one producer, as far as it was read.

    Args:
        path: It.
        reader: Reads its frames.
        mark: What it says of itself; None where it broke off before.
        held: The rollouts in it.
        strange: Frames that hold no rollout, or of which nobody knows whose it is.
        problem: Why it is not read; empty where it is.
    """

    path: Path
    reader: FrameReader
    mark: JournalMark | None = None
    held: list[StoredPlace] = field(default_factory=list)
    strange: int = 0
    problem: CheckpointError | None = None

    def read(self, expected: JournalMark) -> Iterator[StoredRollout]:
        """The rollouts that were not read yet; none of a segment that is another run's, or cannot be read, which is noted."""
        if self.problem is not None and not isinstance(self.problem, Unreadable):
            return
        self.problem = None  # a disk that did not answer may do so now
        try:
            for frame in self.reader.read():
                if self.mark is None and frame.number:
                    self.strange += 1  # what says of which run it is has rotted: all of it is made again
                elif self.mark is None:
                    self.mark = JournalMark.from_bytes(bytes(frame.payload), str(self.path))
                    expected.require_same(self.mark, str(self.path))
                elif (found := self._rollout(frame)) is not None:
                    self.held.append(found.place)
                    yield found
        except NotACheckpoint:  # it was removed meanwhile, as nobody needs it any more
            return
        except CheckpointError as error:
            self.problem = error

    def _rollout(self, frame: Frame) -> StoredRollout | None:
        try:
            place = read_place(frame.payload, f"{self.path}: record {frame.number}")
        except Corrupt:
            self.strange += 1
            return None
        return StoredRollout(place, self.path, frame.number, frame.offset, len(frame.payload))

    @property
    def producer(self) -> str:
        """Who wrote it."""
        return self.mark.producer if self.mark is not None else ""


def segment_files(folder: Path) -> Iterator[tuple[Path, bool]]:
    """The segments of a journal, and whether each is a regular file; links are none.

    Raises:
        StorageError: The folder cannot be listed.
    """
    try:
        with os.scandir(folder) as entries:
            found = sorted((entry.name, entry.is_file(follow_symlinks=False)) for entry in entries)
    except FileNotFoundError:
        return iter(())
    except OSError as error:
        raise storage_error(error, folder, "list") from error
    return ((folder / name, regular) for name, regular in found if name.endswith(SUFFIX))


@dataclass(slots=True)
class JournalFolder:
    """All segments of a journal, as far as they were read.

    Args:
        folder: It.
        mark: Of which run it is.
        segments: By file name.
    """

    folder: Path
    mark: JournalMark
    segments: dict[str, JournalSegment] = field(default_factory=dict)

    def read(self) -> Iterator[StoredRollout]:
        """The rollouts that were added since the last time.

        Raises:
            StorageError: The folder cannot be listed.
        """
        there = dict(segment_files(self.folder))
        for name in self.segments.keys() - {path.name for path in there}:
            del self.segments[name]
        for path, regular in there.items():
            segment = self.segments.setdefault(path.name, JournalSegment(path, FrameReader(path)))
            if regular:
                yield from segment.read(self.mark)
            else:
                segment.problem = Corrupt(f"{path}: is no regular file, and no link is followed here\nMove it away.")

    def remove(self, segments: Iterable[JournalSegment]) -> int:
        """Remove segments that nobody needs, and nobody writes; how many have gone.

        Raises:
            StorageError: One cannot be removed.
        """
        gone = 0
        for segment in segments:
            with _not_written(segment) as idle:
                if not idle:
                    continue
                try:
                    gone += remove_beneath(self.folder, segment.path.name)
                except OSError as error:
                    raise storage_error(error, segment.path, "remove") from error
                self.segments.pop(segment.path.name, None)
        return gone


@contextmanager
def _not_written(segment: JournalSegment) -> Iterator[bool]:
    """Whether nobody adds to a segment, for as long as this lasts: it was closed, or whoever held its lock is dead.

    Where the file system has no locks, one that was not closed stays.
    """
    if segment.reader.closed:
        yield True
        return
    try:
        fd = open_there_to_lock(segment.path)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield os.fstat(fd).st_size == segment.reader.at + segment.reader.torn
    except OSError:
        yield False
    finally:
        os.close(fd)
