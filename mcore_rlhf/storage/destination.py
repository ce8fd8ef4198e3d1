"""Where what is written goes: file by file, by writers of their layouts, whatever lies behind; and, of a publication, all at once.

Who makes a checkpoint asks a :class:`Publication` for writers and commits a manifest; no path of a half-written file is known to it.
"""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, final

from ..core.catalog import UINT8, Record
from ..errors import Corrupt, StorageError, Unsupported, Untrusted, shown
from .beneath import Beneath
from .checksum import crc32
from .manifest import FileEntry, Manifest
from .paths import ReadablePath, canonical, storage_error
from .reading import open_bytes
from .record_file import Layout, Raw, RecordFile

if TYPE_CHECKING:
    from typing_extensions import Self

    from .notes import Notes

_PIECE_NBYTES = 1 << 20
WENT_ON = ", which a process left that was killed"


def _unheard(_nbytes: int) -> None:
    """Nobody wants to know."""


def check_entry(what: str | ReadablePath, found: FileEntry, expected: FileEntry | None) -> None:
    """Hold a file against what a manifest says of it.

    Raises:
        Corrupt: It is something else.
    """
    if expected is None or found == expected:
        return
    if found.nbytes != expected.nbytes:
        raise Corrupt(f"{what!s}: has {found.nbytes} bytes, the manifest says {expected.nbytes}")
    raise Corrupt(f"{what!s}: is damaged: CRC-32 {found.crc32:08x}, the manifest says {expected.crc32:08x}")


class TargetPaths:
    """The files of one folder, by path: each a canonical one, and none in the way of another. For several threads.

    Args:
        where: The folder, for messages.
        reserved: First parts that are not a checkpoint's to use, such as the manifest's name; all that begin with one that ends in ``-``.
    """

    def __init__(self, where: object, reserved: Collection[str] = ()) -> None:
        self._where, self._reserved = where, reserved
        self._files: dict[str, None] = {}
        self._folders: dict[str, str] = {}

    def add(self, name: str) -> None:
        """Take a name.

        Raises:
            Untrusted: It is no canonical path, is reserved, is taken, is a folder of one that is taken, or lies in one as if that were a
                folder.
        """
        canonical(name, self._where)
        first, *_ = parts = name.split("/")
        above = ["/".join(parts[:count]) for count in range(1, len(parts))]
        other = next((folder for folder in above if folder in self._files), self._folders.get(name))
        if any(first == word or (word.endswith("-") and first.startswith(word)) for word in self._reserved):
            raise Untrusted(
                f"{self._where}: a file would be called {shown(name)}, a name that is kept for what publishes the folder"
            )
        if name in self._files:
            raise Untrusted(f"{self._where}: two files would be called {shown(name)}{_RENAME}")
        if other is not None:
            raise Untrusted(
                f"{self._where}: {shown(name)} and {shown(other)} would be a file and a folder of one name{_RENAME}"
            )
        self._files[name] = None
        self._folders.update(dict.fromkeys(above, name))

    def give_back(self, name: str) -> None:
        """Let a name be taken anew: its file was given up."""
        self._files.pop(name, None)


_TAKING = Lock()
_RENAME = "\nRename what the checkpoint has two of, or choose a format whose files are not called after it."


class Destination(ABC):
    """Takes files, each under its path. For several threads.

    Whatever a file is called, and whoever asks: its name goes through :func:`~.paths.canonical` here, and is taken once.
    """

    _names: TargetPaths | None = None

    def _place(self) -> tuple[object, Collection[str]]:
        """The folder, for messages, and what is reserved in it: see :class:`TargetPaths`."""
        return self, ()

    @abstractmethod
    def _writer(self, file: str, layout: Layout) -> RecordFile:
        """Begin a file of a clean name."""

    def _again(self, file: str) -> Iterator[memoryview]:
        """The bytes of a file of a clean name."""
        raise Unsupported(
            f"{file}: cannot be read again where it is written\nLeave out --integrity, or write to a local folder."
        )

    @final
    @contextmanager
    def _taking(self, file: str) -> Iterator[None]:
        """Take a name, and give it back where the file that is begun under it is given up at once."""
        with _TAKING:
            names = self._names = self._names or TargetPaths(*self._place())
            names.add(file)
        try:
            yield
        except BaseException:
            names.give_back(file)
            raise

    @final
    def writer(self, file: str, layout: Layout) -> RecordFile:
        """Begin a file, with the folders above it.

        Args:
            file: Its path, with ``/``; it must not be there.
            layout: What will lie where.

        Raises:
            Untrusted: It has no canonical name, or one that is taken: see :class:`TargetPaths`.
            StorageError: It cannot be created.
        """
        with self._taking(file):
            return self._writer(file, layout)

    @final
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
        with self._taking(file):
            return self._put(file, content, expected, tick)

    @final
    def _put(
        self,
        file: str,
        content: str | bytes | ReadablePath,
        expected: FileEntry | None = None,
        tick: Callable[[int], None] = _unheard,
    ) -> FileEntry:
        if isinstance(content, str | bytes):
            head = content.encode() if isinstance(content, str) else content
            check_entry(file, FileEntry(len(head), crc32(head)), expected)
            with self._writer(file, Raw(head=head).layout(file)) as writer:
                return writer.finish({})
        try:
            with open_bytes(content) as there:
                if expected is not None:  # before it is read
                    check_entry(content, FileEntry(there.nbytes, expected.crc32), expected)
                layout = Raw([Record(file, "all", UINT8, there.nbytes, 0)]).layout(file)
                with self._writer(file, layout) as writer:
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
                    check_entry(content, FileEntry(at, crc), expected)
                    return writer.finish({"all": crc})
        except OSError as error:
            raise storage_error(error, content, "copy") from error

    @final
    def again(self, file: str) -> Iterator[memoryview]:
        """The bytes of a file that is complete, read again.

        Args:
            file: Its path, with ``/``.

        Raises:
            Unsupported: What was written here cannot be read yet.
            StorageError: It cannot be read.
        """
        return self._again(canonical(file, self._place()[0]))

    def versions(self) -> Mapping[str, tuple[int, str]]:
        """Length and version of every file that is there as a whole, by path."""
        return {}

    def version(self, file: str) -> str:
        """What tells a file, which has just been written, from what is put in its place; empty where nothing does."""
        del file
        return ""


