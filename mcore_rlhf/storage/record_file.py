"""Files of records: laid out first, filled in any order by any thread, completed with the checksums of what was filled in.

A :class:`Container` says where everything lies in a file of its kind; :class:`RecordFile` does the rest for all of them.
"""

from __future__ import annotations

import base64
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..core.catalog import Record
from ..errors import StorageError, Unsupported
from .beneath import Beneath
from .checksum import combine, crc32
from .manifest import FileEntry
from .paths import ReadablePath, beneath, human, pwrite_all, storage_error
from .stored import StoredTensor
from .torchzip import Directory

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self


class Piece(NamedTuple):
    """Bytes of a file that are none of a record to be filled: a header, a small value, a directory.

    Args:
        offset: Where they lie in the file.
        data: The bytes.
        key: What their CRC-32 is known by to :attr:`Layout.ending`, where it needs that.
    """

    offset: int
    data: Buffer
    key: str = ""


def _nothing(_crcs: Mapping[str, int]) -> Iterable[Piece]:
    return ()


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything lies in a file, before a byte of a tensor is known. Records and pieces fill it without a gap.

    Args:
        nbytes: Its length.
        records: ``(offset, bytes)`` of every record that will be filled, by its key.
        known: What can be written at once.
        ending: What follows from the CRC-32 of every record, and of every known piece that has a key.
        in_order: Whether ``ending`` gives its pieces in the file's order, and asks for the CRC of nothing that lies behind the
            piece: such a file can be sent to a store as it is made.
    """

    nbytes: int
    records: Mapping[str, tuple[int, int]]
    known: Iterable[Piece] = ()
    ending: Callable[[Mapping[str, int]], Iterable[Piece]] = _nothing
    in_order: bool = True


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """A file of tensors that was opened; none of their bytes was read.

    Args:
        file: Its path relative to the checkpoint's root.
        nbytes: Its length.
        tensors: By name, in the file's order.
        records: ``(key, byte offset, bytes, crc32)`` of every part whose checksum the file stores.
        metadata: Texts of the file's own header, but for what says which framework it is for, and second names of tied tensors.
    """

    file: str
    nbytes: int
    tensors: Mapping[str, StoredTensor]
    records: Sequence[tuple[str, int, int, int]] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a source, with the checksums that it carries itself.

    Args:
        path: Relative to the source's root.
        nbytes: Its length.
        records: ``(key, byte offset, bytes, crc32)`` of every part that has a checksum. Some formats read them only when asked,
            and raise CheckpointError then where the file is damaged.
        whole: CRC-32 of all its bytes, where a manifest lists one besides those of the records.
        rank: Of files that hold parts of the same tensors, as DCP's and ZeRO's do: whose this one is. No two have the same.
        stem: What it was called when it was written, without the ending, where it says so.
    """

    path: str
    nbytes: int
    records: Sequence[tuple[str, int, int, int]] = ()
    whole: int | None = None
    rank: int | None = None
    stem: str = ""

    @classmethod
    def at(cls, root: ReadablePath, file: str) -> StoredFile:
        """A file without checksums, of that path in a folder.

        Raises:
            Untrusted: The path leads out of it.
            FileNotFoundError: There is none.
        """
        return cls(file, beneath(root, file).stat().st_size)

    @classmethod
    def of_zip(cls, path: str, directory: Directory, rank: int | None = None) -> StoredFile:
        """A ``.pt`` file, or another zip, with the checksums of its members where it has any."""
        return cls(path, directory.nbytes, directory.checksums, rank=rank, stem=directory.stem)


