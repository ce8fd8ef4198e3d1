"""Checkpoints that lie in no file system: whoever answers three questions has a :class:`Store`, and every format reads from it."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePath, PurePosixPath
from typing import ClassVar

from .reading import ByteSource, OpenFiles


class Store(ABC):
    """Files that are no file system's: those of an object store, an archive, a test. For several threads."""

    @abstractmethod
    def __str__(self) -> str:
        """What paths begin with in messages: ``s3://bucket/``."""

    @abstractmethod
    def listed(self, folder: str) -> Mapping[str, int | None]:
        """What lies in a folder, by name: the length of a file, None for a folder; nothing where there is no such folder.

        Args:
            folder: Its path, with ``/``; empty for the whole.
        """

    @abstractmethod
    def pread(self, file: str, nbytes: int, offset: int) -> bytes:
        """Up to so many bytes of a file; none behind its end.

        Raises:
            OSError: They cannot be read.
        """

    def size(self, path: str) -> int | None:
        """The length of a file, None for a folder.

        Raises:
            FileNotFoundError: It is neither.
        """
        parent, _, name = path.rpartition("/")
        beside = self.listed(parent)
        if name not in beside:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self}{path}")
        return beside[name]

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:  # noqa: B027
        """Hear what will be read soon: a file, where in it, how many bytes."""

    def forget(self) -> None:  # noqa: B027
        """Forget what was listed and read: something may have been written since then."""

    def length(self, path: str) -> int:
        """The length of a file that should be there.

        Raises:
            OSError: It is a folder, or is missing.
        """
        nbytes = self.size(path)
        if nbytes is None:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), f"{self}{path}")
        return nbytes

    def version(self, path: str) -> str:
        """What tells a file, which is there, from what it was before; empty where nothing does."""
        del path
        return ""


@dataclass(frozen=True, slots=True)
class StorePath:
    """A file or folder of a store; see :class:`~.paths.ReadablePath`.

    Args:
        store: The store.
        path: Where in it, from its top.
    """

    store: Store
    path: PurePosixPath = field(default_factory=PurePosixPath)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def suffix(self) -> str:
        return self.path.suffix

    @property
    def parent(self) -> StorePath:
        return StorePath(self.store, self.path.parent)

    @property
    def parents(self) -> Sequence[StorePath]:
        return [StorePath(self.store, parent) for parent in self.path.parents]

    def __truediv__(self, name: str | PurePath, /) -> StorePath:
        return StorePath(self.store, self.path / name)

    def __lt__(self, other: StorePath, /) -> bool:
        return self.path < other.path

    def __str__(self) -> str:
        return f"{self.store}{self.path if self.path.parts else ''}"

    def with_name(self, name: str) -> StorePath:
        return StorePath(self.store, self.path.with_name(name))

    def relative_to(self, other: StorePath, /) -> PurePath:
        return self.path.relative_to(other.path)

    def is_relative_to(self, other: StorePath, /) -> bool:
        return self.store is other.store and self.path.is_relative_to(other.path)

    def _size(self) -> int | None:
        """The length of the file that it is, None for a folder.

        Raises:
            FileNotFoundError: It is neither.
        """
        return None if self.path == PurePosixPath() else self.store.size(str(self.path))

    def is_file(self) -> bool:
        try:
            return self._size() is not None
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        try:
            return self._size() is None
        except FileNotFoundError:
            return False

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_symlink(self) -> bool:
        return False

    def open_bytes(self) -> ByteSource:
        """Open it; see :func:`.reading.open_bytes`."""
        return StoreFile(self)

    def stat(self) -> StoreStat:
        nbytes = self._size()
        return StoreStat(nbytes or 0, "" if nbytes is None else self.store.version(_key(self.path)))

    def iterdir(self) -> Iterator[StorePath]:
        return (self / name for name in self.store.listed(_key(self.path)))

    def glob(self, pattern: str, /) -> Iterator[StorePath]:
        first, _, rest = pattern.partition("/")
        for child in self.iterdir():
            if fnmatchcase(child.name, first):
                yield from child.glob(rest) if rest else (child,)

    def rglob(self, pattern: str, /) -> Iterator[StorePath]:
        yield from self.glob(pattern)
        for child in self.iterdir():
            if child.is_dir():
                yield from child.rglob(pattern)


def _key(path: PurePosixPath) -> str:
    return "" if path == PurePosixPath() else str(path)


@dataclass(frozen=True, slots=True)
class StoreStat:
    """What a store knows of a file.

    Args:
        st_size: Its length.
        version: What tells it from what it was before; empty where the store does not say.
    """

    st_size: int
    version: str = ""


class StoreFile(ByteSource):
    """A file of a store.

    Raises:
        OSError: It is a folder, or is missing.
    """

    far: ClassVar[bool] = True

    def __init__(self, path: StorePath) -> None:
        self._store, self._file = path.store, _key(path.path)
        super().__init__(path, self._store.length(self._file))

    def pread(self, nbytes: int, offset: int) -> bytes:
        """See :meth:`ByteSource.pread`."""
        return self._store.pread(self._file, min(nbytes, self.nbytes - offset), offset) if offset < self.nbytes else b""

    def expect(self, byte_offset: int, nbytes: int) -> None:
        """See :meth:`ByteSource.expect`."""
        self._store.expect([(self._file, byte_offset, nbytes)])

    def pieces(self, nbytes: int) -> Iterator[memoryview]:
        """See :meth:`ByteSource.pieces`; those that follow are on their way meanwhile."""
        for at in range(0, self.nbytes, nbytes):
            self.expect(at, min(_AHEAD * nbytes, self.nbytes - at))
            yield self.view(at, min(nbytes, self.nbytes - at))


_AHEAD = 4


class FarFiles(OpenFiles):
    """See :class:`OpenFiles`; the files of a store, which hears beforehand what will be read."""

    def expect(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """See :class:`mcore_rlhf.core.execute.ReadsAhead`."""
        root = self.root
        assert isinstance(root, StorePath)
        root.store.expect((_key((root / file).path), at, nbytes) for file, at, nbytes in ranges)