@dataclass(slots=True)
class LocalFolder(Destination):
    """A folder of the file system.

    Args:
        root: It; there already.
        reserved: See :class:`TargetPaths`.
        own: Whether it is a hidden one of this user's, where others may write beside it.
    """

    root: Path
    reserved: Collection[str] = ()
    own: bool = False
    _beneath: Beneath | None = field(default=None, init=False, repr=False, compare=False)

    def _place(self) -> tuple[object, Collection[str]]:
        return self.root, self.reserved

    def _folder(self) -> Beneath:
        if self._beneath is None:
            try:
                self._beneath = Beneath(self.root, self.own)
            except OSError as error:
                raise storage_error(error, self.root, "write into") from error
        return self._beneath

    def _writer(self, file: str, layout: Layout) -> RecordFile:
        return RecordFile(self.root / file, layout, self._folder())

    def linked(self, file: Path, name: str) -> bool:
        """Give a file a second name here, where the file system has such links; whether it has."""
        try:
            self._folder().link(file, name)
        except OSError:
            return False
        return True

    def _again(self, file: str) -> Iterator[memoryview]:
        try:
            with open_bytes(self.root / file) as there:
                yield from there.pieces(_PIECE_NBYTES)
        except OSError as error:
            raise storage_error(error, self.root / file, "read") from error

    def versions(self) -> dict[str, tuple[int, str]]:
        """See :meth:`Destination.versions`."""
        found: dict[str, tuple[int, str]] = {}
        for parent, _, names in os.walk(self.root):
            for path in (Path(parent, name) for name in names):
                facts = path.lstat()
                if stat.S_ISREG(facts.st_mode):
                    found[path.relative_to(self.root).as_posix()] = facts.st_size, _version(facts)
        return found

    def version(self, file: str) -> str:
        """See :meth:`Destination.version`."""
        return _version((self.root / file).lstat())


def _version(facts: os.stat_result) -> str:
    """``ctime`` is the time that nobody can set back."""
    return str(facts.st_ctime_ns)


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

    @property
    def left(self) -> str:
        """Where what is finished stays, for a message."""
        return f"in {self._place()[0]}"

    def resume(self, plan: str, why_not: Callable[[Notes], str]) -> Notes | None:
        """Go on in what a process left that was killed, if that can be; what else dead ones left is cleaned up.

        Args:
            plan: What tells the plan from all others.
            why_not: Says of notes why nobody can go on with them; nothing where one can.

        Returns:
            The notes of what is finished, as far as that is known; None where none are kept.
        """
        del plan, why_not
        return None

    def keep(self, noted: Mapping[str, tuple[int, str]]) -> set[str]:
        """Of what is noted as finished, what is still there as it was; everything else in a half-written folder is removed.

        Args:
            noted: Length and version of each file, by path.
        """
        there = self.versions()
        return {name for name, told in noted.items() if told[1] and there.get(name) == told}

    @final
    def take(self, file: Path, name: str) -> None:
        """Take over a file that this user has written elsewhere.

        Args:
            file: The file, which stays where it is.
            name: Its path here; it must not be there.

        Raises:
            Untrusted: See :meth:`writer`.
            StorageError: It cannot be taken over.
        """
        with self._taking(name):
            if not self._linked(file, name):
                self._put(name, file)

    def _linked(self, file: Path, name: str) -> bool:
        """Give a file a second name here, where that can be; whether it could."""
        del file, name
        return False

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