class Container(ABC):
    """A kind of file that holds records, and, as an object, what one such file is to hold.

    Attributes:
        name: What people call the kind.
        suffixes: What the names of such files end with, where that is enough to know them and their tensors.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def open(cls, root: ReadablePath, file: str, stubs: Collection[str] = ()) -> OpenedFile:
        """Open a file of this kind. No byte of a tensor is read.

        Args:
            root: The checkpoint's folder.
            file: Path relative to it, with ``/``.
            stubs: Full names of classes that a pickle in it may name.

        Raises:
            CheckpointError: It is missing, damaged, or its tensors have no names of their own.
        """
        raise Unsupported(f"{beneath(root, file)}: a {cls.name} file does not say by itself what lies in it")

    @abstractmethod
    def told(self, file: str, numbers: Mapping[str, int]) -> list[Any]:
        """The same as data for JSON, which stands in a plan: whatever has to be made of it is made now.

        Args:
            file: See :meth:`layout`.
            numbers: Of the file's records, by their keys.

        Raises:
            CheckpointError: Files of this kind cannot hold it.
        """

    @classmethod
    @abstractmethod
    def of_told(cls, told: Sequence[Any], records: Sequence[Record]) -> Container:
        """From :meth:`told`; nothing of it is believed.

        Args:
            told: That.
            records: The file's records, by number.

        Raises:
            ValueError, TypeError, IndexError: It is something else.
        """

    @abstractmethod
    def layout(self, file: str) -> Layout:
        """Where everything will lie.

        Args:
            file: The file's path, relative to the checkpoint's root: the ``file`` of its records.

        Raises:
            Unsupported: Files of this kind cannot hold it.
        """

    def create(self, path: Path, file: str | None = None) -> RecordFile:
        """Lay the file out and reserve it (sparse: it takes space as records are written).

        Args:
            path: Where to write; must not exist.
            file: See :meth:`layout`; None for the file's name.

        Raises:
            StorageError: It cannot be created.
            Unsupported: See :meth:`layout`.
        """
        return RecordFile(path, self.layout(path.name if file is None else file))


class RecordFile:
    """A file being written. Use it in a ``with`` block: left without :meth:`finish`, the file is removed.

    Args:
        path: Where to write; must not exist.
        layout: What lies where.
        folder: What it lies beneath, at any depth; None for its own folder, which is there.

    Raises:
        StorageError: It cannot be created.
    """

    def __init__(self, path: Path, layout: Layout, folder: Beneath | None = None) -> None:
        self.path, self.layout = path, layout
        self._folder = folder
        self._crcs: dict[str, int] = {}
        self._extents: list[tuple[int, int, int]] = []
        self._fd = -1
        self._create()
        try:
            self._reserve()
            self._put(layout.known)
        except BaseException:
            self.abort()
            raise

    @property
    def open_records(self) -> list[str]:
        """Keys of the records, whose checksums :meth:`finish` wants."""
        return list(self.layout.records)

    def offset(self, key: str) -> int:
        """Where a record starts in the file, in bytes."""
        return self.layout.records[key][0]

    def record_nbytes(self, key: str) -> int:
        """Length of a record, in bytes."""
        return self.layout.records[key][1]

    def write(self, key: str, byte_offset: int, data: Buffer) -> None:
        """Put bytes into a record. What is never written reads as zeros. For several threads.

        Args:
            key: The record's key.
            byte_offset: Where, from the record's own start.
            data: The bytes.

        Raises:
            StorageError: They cannot be written; says how much is needed and free.
            ValueError: They would lie outside the record.
        """
        start, nbytes = self.layout.records[key]
        view = memoryview(data).cast("B")
        if byte_offset < 0 or byte_offset + len(view) > nbytes:
            raise ValueError(f"{self.path}: {len(view)} bytes at {byte_offset} do not fit into {key} of {nbytes} bytes")
        self._pwrite(view, start + byte_offset)

    def finish(self, crcs: Mapping[str, int], *, fsync: bool = False) -> FileEntry:
        """Put what follows from the checksums in place, and close the file.

        Args:
            crcs: CRC-32 of every record, by key; over all its bytes, zeros that were never written included.
            fsync: Whether to wait until the file is on the disk.

        Returns:
            Its length, and the CRC-32 of all its bytes.

        Raises:
            StorageError: The file cannot be completed.
            ValueError: A CRC is missing, or the container left a gap.
        """
        records = self.layout.records
        missing = [key for key in records if key not in crcs]
        if missing:
            raise ValueError(f"{self.path}: no CRC was given for {', '.join(missing)}")
        self._put(joined(self.layout.ending({**crcs, **self._crcs})))
        self._extents += ((offset, nbytes, crcs[key]) for key, (offset, nbytes) in records.items())
        entry = FileEntry(self.layout.nbytes, self._whole_crc())
        self._close(fsync)
        return entry

    def abort(self) -> None:
        """Close the file and remove it; nothing happens if it is complete."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):  # what was not written goes
                os.close(fd)
            folder = self._beneath()
            folder.remove(self.path.relative_to(folder.root).as_posix())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _create(self) -> None:
        try:
            folder = self._beneath()
            self._fd = folder.create(self.path.relative_to(folder.root).as_posix())
        except OSError as error:
            raise storage_error(error, self.path, "create") from error

    def _beneath(self) -> Beneath:
        return self._folder or Beneath(self.path.parent)

    def _reserve(self) -> None:
        try:
            os.ftruncate(self._fd, self.layout.nbytes)
        except OSError as error:
            raise self._error(error) from error

    def _put(self, pieces: Iterable[Piece]) -> None:
        for offset, data, key in pieces:
            view = memoryview(data).cast("B")
            self._pwrite(view, offset)
            crc = crc32(view)
            self._extents.append((offset, len(view), crc))
            if key:
                self._crcs[key] = crc

    def _pwrite(self, data: memoryview, offset: int) -> None:
        try:
            pwrite_all(self._fd, data, offset)
        except OSError as error:
            raise self._error(error) from error

    def _close(self, fsync: bool) -> None:
        try:
            if fsync:
                os.fsync(self._fd)
            fd, self._fd = self._fd, -1
            os.close(fd)
        except OSError as error:
            raise self._error(error) from error

    def _whole_crc(self) -> int:
        """From those of all parts, which must lie one after the other."""
        total, at = 0, 0
        for offset, nbytes, crc in sorted(extent for extent in self._extents if extent[1]):
            if offset != at:
                raise ValueError(f"{self.path}: its layout has a gap or an overlap at byte {at}: {offset} follows")
            total, at = combine(total, crc, nbytes), at + nbytes
        if at != self.layout.nbytes:
            raise ValueError(f"{self.path}: its layout ends at byte {at} of {self.layout.nbytes}")
        return total

    def _error(self, error: OSError) -> StorageError:
        where = self.path.parent
        free = f", {human(shutil.disk_usage(where).free)} are free" if where.is_dir() else ""
        return storage_error(error, self.path, "write", f"the file needs {human(self.layout.nbytes)}{free}")


