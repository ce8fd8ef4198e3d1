"""Zips as torch writes them: records below their checksum, records with a new checksum, and the directory itself.

A ``.distcp`` file is many such zips in a row; what keeps the length of a record works in both.
"""

from __future__ import annotations

import random
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import pickles
from .change import Change, rewrite

LOCAL, CENTRAL, DESCRIPTOR, END = b"PK\3\4", b"PK\1\2", b"PK\7\x08", b"PK\5\6"


@dataclass(frozen=True)
class Record:
    """One record of a zip, and where its checksum is written.

    Args:
        name: Its name, without the zip's own folder.
        start, length: Its bytes.
        sums: Where in the file its CRC-32 stands.
    """

    name: str
    start: int
    length: int
    sums: tuple[int, ...]


def records(data: bytes | bytearray) -> Iterator[Record]:
    """Every stored record of every zip in a file."""
    at = data.find(LOCAL)
    while at >= 0:
        flags = struct.unpack_from("<H", data, at + 6)[0]
        name_length, extra_length = struct.unpack_from("<HH", data, at + 26)
        name = data[at + 30 : at + 30 + name_length]
        start = at + 30 + name_length + extra_length
        entry = data.find(CENTRAL, start)
        while entry >= 0 and data[entry + 46 : entry + 46 + name_length] != name:
            entry = data.find(CENTRAL, entry + 4)
        if entry < 0:
            return
        (length,) = struct.unpack_from("<I", data, entry + 24)
        sums = [entry + 16]
        if flags & 8 and data[start + length : start + length + 4] == DESCRIPTOR:
            sums.append(start + length + 4)
        elif not flags & 8:
            sums.append(at + 14)
        yield Record(name.decode("utf-8", "replace").partition("/")[2], start, length, tuple(sums))
        at = data.find(LOCAL, start + length)


def is_zip(path: Path) -> bool:
    """Whether a file begins as a zip."""
    with path.open("rb") as file:
        return file.read(4) == LOCAL


def flip_record(path: Path, rng: random.Random) -> Change | None:
    """Flip a bit of a record; its checksum stays."""
    data = bytearray(path.read_bytes())
    record = _drawn(data, rng)
    if record is None:
        return None
    at = rng.randrange(record.length)
    data[record.start + at] ^= 1 << rng.randrange(8)
    rewrite(path, bytes(data))
    return Change(f"flip a bit of byte {at} of {record.name}, below its CRC", checked=True)


def flip_and_sum(path: Path, rng: random.Random) -> Change | None:
    """Change bytes of a record, and make its checksum right."""
    data = bytearray(path.read_bytes())
    record = _drawn(data, rng)
    if record is None:
        return None
    piece = data[record.start : record.start + record.length]
    at = rng.randrange(record.length)
    piece[at : at + 8] = rng.choice((bytes(8), b"\xff" * 8, rng.randbytes(8), b"\0\0\xc0\x7f" * 2))[
        : record.length - at
    ]
    _put(data, record, bytes(piece))
    rewrite(path, bytes(data))
    return Change(f"overwrite bytes from {at} of {record.name}, CRC made right")


def edit_pickle(path: Path, rng: random.Random) -> Change | None:
    """Change opcodes of a pickle, and make a sound zip of it again."""
    data = path.read_bytes()
    found = [record for record in records(data) if record.name.endswith(".pkl")]
    if not found:
        return None
    record = rng.choice(found)
    pickled, alone = data[record.start : record.start + record.length], len(found) == 1
    for _ in range(1 if alone else 30):
        edited, text = pickles.edited(pickled, rng)
        if alone:
            rebuild(path, {record.name: edited})
            return Change(f"{record.name}: {text}")
        if len(edited) == len(pickled):
            whole = bytearray(data)
            _put(whole, record, edited)
            rewrite(path, bytes(whole))
            return Change(f"{record.name} at {record.start}: {text}")
    return None


