"""Opening files, whoever put them there: regular files only, without waiting, and small ones up to a size.

A named pipe in place of a file would let the reader wait for ever, and ``/dev/zero`` would fill the memory. Links to regular files are
followed: Hugging Face's cache consists of them. What is written follows none: a link in its place could lead to any file of the user's.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_TEXT = 128 << 20
"""Bytes of a JSON file: an index of a million tensors has 100 MB."""

MAX_LINE = 1 << 16
"""Bytes of a file that holds a name or a number."""

_MAX_DEPTH = 200
_PIECE_NBYTES = 4 << 20
_KINDS = {
    stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


class NotRegular(OSError):
    """Something else than a file stands where a file is expected, or far too much of one.

    Args:
        path: Where.
        what: What it is: completes "x is …".
    """

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(errno.EINVAL, f"is {what}", str(path))


def open_regular(path: Path) -> int:
    """A descriptor of a regular file, for reading; never waits.

    Raises:
        NotRegular: It is a pipe, a socket or a device.
        OSError: It is a folder, is missing, or cannot be opened.
    """
    _require_regular(path, os.stat(path).st_mode)  # opening some devices does something
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(path, os.fstat(fd).st_mode)
    except OSError:
        os.close(fd)
        raise
    return fd


def _require_regular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise NotRegular(path, f"{_KINDS.get(stat.S_IFMT(mode), 'something else')}, but a regular file was expected")


@contextmanager
def opened(path: Path) -> Iterator[io.FileIO]:
    """A regular file, open for reading without a buffer; see :func:`open_regular`."""
    with io.FileIO(open_regular(path), "rb") as file:
        yield file


def read_bytes(path: Path, most: int = MAX_TEXT) -> bytes:
    """The content of a small file.

    Args:
        path: It.
        most: Bytes that it may have.

    Raises:
        NotRegular: It is no regular file, or has more.
        OSError: It cannot be read.
    """
    with opened(path) as file:
        pieces: list[bytes] = []
        left = (
            most + 1 if os.fstat(file.fileno()).st_size <= most else 0
        )  # what is said to be larger is not read at all
        while left and (piece := file.read(min(left, _PIECE_NBYTES))):
            pieces.append(piece)
            left -= len(piece)
        if not left:
            raise NotRegular(path, f"larger than {most:,} bytes, which is too much for what it should hold")
        return b"".join(pieces)


def read_text(path: Path, most: int = MAX_TEXT, errors: str = "strict") -> str:
    """The content of a small file as UTF-8 text; see :func:`read_bytes`.

    Raises:
        UnicodeDecodeError: It is none.
    """
    return read_bytes(path, most).decode("utf-8", errors)


def read_line(path: Path) -> str:
    """The one line of a tracker, whatever is in it; see :func:`read_bytes`."""
    return read_text(path, MAX_LINE, "replace").strip()


def read_json(path: Path, most: int = MAX_TEXT) -> Any:
    """What a small JSON file holds; see :func:`read_bytes`.

    Raises:
        ValueError: It is no JSON, or nested so deeply that no honest writer made it.
    """
    return parse_json(read_bytes(path, most))


def parse_json(data: bytes | str, **hooks: Any) -> Any:
    """What a JSON text holds.

    Args:
        data: It.
        hooks: As ``json.loads`` takes them.

    Raises:
        ValueError: See :func:`read_json`.
    """
    try:
        value = json.loads(data, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [part for whole in level if isinstance(whole, dict | list) for part in _parts(whole)]
        if not level:
            return value
    raise ValueError(f"it is nested more than {_MAX_DEPTH} levels deep")


def _parts(whole: dict[str, Any] | list[Any]) -> Iterator[Any]:
    parts = whole.values() if isinstance(whole, dict) else whole
    return (part for part in parts if type(part) in (dict, list))


def write_new(path: Path, data: bytes) -> None:
    """Write a small file that is not there yet.

    Raises:
        FileExistsError: Something is, be it a link that leads nowhere.
        OSError: It cannot be written.
    """
    with path.open("xb") as file:
        file.write(data)
