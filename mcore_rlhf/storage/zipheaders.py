"""The headers of a zip file as torch lays it out: each one packed here and nowhere else.

Source: pytorch ``caffe2/serialize/inline_container.cc`` (``getPadding``, ``writeRecord``) over
``third_party/miniz-3.0.2`` (``mz_zip_writer_add_mem_ex_v2``); compared byte for byte with files of torch
2.13. Members are stored, not compressed. The local header has neither sizes nor CRC (flag bit 3): both follow
the data in a descriptor, which an empty member lacks. An extra field ``FB`` pads every member to a multiple
of 64 bytes. zip64 fields appear where a length or the header's position reaches 4 GiB; the zip64 end record
is always there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .checksum import crc32

ALIGNMENT = 64
LIMIT32 = 0xFFFFFFFF
LIMIT16 = 0xFFFF
HAS_DESCRIPTOR = 0x0008
IS_UTF8 = 0x0800
IS_ENCRYPTED = 0x0001
ZIP64_TAG = 1

LOCAL = struct.Struct("<4sHHHHHIIIHH")
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
END = struct.Struct("<4sHHHHIIH")
END64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR64 = struct.Struct("<4sIQI")

LOCAL_SIGNATURE = b"PK\3\4"
CENTRAL_SIGNATURE = b"PK\1\2"
END_SIGNATURE = b"PK\5\6"
END64_SIGNATURE = b"PK\6\6"
LOCATOR64_SIGNATURE = b"PK\6\7"
DESCRIPTOR_SIGNATURE = b"PK\7\x08"


@dataclass(frozen=True, slots=True)
class Placed:
    """A member that has its place in a file being written.

    Args:
        name: Full name, the archive's root folder included.
        header_offset: Where its local header lies.
        data_offset: Where its bytes lie; a multiple of 64.
        nbytes: Length.
    """

    name: str
    header_offset: int
    data_offset: int
    nbytes: int

    @property
    def data_end(self) -> int:
        """One past its last byte."""
        return self.data_offset + self.nbytes

    @property
    def end(self) -> int:
        """One past its descriptor: where the next member's header goes."""
        return self.data_end + len(descriptor(self, 0))

    @property
    def _flags(self) -> int:
        return IS_UTF8 | (HAS_DESCRIPTOR if self.nbytes else 0)

    def _zip64(self) -> tuple[bool, bool]:
        return self.nbytes >= LIMIT32, self.header_offset >= LIMIT32


