"""Where what is written goes: file by file, by writers of their layouts, whatever lies behind; and, of a publication, all at once.

Who makes a checkpoint asks a :class:`Publication` for writers and commits a manifest; no path of a half-written file is known to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ..core.catalog import UINT8, Record
from ..errors import Corrupt, StorageError, Unsupported
from .checksum import crc32
from .manifest import FileEntry, Manifest
from .paths import ReadablePath, storage_error
from .reading import open_bytes
from .record_file import Layout, Raw, RecordFile

if TYPE_CHECKING:
    from typing_extensions import Self

_PIECE_NBYTES = 1 << 20


def _unheard(_nbytes: int) -> None:
    """Nobody wants to know."""


def _check(what: str | ReadablePath, found: FileEntry, expected: FileEntry | None) -> None:
    if expected is None or found == expected:
        return
    if found.nbytes != expected.nbytes:
        raise Corrupt(f"{what!s}: has {found.nbytes} bytes, the manifest says {expected.nbytes}")
    raise Corrupt(f"{what!s}: is damaged: CRC-32 {found.crc32:08x}, the manifest says {expected.crc32:08x}")


class Destination(ABC):
    """Takes files, each under its path. For several threads."""

    @abstractmethod
    def writer(self, file: str, layout: Layout) -> RecordFile:
        """Begin a file, with the folders above it.

        Args:
            file: Its path, with ``/``; it must not be there.
            layout: What will lie where.

        Raises:
            StorageError: It cannot be created.
        """

    def put(
        self,
        file: str,
        content: str | bytes | ReadablePath,
        expected: FileEntry | None = None,
        tick: Callable[[int], None] = _unheard,
    ) -> FileEntry:
        """Write a file whose content is known.

        Args:
            file: Its path, with ``/``; it must not be there.
            content: A text (stored as UTF-8), bytes, or another file, which is copied byte for byte.
            expected: What a manifest says that it is; something else never becomes a file here.
            tick: Hears of every piece before it is written; what it raises gives the file up.

        Returns:
            What was written.

        Raises:
            Corrupt: It is not what was expected.
            StorageError: It cannot be written; or the other one cannot be read, or is no regular file any more.
        """
        if isinstance(content, str | bytes):
            head = content.encode() if isinstance(content, str) else content
            _check(file, FileEntry(len(head), crc32(head)), expected)
            with self.writer(file, Raw(head=head).layout(file)) as writer:
                return writer.finish({})
        try:
            with open_bytes(content) as there:
                if expected is not None:  # before it is read
                    _check(content, FileEntry(there.nbytes, expected.crc32), expected)
                layout = Raw([Record(file, "all", UINT8, there.nbytes, 0)]).layout(file)
                with self.writer(file, layout) as writer:
                    at, crc = 0, 0
                    for piece in there.pieces(_PIECE_NBYTES):
                        tick(len(piece))
                        if at + len(piece) <= there.nbytes:
                            writer.write("all", at, piece)
                        at, crc = at + len(piece), crc32(piece, crc)
                    if at != there.nbytes:
                        raise StorageError(
                            f"{content!s}: has changed while it was copied: {there.nbytes} bytes, then {at}\n"
                            "Is another program still writing it? Try again when it is done."
                        )
                    _check(content, FileEntry(at, crc), expected)
                    return writer.finish({"all": crc})
        except OSError as error:
            raise storage_error(error, content, "copy") from error

    def again(self, file: str) -> Iterator[memoryview]:
        """The bytes of a file that is complete, read again.

        Args:
            file: Its path, with ``/``.

        Raises:
            Unsupported: What was written here cannot be read yet.
            StorageError: It cannot be read.
        """
        raise Unsupported(
            f"{file}: cannot be read again where it is written\nLeave out --integrity, or write to a local folder."
        )


@dataclass(frozen=True, slots=True)
class LocalFolder(Destination):
    """A folder of the file system.

    Args:
        root: It; there already.
    """

    root: Path

    def writer(self, file: str, layout: Layout) -> RecordFile:
        """See :meth:`Destination.writer`."""
        path = self.root / file
        above = [parent for parent in path.parents if parent.is_relative_to(self.root) and parent != self.root]
        try:
            for parent in reversed(above):  # not the root: if that was given up and removed, it stays so
                parent.mkdir(exist_ok=True)
        except OSError as error:
            raise storage_error(error, path.parent, "create") from error
        return RecordFile(path, layout)

    def again(self, file: str) -> Iterator[memoryview]:
        """See :meth:`Destination.again`."""
        try:
            with open_bytes(self.root / file) as there:
                yield from there.pieces(_PIECE_NBYTES)
        except OSError as error:
            raise storage_error(error, self.root / file, "read") from error


class Publication(Destination):
    """A folder that appears at its target as a whole or not at all. Use it in a ``with`` block.

    Left without :meth:`commit`, by an exception or an interrupt, everything written is removed and the target
    is as before.

    Attributes:
        transaction: Its id, by which the manifest is known again.
        recovered: What was cleaned up of dead processes when it began, one line each.
    """

    transaction: str
    recovered: list[str]

    @abstractmethod
    def __enter__(self) -> Self:
        """Clean up after dead processes, check the target, and begin.

        Raises:
            StorageError: The target exists and may not be replaced, or nothing can be written there.
        """

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def resume(self, why_not: Callable[[Path], str]) -> Path | None:
        """Go on in what a process left that was killed, if that can be; what else dead ones left is cleaned up.

        Args:
            why_not: Says of a journal why nobody can go on with it; nothing where one can.

        Returns:
            Where the journal stands, or shall stand; None where none is kept.
        """
        del why_not
        return None

    def keep(self, files: Mapping[str, int]) -> set[str]:
        """Of what a journal lists, what is there; everything else in the half-written folder is removed.

        Args:
            files: Length of each file, by path.
        """
        del files
        return set()

    def take(self, file: Path, name: str) -> None:
        """Take over a file that was written elsewhere.

        Args:
            file: The file, which stays where it is.
            name: Its path here; it must not be there.

        Raises:
            StorageError: It cannot be taken over.
        """
        self.put(name, file)

    def leave(self) -> None:
        """Leave what is half-written to whoever goes on with it."""

    @abstractmethod
    def check_space(self, nbytes: int) -> None:
        """Refuse early what cannot fit.

        Raises:
            StorageError: Less is free.
        """

    @abstractmethod
    def commit(self, manifest: Manifest) -> ReadablePath:
        """Write the manifest as the last file, and publish.

        Args:
            manifest: What the folder holds; the transaction's id is filled in.

        Returns:
            The target.

        Raises:
            StorageError: It could not be published; the target is as before.
        """