def edit_record(path: Path, rng: random.Random) -> Change | None:
    """Remove, add, lengthen, shorten, swap or rename a record, in a sound zip."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        held = {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}
    name, other = rng.choice(sorted(held)), rng.choice(sorted(held))
    data = held[name]
    changes: dict[str, tuple[str, dict[str, bytes | None]]] = {
        "remove": (f"remove {name}", {name: None}),
        "cut": (f"cut {name}", {name: data[: len(data) // 2]}),
        "lengthen": (f"lengthen {name}", {name: data + bytes(8)}),
        "empty": (f"empty {name}", {name: b""}),
        "swap": (f"swap {name} and {other}", {name: held[other], other: data}),
        "rename": (f"rename {name}", {name: None, rng.choice(("../../x", "data/999", "/x", "", "data.pkl/x")): data}),
        "order": ("byteorder", {"byteorder": rng.choice((b"big", b"", b"middle", b"\xff"))}),
        "version": ("version", {"version": rng.choice((b"", b"0", b"99\n", b"x", b"9" * 500))}),
    }
    text, edits = changes[rng.choice(sorted(changes))]
    rebuild(path, edits)
    return Change(f"rebuilt zip: {text}")


def compress(path: Path, rng: random.Random) -> Change | None:
    """The same records, compressed or under another folder's name, or one of them twice."""
    if not zipfile.is_zipfile(path):
        return None
    how = rng.choice(("deflated", "renamed", "twice", "comment"))
    rebuild(path, {}, how)
    return Change(f"rebuilt zip: {how}")


def edit_directory(path: Path, rng: random.Random) -> Change | None:
    """Overwrite one field of a local header, of the directory, or of the end."""
    data = bytearray(path.read_bytes())
    kind, fields = rng.choice(
        (
            (LOCAL, ((4, 2), (6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2))),
            (CENTRAL, ((6, 2), (8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (42, 4))),
            (END, ((4, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2))),
        )
    )
    places = [at for at in range(len(data)) if data.startswith(kind, at)] if kind != END else [data.rfind(END)]
    if not places or places[0] < 0:
        return None
    offset, width = rng.choice(fields)
    at = rng.choice(places) + offset
    old = int.from_bytes(data[at : at + width], "little")
    new = rng.choice((0, 1, old + 1, max(old - 1, 0), old ^ 8, (1 << 8 * width) - 1, rng.getrandbits(8 * width)))
    data[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
    rewrite(path, bytes(data))
    return Change(f"field {offset} of {kind!r} at {at - offset}: {old} becomes {new}")


def rebuild(path: Path, edits: dict[str, bytes | None], how: str = "") -> None:
    """Write a zip anew with some records changed; None removes one."""
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        top = infos[0].filename.partition("/")[0] if infos else "archive"
        held: dict[str, bytes | None] = {i.filename.partition("/")[2]: archive.read(i) for i in infos}
    held |= edits
    path.unlink()
    top = "renamed" if how == "renamed" else top
    names = [*held, next(iter(held))] if how == "twice" else [*held]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if how == "deflated" else zipfile.ZIP_STORED) as archive:
        for name in names:
            if (data := held[name]) is not None:
                with warnings.catch_warnings(action="ignore"):  # of a name that is there already
                    archive.writestr(zipfile.ZipInfo(f"{top}/{name}"), data, archive.compression)
        if how == "comment":
            archive.comment = b"PK\5\6" * 5


def _drawn(data: bytes | bytearray, rng: random.Random) -> Record | None:
    """A record: a pickle, a storage, and seldom one of torch's notes."""
    found = [record for record in records(data) if record.length]
    kinds: dict[str, list[Record]] = {}
    for record in found:
        kinds.setdefault(".pkl" if record.name.endswith(".pkl") else record.name[:5], []).append(record)
    weights = [{".pkl": 6, "data/": 6}.get(kind, 1) for kind in kinds]
    return rng.choice(kinds[rng.choices([*kinds], weights)[0]]) if kinds else None


def _put(data: bytearray, record: Record, content: bytes) -> None:
    data[record.start : record.start + record.length] = content
    for at in record.sums:
        struct.pack_into("<I", data, at, zlib.crc32(content))


MUTATORS = (
    flip_record, flip_record, flip_and_sum, edit_pickle, edit_pickle, edit_pickle, edit_record, compress, edit_directory,
)  # fmt: skip
