"""A disk that forgets, when the power fails, what it was not told to keep: plays recorded operations, and says what is left then."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.crash.recorder import Op

MODELS = ("strict", "names, empty files", "names, zeroed files", "some", "some more", "some others")
"""What is left.

``strict``: of a file what it held, and of a folder what was in it, when it was last synced. ``names, …``: all names, as a journal of
metadata keeps them, and of a file's data what was synced; the rest is not there, or zeros. ``some…``: by chance, of every folder
the first so many of its changes, in their order, and of every file some of the writes.
"""


@dataclass(eq=False)
class File:
    """A file: its bytes, those that are safe, and the writes since then."""

    data: bytearray = field(default_factory=bytearray)
    safe: bytes = b""
    writes: list[tuple[int, bytes | None]] = field(default_factory=list)

    def change(self, offset: int, data: bytes | None) -> None:
        """Write, or cut off where no data is given."""
        _change(self.data, offset, data)
        self.writes.append((offset, data))

    def sync(self) -> None:
        """Everything is safe."""
        self.safe, self.writes = bytes(self.data), []

    def left(self, model: str, rng: random.Random) -> bytes:
        """What is left of it."""
        if not self.writes:
            return bytes(self.data)
        if model == "names, zeroed files":
            return self.safe[: len(self.data)].ljust(len(self.data), b"\0")
        found = bytearray(self.safe)
        for offset, data in self.writes if model.startswith("some") else ():
            if rng.random() < 0.5:
                _change(found, offset, data)
        return bytes(found)


def _change(content: bytearray, offset: int, data: bytes | None) -> None:
    end = offset + len(data or b"")
    content.extend(bytes(max(0, end - len(content))))
    if data is None:
        del content[offset:]
    else:
        content[offset:end] = data


@dataclass(eq=False)
class Folder:
    """A folder: its names, those that are safe, and the changes since then, each of which is done as a whole."""

    names: dict[str, File | Folder] = field(default_factory=dict)
    safe: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[dict[str, File | Folder | None]] = field(default_factory=list)

    def change(self, **names: File | Folder | None) -> None:
        """Let names mean something, or nothing."""
        _rename(self.names, names)
        self.changes.append(names)

    def sync(self) -> None:
        """All names are safe."""
        self.safe, self.changes = dict(self.names), []

    def left(self, model: str, rng: random.Random) -> dict[str, File | Folder]:
        """What is left of its names."""
        if model.startswith("names"):
            return self.names
        found = dict(self.safe)
        for change in self.changes[: rng.randint(0, len(self.changes))] if model.startswith("some") else ():
            _rename(found, change)
        return found


def _rename(content: dict[str, File | Folder], names: dict[str, File | Folder | None]) -> None:
    for name, node in names.items():
        if node is None:
            content.pop(name, None)
        else:
            content[name] = node


class Disk:
    """A folder with all that is in it, which is safe.

    Args:
        base: What is on it at first.
    """

    def __init__(self, base: Path) -> None:
        self.root = _loaded(base)

    def _at(self, path: str) -> File | Folder:
        node: File | Folder = self.root
        for part in Path(path).parts:
            assert isinstance(node, Folder)
            node = node.names[part]
        return node

    def _folder(self, path: str) -> Folder:
        node = self._at(path)
        assert isinstance(node, Folder), path
        return node

    def _file(self, path: str) -> File:
        node = self._at(path)
        assert isinstance(node, File), path
        return node

    def do(self, ops: Iterable[Op]) -> None:
        """Play operations."""
        for op in ops:
            self._do(op)

    def _do(self, op: Op) -> None:
        parent, name = str(Path(op.path).parent), Path(op.path).name
        if op.kind == "fsync":
            self._at(op.path).sync()
        elif op.kind == "write":
            self._file(op.path).change(op.offset, op.data)
        elif op.kind == "truncate":
            self._file(op.path).change(op.offset, None)
        elif op.kind in ("create", "mkdir"):
            self._folder(parent).change(**{name: File() if op.kind == "create" else Folder()})
        elif op.kind == "link":
            self._folder(str(Path(op.to).parent)).change(**{Path(op.to).name: self._at(op.path)})
        elif op.kind in ("unlink", "rmdir"):
            self._folder(parent).change(**{name: None})
        else:
            self._move(op, parent, name)

    def _move(self, op: Op, parent: str, name: str) -> None:
        moved, to, new = self._at(op.path), str(Path(op.to).parent), Path(op.to).name
        if to == parent:
            self._folder(parent).change(**{name: None, new: moved})
            return
        self._folder(parent).change(**{name: None})
        self._folder(to).change(**{new: moved})

    def left(self, to: Path, model: str, rng: random.Random) -> Path:
        """Lay out what a power failure leaves now.

        Args:
            to: Where; it is made anew.
            model: One of :data:`MODELS`.
            rng: What is left by chance.
        """
        shutil.rmtree(to, ignore_errors=True)
        _lay_out(self.root, to, model, rng)
        return to


def _loaded(path: Path) -> Folder:
    folder = Folder()
    for child in path.iterdir():
        folder.names[child.name] = _loaded(child) if child.is_dir() else _file_of(child.read_bytes())
    folder.sync()
    return folder


def _file_of(data: bytes) -> File:
    return File(bytearray(data), data)


def _lay_out(folder: Folder, to: Path, model: str, rng: random.Random) -> None:
    to.mkdir()
    for name, node in folder.left(model, rng).items():
        if isinstance(node, Folder):
            _lay_out(node, to / name, model, rng)
        else:
            (to / name).write_bytes(node.left(model, rng))