def text_of(data: Buffer) -> str:
    """Bytes as text for JSON."""
    return base64.b64encode(data).decode()


def bytes_of(text: str) -> bytes:
    """From :func:`text_of`.

    Raises:
        ValueError, TypeError: It is something else.
    """
    return base64.b64decode(text, validate=True)


def naturals(told: object) -> tuple[int, ...]:
    """Numbers of JSON, none of them below 0.

    Raises:
        TypeError: They are something else.
    """
    if not isinstance(told, list) or not all(type(number) is int and number >= 0 for number in told):
        raise TypeError(f"no list of numbers from 0 on: {str(told)[:60]}")
    return tuple(told)


def in_memory(layout: Layout) -> bytes:
    """A file without records to be filled."""
    whole = bytearray(layout.nbytes)
    crcs: dict[str, int] = {}
    for offset, data, key in layout.known:
        view = memoryview(data).cast("B")
        whole[offset : offset + len(view)] = view
        crcs[key] = crc32(view)
    for offset, data, _ in layout.ending(crcs):
        view = memoryview(data).cast("B")
        whole[offset : offset + len(view)] = view
    return bytes(whole)


def end_to_end(records: Iterable[Record], start: int = 0) -> tuple[int, dict[str, tuple[int, int]]]:
    """Records one after the other: where the last one ends, and ``(offset, bytes)`` of each by its key.

    Raises:
        ValueError: One is there twice.
    """
    places: dict[str, tuple[int, int]] = {}
    for record in records:
        if record.key in places:
            raise ValueError(f"{record.file}: holds {record.key} twice")
        places[record.key] = start, record.nbytes
        start += record.nbytes
    return start, places


@dataclass(frozen=True, slots=True)
class Raw(Container):
    """Bytes, then records one after the other; nothing in the file says where they lie.

    Args:
        records: Those that will be filled, in order.
        head: What the file begins with; a text is all head.
    """

    name: ClassVar[str] = "raw"
    records: Sequence[Record] = ()
    head: bytes = b""

    def told(self, file: str, numbers: Mapping[str, int]) -> list[Any]:
        """See :meth:`Container.told`."""
        return [[numbers[record.key] for record in self.records], text_of(self.head)]

    @classmethod
    def of_told(cls, told: Sequence[Any], records: Sequence[Record]) -> Raw:
        """See :meth:`Container.of_told`."""
        inside, head = told
        return cls([records[number] for number in naturals(inside)], bytes_of(head))

    def layout(self, file: str) -> Layout:
        """The head, and the records behind it."""
        return Layout(*end_to_end(self.records, len(self.head)), [Piece(0, self.head)] if self.head else ())


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Pieces without keys that follow one another as one, so that one call writes them."""
    start, at, run = 0, 0, b""
    for offset, data, _ in pieces:
        if offset != at and run:
            yield Piece(start, run)
            run = b""
        start = start if run else offset
        run += bytes(data)
        at = start + len(run)
    yield Piece(start, run)
