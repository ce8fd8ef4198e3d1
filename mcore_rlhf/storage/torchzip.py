"""A zip as torch lays it out: its headers, packed and parsed here and nowhere else, and the directory that says which record lies where.

No torch, and no byte of a tensor is read. Zip itself: PKWARE ``APPNOTE.TXT`` 6.3.10.
Source: pytorch ``caffe2/serialize/inline_container.cc`` (``getPadding``, ``writeRecord``) over
``third_party/miniz-3.0.2`` (``mz_zip_writer_add_mem_ex_v2``); compared byte for byte with files of torch
2.13. Members are stored, not compressed. The local header has neither sizes nor CRC (flag bit 3): both follow
the data in a descriptor, which an empty member lacks. An extra field ``FB`` pads every member to a multiple
of 64 bytes. zip64 fields appear where a length or the header's position reaches 4 GiB; the zip64 end record
is always there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

from ..errors import CheckpointError, Corrupt, Incomplete, Unsupported
from .checksum import crc32
from .paths import ReadablePath
from .reading import ByteSource, opened

ALIGNMENT = 64
LIMIT32 = 0xFFFFFFFF
LIMIT16 = 0xFFFF
HAS_DESCRIPTOR = 0x0008
IS_UTF8 = 0x0800
IS_ENCRYPTED = 0x0001
ZIP64_TAG = 1

LOCAL = struct.Struct("<4sHHHHHIIIHH")
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_CENTRAL_READ = struct.Struct("<4s4xHH4xIIIHHH8xI")  # without what a reader has no use for
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
        END64_SIGNATURE, END64.size - 12, made_by, needed, 0, 0, count, count, directory_nbytes, directory_offset
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
        signature, flags, method, crc, packed, nbytes, name_n, extra_n, comment_n, offset = _CENTRAL_READ.unpack_from(
            raw, at
        )
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


def data_offset(entry: Entry, raw: bytes) -> int | None:
    """Where a member's bytes begin.

    Args:
        entry: What the directory says of it.
        raw: Its local header and name.

    Returns:
        The offset; None where that is the header of something else.
    """
    _, _, flags, method, _, _, _, _, nbytes, name_nbytes, extra_nbytes = LOCAL.unpack_from(raw)
    lengths_follow = bool(flags & HAS_DESCRIPTOR)  # then checked there
    same = (
        raw.startswith(LOCAL_SIGNATURE)
        and (flags, method, name_nbytes) == (entry.flags, entry.method, len(entry.name))
        and raw[LOCAL.size :] == entry.name
        and (lengths_follow or nbytes in (entry.nbytes, LIMIT32))
    )
    return entry.header_offset + len(raw) + int(extra_nbytes) if same else None


def contradiction(entry: Entry, at: int, read: Callable[[int, int], bytes]) -> str:
    """What stands behind a member's data and not in the directory: length and CRC are there a second time, so that a flipped bit shows.

    Args:
        entry: What the directory says.
        at: Where the data begin.
        read: Gives the bytes of an offset and a length.

    Returns:
        The words for it; none where the two agree.
    """
    if not entry.nbytes and entry.crc32:  # behind empty members nothing stands
        return f"member {entry.name!r} is empty, but its CRC is {entry.crc32:08x}"
    placed = Placed("", entry.header_offset, at, entry.nbytes)
    expected = descriptor(placed, entry.crc32) if entry.flags & HAS_DESCRIPTOR else b""
    if not expected or read(placed.data_end, len(expected)) == expected:
        return ""
    return (
        f"length or CRC behind member {entry.name!r}, at byte {placed.data_end}, are not those of the directory "
        f"({entry.nbytes} bytes, {entry.crc32:08x})"
    )


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


_RESAVE = "Load it with torch once and save it again: torch.save(torch.load(path), path)."
_RESTORE = "Copy the file again from where it came from, or use an older step."


@dataclass(frozen=True, slots=True)
class Member:
    """One member of the zip.

    Args:
        name: Name without the archive's root folder: ``data.pkl``, ``data/0``, ``version``.
        byte_offset: Where its bytes lie in the file.
        nbytes: Its length.
        crc32: Its CRC-32 as the directory has it; meaningless where :attr:`Directory.checksummed` is false.
    """

    name: str
    byte_offset: int
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Directory:
    """What a torch-save zip holds.

    Args:
        path: The file.
        stem: The archive's root folder, the stem of the name under which the file was first written.
        nbytes: Length of the file.
        members: By name without the stem, in the order of the directory.
        checksummed: False where the file was written without CRCs
            (``torch.serialization.set_crc32_options(False)`` stores zeros): then nothing can be checked.
    """

    path: ReadablePath
    stem: str
    nbytes: int
    members: Mapping[str, Member]
    checksummed: bool

    @property
    def checksums(self) -> tuple[tuple[str, int, int, int], ...]:
        """``(key, byte offset, bytes, crc32)`` of every member, where it has any."""
        members = self.members.values() if self.checksummed else ()
        return tuple((m.name, m.byte_offset, m.nbytes, m.crc32) for m in members)

    def read(self, name: str, open_file: ByteSource | None = None) -> bytes:
        """The bytes of a small member, checked against their CRC; of the file that is open, where one is given.

        Raises:
            Incomplete: There is no such member.
            Corrupt: The bytes do not have the CRC that the directory says.
            StorageError: They cannot be read.
        """
        member = self.members.get(name)
        if member is None:
            raise Incomplete(f"{self.path}: the record {name!r} is missing.\n{_RESTORE}")
        with nullcontext(open_file) if open_file else opened(self.path) as file:
            data = file.read(member.byte_offset, member.nbytes)
        self.check(member, crc32(data))
        return data

    def check(self, member: Member, found: int) -> None:
        """Compare the CRC of a member's bytes with the directory's.

        Raises:
            Corrupt: They differ.
        """
        if self.checksummed and found != member.crc32:
            raise Corrupt(
                f"{self.path}: record {member.name!r} is damaged: its CRC-32 is {found:08x}, "
                f"the file's directory says {member.crc32:08x}.\n{_RESTORE}"
            )


def read_directory(path: ReadablePath) -> Directory:
    """Read and check the directory of a file that ``torch.save`` wrote.

    Raises:
        NotACheckpoint: There is no such file.
        Incomplete: It is empty or cut off.
        Corrupt: The directory contradicts itself or the file.
        Unsupported: It is not a zip of ``torch.save``, or big-endian, compressed or encrypted.
        StorageError: It cannot be read.
    """
    with opened(path) as file:
        return directory_of(file)


def directory_of(file: ByteSource) -> Directory:
    """That of a file that is open; see :func:`read_directory`."""
    return _Reader(file).directory()


@dataclass(frozen=True, slots=True)
class _Reader:
    file: ByteSource

    @property
    def path(self) -> ReadablePath:
        return self.file.path

    @property
    def nbytes(self) -> int:
        return self.file.nbytes

    def directory(self) -> Directory:
        entries, directory_offset = self._entries()
        members: dict[str, Member] = {}
        stems: set[str] = set()
        placed = self._worked_out(entries, directory_offset) if self.file.far else {}
        for entry in entries:
            stem, name, member = self._member(entry, directory_offset, placed.get(entry.header_offset))
            if name in members:
                raise self._corrupt(f"its directory lists {name!r} twice")
            stems.add(stem)
            members[name] = member
        self._check_torch(members, stems)
        self._check_overlaps(entries, members)
        checksummed = any(member.crc32 for member in members.values())
        found = Directory(self.path, stems.pop(), self.nbytes, members, checksummed)
        self._check_byteorder(found)
        return found

    def _entries(self) -> tuple[list[Entry], int]:
        count, directory_nbytes, offset = self._locate()
        if offset + directory_nbytes > self.nbytes:
            raise self._corrupt(
                f"its directory should lie at bytes {offset} to {offset + directory_nbytes}, "
                f"but the file has {self.nbytes}"
            )
        raw = self.file.read(offset, directory_nbytes)
        try:
            entries = list(parse_entries(raw, count))
        except (struct.error, ValueError) as error:
            raise self._corrupt(f"its directory cannot be read ({error})") from error
        return entries, offset

    def _locate(self) -> tuple[int, int, int]:
        """Find the directory: (number of entries, bytes, offset)."""
        tail_nbytes = min(self.nbytes, LIMIT16 + END.size + LOCATOR64.size)
        tail = self.file.read(self.nbytes - tail_nbytes, tail_nbytes)
        at = tail.rfind(END_SIGNATURE)
        if at < 0 or at + END.size > len(tail):
            raise self._not_a_zip()
        _, _, _, _, count, directory_nbytes, offset, comment = END.unpack_from(tail, at)
        if at + END.size + comment != len(tail):
            raise self._corrupt("there are foreign bytes behind the end of the zip")
        locator = at - LOCATOR64.size
        if locator >= 0 and tail.startswith(LOCATOR64_SIGNATURE, locator):
            return self._locate64(LOCATOR64.unpack_from(tail, locator)[2])
        return int(count), int(directory_nbytes), int(offset)

    def _locate64(self, at: int) -> tuple[int, int, int]:
        if at + END64.size > self.nbytes:
            raise self._corrupt(f"its zip64 end record should lie at byte {at}, past the end")
        signature, *_, count, directory_nbytes, offset = END64.unpack(self.file.read(at, END64.size))
        if signature != END64_SIGNATURE:
            raise self._corrupt(f"there is no zip64 end record at byte {at}")
        return count, directory_nbytes, offset

    def _worked_out(self, entries: list[Entry], directory_offset: int) -> dict[int, int]:
        """Where members' bytes begin, by their headers, without a look at any: if all lie exactly where torch puts them.

        What a flipped bit in a header would tell is not seen then; CRCs of the bytes themselves are held against the directory.
        """
        found, end = {}, 0
        for entry in sorted(entries, key=lambda entry: entry.header_offset):
            placed = place(entry.name.decode(errors="replace"), entry.nbytes, entry.header_offset)
            if entry.header_offset != end:
                return {}
            found[entry.header_offset], end = placed.data_offset, placed.end
        if end != directory_offset:
            return {}
        tensors = [found[entry.header_offset] for entry in entries if b"/data/" in entry.name]
        self.file.expect(0, min(tensors, default=directory_offset))  # the pickle, and what says the byte order
        return found

    def _member(self, entry: Entry, directory_offset: int, known: int | None = None) -> tuple[str, str, Member]:
        try:
            stem, _, name = entry.name.decode().partition("/")
        except UnicodeDecodeError as error:
            raise self._corrupt(f"a member's name is not UTF-8: {entry.name!r}") from error
        if entry.method or entry.flags & IS_ENCRYPTED:
            how = "encrypted" if entry.flags & IS_ENCRYPTED else "compressed"
            raise Unsupported(f"{self.path}: member {name!r} is {how}; torch.save never does that.\n{_RESAVE}")
        offset = self._data_offset(entry, directory_offset) if known is None else known
        if offset + entry.nbytes > directory_offset:
            raise self._corrupt(
                f"member {name!r} should end at byte {offset + entry.nbytes}, "
                f"but the directory begins at {directory_offset}"
            )
        if known is None:
            complaint = contradiction(entry, offset, self.file.read)
            if complaint:
                raise self._corrupt(complaint)
        return stem, name, Member(name, offset, entry.nbytes, entry.crc32)

    def _data_offset(self, entry: Entry, directory_offset: int) -> int:
        """Where the member's bytes begin: behind its local header, which must agree with the directory."""
        at, head = entry.header_offset, LOCAL.size + len(entry.name)
        raw = self.file.read(at, head) if at + head <= directory_offset else b""
        if not raw.startswith(LOCAL_SIGNATURE):
            raise self._corrupt(f"member {entry.name!r} should have its header at byte {at}, but there is none")
        found = data_offset(entry, raw)
        if found is None:
            raise self._corrupt(f"the header at byte {at} is not that of {entry.name!r}, as the directory says")
        return found

    def _check_torch(self, members: Mapping[str, Member], stems: set[str]) -> None:
        if "constants.pkl" in members or any(name.startswith("code/") for name in members):
            raise Unsupported(f"{self.path}: a TorchScript archive, which holds a program, not a checkpoint.")
        if "data.pkl" not in members or len(stems) != 1:
            raise Unsupported(f"{self.path}: a zip file, but not one that torch.save wrote (no data.pkl in it).")

    def _check_overlaps(self, entries: list[Entry], members: Mapping[str, Member]) -> None:
        end = 0
        pairs = zip(entries, members.values(), strict=True)
        for entry, member in sorted(pairs, key=lambda pair: pair[0].header_offset):
            if entry.header_offset < end:
                raise self._corrupt(f"member {member.name!r} overlaps the one before it")
            end = member.byte_offset + member.nbytes

    def _check_byteorder(self, directory: Directory) -> None:
        if "byteorder" in directory.members and directory.read("byteorder", self.file) != b"little":
            raise Unsupported(
                f"{self.path}: written on a big-endian machine.\nRead it there and save it again with "
                "little-endian bytes; on this machine torch.load followed by torch.save does it."
            )

    def _corrupt(self, what: str) -> Corrupt:
        return Corrupt(f"{self.path}: the file is damaged: {what}.\n{_RESTORE}")

    def _not_a_zip(self) -> CheckpointError:
        if not self.nbytes:
            return Incomplete(f"{self.path}: the file is empty.\n{_RESTORE}")
        head = self.file.pread(512, 0)
        if head.startswith(LOCAL_SIGNATURE):
            return Incomplete(
                f"{self.path}: the file is cut off: the directory that ends every zip is missing "
                f"({self.nbytes} bytes are there). The job was probably killed while it wrote.\n{_RESTORE}"
            )
        if head.startswith(b"version https://git-lfs"):
            return Incomplete(f"{self.path}: only a Git LFS pointer.\nFetch the file itself: git lfs pull")
        if head[257:262] == b"ustar" or head[:1] == b"\x80":
            return Unsupported(f"{self.path}: in the format of torch before 1.6, not a zip.\n{_RESAVE}")
        return Corrupt(
            f"{self.path}: not a file of torch.save: a zip was expected, but it begins with {head[:8]!r}.\n{_RESTORE}"
        )