def place(name: str, nbytes: int, header_offset: int) -> Placed:
    """Give a member its place: behind ``header_offset``, its data on a multiple of 64 (``getPadding``)."""
    fixed = LOCAL.size + len(name.encode()) + len(_local_zip64(nbytes, header_offset)) + 4
    data_offset = -(-(header_offset + fixed) // ALIGNMENT) * ALIGNMENT
    return Placed(name, header_offset, data_offset, nbytes)


def _local_zip64(nbytes: int, header_offset: int) -> bytes:
    """The zip64 field of a local header; its lengths are zero, as the descriptor has them."""
    body = (b"\0" * 16 if nbytes >= LIMIT32 else b"") + (
        struct.pack("<Q", header_offset) if header_offset >= LIMIT32 else b""
    )
    return struct.pack("<HH", ZIP64_TAG, len(body)) + body if body else b""


def local_header(member: Placed) -> bytes:
    """The bytes from ``member.header_offset`` to ``member.data_offset``."""
    name = member.name.encode()
    zip64 = _local_zip64(member.nbytes, member.header_offset)
    padding = member.data_offset - member.header_offset - LOCAL.size - len(name) - len(zip64) - 4
    extra = zip64 + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return LOCAL.pack(LOCAL_SIGNATURE, 0, member._flags, 0, 0, 0, 0, 0, 0, len(name), len(extra)) + name + extra


def descriptor(member: Placed, crc: int) -> bytes:
    """What follows the data: its CRC and twice its length, 8 bytes each in zip64. Nothing for an empty
    member.
    """
    if not member.nbytes:
        return b""
    lengths = "<4sIQQ" if any(member._zip64()) else "<4sIII"
    return struct.pack(lengths, DESCRIPTOR_SIGNATURE, crc, member.nbytes, member.nbytes)


def central_entry(member: Placed, crc: int) -> bytes:
    """The member's entry in the directory at the end of the file."""
    name = member.name.encode()
    long, far = member._zip64()
    values = ([member.nbytes, member.nbytes] if long else []) + ([member.header_offset] if far else [])
    extra = struct.pack(f"<HH{len(values)}Q", ZIP64_TAG, 8 * len(values), *values) if values else b""
    nbytes = LIMIT32 if long else member.nbytes
    offset = LIMIT32 if far else member.header_offset
    return (
        CENTRAL.pack(
            CENTRAL_SIGNATURE, 0, 0, member._flags, 0, 0, 0, crc, nbytes, nbytes, len(name), len(extra),
            0, 0, 0, 0, offset,
        )
        + name
        + extra
    )  # fmt: skip


def end_records(count: int, directory_nbytes: int, directory_offset: int) -> bytes:
    """The end of the file: zip64 end record, its locator, the classic end record."""
    made_by, needed = 0x031E, 0x002D  # miniz: "Unix, 3.0" and zip64
    end64 = END64.pack(
        END64_SIGNATURE,
        END64.size - 12,
        made_by,
        needed,
        0,
        0,
        count,
        count,
        directory_nbytes,
        directory_offset,
    )
    locator = LOCATOR64.pack(LOCATOR64_SIGNATURE, 0, directory_offset + directory_nbytes, 1)
    few = min(count, LIMIT16)
    end = END.pack(END_SIGNATURE, 0, 0, few, few, min(directory_nbytes, LIMIT32), min(directory_offset, LIMIT32), 0)
    return end64 + locator + end


@dataclass(frozen=True, slots=True)
class Entry:
    """A member as the directory of a file being read describes it; values as in the file, not yet checked. ``at``: where in it."""

    name: bytes
    flags: int
    method: int
    crc32: int
    nbytes: int
    header_offset: int
    at: int


def parse_entries(raw: bytes, count: int) -> Iterator[Entry]:
    """Take a directory apart.

    Raises:
        ValueError: It is not one, or not of so many entries.
        struct.error: It is cut off.
    """
    at = 0
    for _ in range(count):
        (
            signature,
            _,
            _,
            flags,
            method,
            _,
            _,
            crc,
            packed,
            nbytes,
            name_n,
            extra_n,
            comment_n,
            _,
            _,
            _,
            offset,
        ) = CENTRAL.unpack_from(raw, at)
        if signature != CENTRAL_SIGNATURE:
            raise ValueError(f"no entry at byte {at} of it")
        first, at = at, at + CENTRAL.size
        name, extra = raw[at : at + name_n], raw[at + name_n : at + name_n + extra_n]
        if LIMIT32 in (nbytes, packed, offset):
            nbytes, packed, offset = _zip64_values(extra, (nbytes, packed, offset))
        yield Entry(name, flags, method, crc, nbytes, offset, first)
        at += name_n + extra_n + comment_n
    if at != len(raw):
        raise ValueError(f"{len(raw) - at} bytes too many")


def _zip64_values(extra: bytes, values: tuple[int, ...]) -> Iterator[int]:
    """Replace each value that is 0xFFFFFFFF by the next one of the zip64 field (APPNOTE 4.5.3)."""
    at = 0
    while at + 4 <= len(extra):
        tag, nbytes = struct.unpack_from("<HH", extra, at)
        at += 4
        if tag == ZIP64_TAG:
            longs = iter(struct.unpack_from(f"<{nbytes // 8}Q", extra, at))
            return iter([next(longs, value) if value == LIMIT32 else value for value in values])
        at += nbytes
    return iter(values)


def archive(stem: str, members: Mapping[str, bytes]) -> tuple[bytes, dict[str, Placed]]:
    """A whole small zip in memory, and where its members lie in it."""
    body, directory, placed, cursor = [], [], {}, 0
    for name, data in members.items():
        member = placed[name] = place(f"{stem}/{name}", len(data), cursor)
        crc = crc32(data)
        body += [local_header(member), data, descriptor(member, crc)]
        directory.append(central_entry(member, crc))
        cursor = member.end
    entries = b"".join(directory)
    return b"".join(body) + entries + end_records(len(members), len(entries), cursor), placed
