"""Records what a program does to a folder, system call by system call, and does it again elsewhere, as far as one likes.

Used to stop a save after each of its operations: what is then on the disk is what a SIGKILL at that moment leaves behind.
"""

from __future__ import annotations

import io
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WRITES = ("write", "truncate")


@dataclass(frozen=True)
class Op:
    """One operation. Paths are relative to the recorded folder."""

    kind: str
    path: str
    to: str = ""
    offset: int = 0
    data: bytes = b""

    def __str__(self) -> str:
        more = f" -> {self.to}" if self.to else f" [{self.offset}:+{len(self.data)}]" if self.data else ""
        return f"{self.kind} {self.path}{more}"

    def apply(self, root: Path, *, torn: bool = False) -> None:
        """Do it again in another folder; torn: a write gets only as far as half of its bytes."""
        path = root / self.path
        if self.kind == "create":
            path.open("xb").close()
        elif self.kind == "write":
            with path.open("r+b") as file:
                file.seek(self.offset)
                file.write(self.data[: len(self.data) // 2] if torn else self.data)
        elif self.kind == "truncate":
            os.truncate(path, self.offset)
        elif self.kind in ("rename", "link", "mkdir", "rmdir", "unlink"):
            getattr(os, self.kind)(path, *([root / self.to] if self.to else []))


class Killed(BaseException):
    """What a killed thread is stopped by: from then on it does nothing to the disk."""


@dataclass
class Recorder:
    """Everything that is done to a folder by this process, from all of its threads, in the order in which it was done.

    Args:
        root: The folder.
        before: Called before each operation, and may raise, or wait.
    """

    root: Path
    before: Callable[[Op], None] = lambda op: None
    ops: list[Op] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _real: dict[str, Any] = field(default_factory=dict)

    def _relative(self, path: Any, dir_fd: int | None = None) -> str | None:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        text = os.fspath(path)
        text = (
            os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text) if dir_fd is not None else os.path.abspath(text)
        )
        inside = f"{text}/".startswith(f"{self.root}/") and not text.endswith(" (deleted)")
        return os.path.relpath(text, self.root) if inside else None

    def _do(self, op: Op | None, action: Callable[[], Any]) -> Any:
        """Do it under a lock, so that the recorded order is the true one."""
        if op is not None:
            self.before(op)
        with self._lock:
            result = action()
            if op is not None:
                self.ops.append(op)
            return result

    def _named(self, name: str, kind: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            where = self._relative(path, dir_fd)
            more = {"dir_fd": dir_fd} if dir_fd is not None else {}
            return self._do(Op(kind, where) if where else None, lambda: real(path, *args, **more, **kwargs))

        return call

    def _moved(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> Any:
            first, second = self._relative(source, src_dir_fd), self._relative(target, dst_dir_fd)
            op = Op("rename", first, to=second) if first and second else None
            return self._do(op, lambda: real(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd))

        return call

    def _link(self, source: Any, target: Any, *, dst_dir_fd: int | None = None, follow_symlinks: bool = True) -> Any:
        first, second = self._relative(source), self._relative(target, dst_dir_fd)
        op = Op("link", first, to=second) if first and second else None
        return self._do(
            op, lambda: self._real["link"](source, target, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks)
        )

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        where, op = self._relative(path, dir_fd), None
        if where and flags & os.O_CREAT and not os.path.lexists(self.root / where):
            op = Op("create", where)
        elif where and flags & os.O_TRUNC:
            op = Op("truncate", where)
        more = {"dir_fd": dir_fd} if dir_fd is not None else {}
        return int(self._do(op, lambda: self._real["open"](path, flags, mode, **more)))

    def _pwrite(self, fd: int, data: Any, offset: int) -> int:
        where = self._relative(fd)
        op = Op("write", where, offset=offset, data=bytes(data)) if where else None
        return int(self._do(op, lambda: self._real["pwrite"](fd, data, offset)))

    def _write(self, fd: int, data: Any) -> int:
        where = self._relative(fd)
        at = os.lseek(fd, 0, os.SEEK_CUR) if where else 0
        op = Op("write", where, offset=at, data=bytes(data)) if where else None
        return int(self._do(op, lambda: self._real["write"](fd, data)))

    def _ftruncate(self, fd: int, length: int) -> None:
        where = self._relative(fd)
        self._do(Op("truncate", where, offset=length) if where else None, lambda: self._real["ftruncate"](fd, length))

    def _io_open(
        self, file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, *args: Any, **kw: Any
    ) -> Any:
        if isinstance(file, int) or not set(mode) & set("wxa") or self._relative(file) is None:
            return self._real["io.open"](file, mode, buffering, encoding, *args, **kw)
        flags = {"w": os.O_TRUNC, "x": os.O_EXCL, "a": os.O_APPEND}[next(iter(set(mode) & set("wxa")))]
        raw = _Raw(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | flags, 0o666))
        buffered = raw if buffering == 0 else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding=encoding)  # type: ignore[type-var]

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record within the ``with`` block."""
        names = (
            "open",
            "write",
            "pwrite",
            "ftruncate",
            "rename",
            "replace",
            "mkdir",
            "rmdir",
            "unlink",
            "remove",
            "fsync",
            "link",
        )
        self._real = {name: getattr(os, name) for name in names} | {"io.open": io.open}
        shims = {"open": self._open, "write": self._write, "pwrite": self._pwrite, "ftruncate": self._ftruncate}
        shims |= {name: self._moved(name) for name in ("rename", "replace")}
        shims |= {name: self._named(name, name) for name in ("mkdir", "rmdir", "unlink", "fsync")}
        shims["link"] = self._link
        shims["remove"] = self._named("remove", "unlink")
        accessor = getattr(
            pathlib, "_NormalAccessor", None
        )  # Python 3.10 keeps the functions that it was imported with
        kept = {name: accessor.__dict__[name] for name in shims if accessor and name in accessor.__dict__}
        try:
            for name, shim in shims.items():
                setattr(os, name, shim)
                if name in kept:
                    setattr(accessor, name, staticmethod(shim))
            io.open = self._io_open  # type: ignore[assignment]
            yield self
        finally:
            for name in shims:
                setattr(os, name, self._real[name])
                if name in kept:
                    setattr(accessor, name, kept[name])
            io.open = self._real["io.open"]


class _Raw(io.RawIOBase):
    """A file whose writes go through ``os.write``, where they are recorded."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, data: Any) -> int:
        return os.write(self._fd, data)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)


def replayed(ops: Sequence[Op], root: Path) -> None:
    """Do all of them again."""
    for op in ops:
        op.apply(root)
