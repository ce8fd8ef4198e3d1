"""What has to be done for a target, as independent tasks: files to be written, and pairs of chunks to be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from mcore_rlhf.core.execute import SourceBytes
from mcore_rlhf.errors import Corrupt, Problems
from mcore_rlhf.storage.checksum import crc32
from mcore_rlhf.storage.destination import Destination
from mcore_rlhf.storage.manifest import FileEntry, Manifest
from mcore_rlhf.storage.paths import ReadablePath
from mcore_rlhf.storage.record_file import StoredFile
from mcore_rlhf.verify.audit import Pair

from .fingerprint import PlanFingerprint
from .spool import PlannedFile, SpoolLines, Task, planned_file

_BLOCK_NBYTES = 64 << 20
"""Pairs are compared, dealt out and noted as done in blocks of about so many bytes."""


class Reading(NamedTuple):
    """A range of a record of the source that is read only to be checked.

    Args:
        file, key: The record.
        offset: Where the record begins in the file, in bytes.
        start, stop: The range, from there.
    """

    file: str
    key: str
    offset: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.stop - self.start


_One = TypeVar("_One", Pair, Reading)


@dataclass(frozen=True, slots=True)
class Block(Generic[_One]):
    """A task that writes nothing.

    Args:
        name: The task's, in every process.
        nbytes: How many it reads.
        items: What it is about.
    """

    name: str
    nbytes: int
    items: Callable[[], Sequence[_One]]


def in_blocks(items: Iterable[_One], name: str) -> Iterator[Block[_One]]:
    """Pairs or readings in blocks, as tasks whose names begin alike."""
    block: list[_One] = []
    number = nbytes = 0
    for item in items:
        block.append(item)
        nbytes += item.nbytes
        if nbytes >= _BLOCK_NBYTES:
            yield Block(f"{name}{number}", nbytes, partial(list, block))
            block, nbytes, number = [], 0, number + 1
    if block:
        yield Block(f"{name}{number}", nbytes, partial(list, block))


@dataclass(frozen=True, slots=True)
class Work:
    """All that has to be done for one model.

    Args:
        name: What its tasks are known by beside those of other models.
        files: The files to be written.
        lines: Where their plans stand.
        compared: What must agree in the source, in blocks; problems that are seen on the way are noted.
        stored: The source's files, with their checksums.
        source: Opens the source's bytes.
        distrust: See :class:`~mcore_rlhf.families.source.Source`.
        nbytes: Of all records to be written.
        multiplies: Whether products of matrices are computed on the way.
        readings: What one of many processes has to read only to check it, in blocks.
    """

    name: str
    files: Sequence[Task]
    lines: SpoolLines
    compared: Callable[[Problems], Iterable[Block[Pair]]]
    stored: Callable[[], Sequence[StoredFile]]
    source: Callable[[], AbstractContextManager[SourceBytes]]
    distrust: str = ""
    nbytes: int = 0
    multiplies: bool = False
    readings: Sequence[Block[Reading]] = ()

    def planned(self, task: Task) -> PlannedFile:
        """One of its files, as it was planned; see :func:`.spool.planned_file`."""
        return planned_file(self.lines, task)

    def owns(self, task: str) -> bool:
        """Whether a block is one of this work."""
        return task.startswith((f"compared {self.name}:", f"read {self.name}:"))


Sums = Callable[[Mapping[str, str]], str]
"""The content of a file that lists SHA-256 sums, from these, by the names of the files beside it."""


class Known(NamedTuple):
    """A file whose content is known.

    Args:
        content: A text, bytes, or another file.
        entry: What it must be, where a manifest says that.
    """

    content: str | bytes | ReadablePath
    entry: FileEntry | None = None


@dataclass(slots=True)
class PlannedTarget:
    """A planned target, whole: of one model, or of several that are published together.

    Args:
        works: What has to be done for each model.
        known: Files whose content is known, by path.
        sums: Files that are written last, by path: each made of the SHA-256 of the others in its folder, by name.
        manifest: Of the target, without its files.
        fingerprint: What decides every byte; None where nothing is to be gone on with.
        space: Bytes that it will take.
    """

    works: Sequence[Work]
    manifest: Manifest
    known: Mapping[str, Known] = field(default_factory=dict)
    sums: Mapping[str, Sums] = field(default_factory=dict)
    fingerprint: PlanFingerprint | None = None
    space: int = 0

    def put_known(self, to: Destination, written: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
        """Write the files whose content is known, or follows from what was written.

        Args:
            to: Where.
            written: The other files, which are there, by path.

        Raises:
            Corrupt: One that is taken over is not what its manifest says, or one that was written is not what it was.
        """
        files: dict[str, FileEntry] = {}
        for name, (content, expected) in self.known.items():
            files[name] = to.put(name, content, expected)
        there = {**written, **files}
        for name, content_of in self.sums.items():
            folder, _, _ = name.rpartition("/")
            beside = [path for path in there if path.rpartition("/")[0] == folder]
            sums = {path.rpartition("/")[2]: _sum_of(path, there[path], to) for path in beside}
            files[name] = to.put(name, content_of(sums))
        return files


def _sum_of(path: str, entry: FileEntry, to: Destination) -> str:
    """SHA-256 of a file that was written, maybe by another process: nobody vouches for what was damaged since then.

    Raises:
        Corrupt: It is not what was written.
    """
    import hashlib  # only who lists sums asks

    found, crc = hashlib.sha256(), 0
    for piece in to.again(path):
        found.update(piece)
        crc = crc32(piece, crc)
    if crc != entry.crc32:
        raise Corrupt(
            f"{path}: is damaged: CRC-32 {crc:08x} as it is read again, {entry.crc32:08x} as it was written\n"
            "Write it again: with --no-resume, or the part that it is of once its folder is removed; and look at the disk."
        )
    return found.hexdigest()
