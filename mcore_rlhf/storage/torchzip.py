"""The directory of a torch-save zip: which record lies where. No torch, and no byte of a tensor is read.

Layout: pytorch ``caffe2/serialize/inline_container.cc``; zip itself: PKWARE ``APPNOTE.TXT`` 6.3.10.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import CheckpointError, Corrupt, Incomplete, Unsupported
from . import zipheaders as z
from .checksum import crc32
from .paths import ReadablePath
from .reading import ByteSource, opened

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

    def read(self, name: str) -> bytes:
        """The bytes of a small member, checked against their CRC.

        Raises:
            Incomplete: There is no such member.
            Corrupt: The bytes do not have the CRC that the directory says.
            StorageError: They cannot be read.
        """
        member = self.members.get(name)
        if member is None:
            raise Incomplete(f"{self.path}: the record {name!r} is missing.\n{_RESTORE}")
        with opened(self.path) as file:
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
        for entry in entries:
            stem, name, member = self._member(entry, directory_offset)
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

    def _entries(self) -> tuple[list[z.Entry], int]:
        count, directory_nbytes, offset = self._locate()
        if offset + directory_nbytes > self.nbytes:
            raise self._corrupt(
                f"its directory should lie at bytes {offset} to {offset + directory_nbytes}, "
                f"but the file has {self.nbytes}"
            )
        raw = self.file.read(offset, directory_nbytes)
        try:
            entries = list(z.parse_entries(raw, count))
        except (struct.error, ValueError) as error:
            raise self._corrupt(f"its directory cannot be read ({error})") from error
        return entries, offset

    def _locate(self) -> tuple[int, int, int]:
        """Find the directory: (number of entries, bytes, offset)."""
        tail_nbytes = min(self.nbytes, z.LIMIT16 + z.END.size + z.LOCATOR64.size)
        tail = self.file.read(self.nbytes - tail_nbytes, tail_nbytes)
        at = tail.rfind(z.END_SIGNATURE)
        if at < 0 or at + z.END.size > len(tail):
            raise self._not_a_zip()
        _, _, _, _, count, directory_nbytes, offset, comment = z.END.unpack_from(tail, at)
        if at + z.END.size + comment != len(tail):
            raise self._corrupt("there are foreign bytes behind the end of the zip")
        locator = at - z.LOCATOR64.size
        if locator >= 0 and tail.startswith(z.LOCATOR64_SIGNATURE, locator):
            return self._locate64(z.LOCATOR64.unpack_from(tail, locator)[2])
        return int(count), int(directory_nbytes), int(offset)

    def _locate64(self, at: int) -> tuple[int, int, int]:
        if at + z.END64.size > self.nbytes:
            raise self._corrupt(f"its zip64 end record should lie at byte {at}, past the end")
        signature, *_, count, directory_nbytes, offset = z.END64.unpack(self.file.read(at, z.END64.size))
        if signature != z.END64_SIGNATURE:
            raise self._corrupt(f"there is no zip64 end record at byte {at}")
        return count, directory_nbytes, offset

    def _member(self, entry: z.Entry, directory_offset: int) -> tuple[str, str, Member]:
        try:
            stem, _, name = entry.name.decode().partition("/")
        except UnicodeDecodeError as error:
            raise self._corrupt(f"a member's name is not UTF-8: {entry.name!r}") from error
        if entry.method or entry.flags & z.IS_ENCRYPTED:
            how = "encrypted" if entry.flags & z.IS_ENCRYPTED else "compressed"
            raise Unsupported(f"{self.path}: member {name!r} is {how}; torch.save never does that.\n{_RESAVE}")
        offset = self._data_offset(entry, directory_offset)
        if offset + entry.nbytes > directory_offset:
            raise self._corrupt(
                f"member {name!r} should end at byte {offset + entry.nbytes}, "
                f"but the directory begins at {directory_offset}"
            )
        self._check_descriptor(entry, offset)
        return stem, name, Member(name, offset, entry.nbytes, entry.crc32)

    def _check_descriptor(self, entry: z.Entry, offset: int) -> None:
        """Behind the data, length and CRC stand a second time: a flipped bit in the directory shows here."""
        if not entry.nbytes and entry.crc32:  # behind empty members nothing stands
            raise self._corrupt(f"member {entry.name!r} is empty, but its CRC is {entry.crc32:08x}")
        if not entry.flags & z.HAS_DESCRIPTOR:
            return
        placed = z.Placed("", entry.header_offset, offset, entry.nbytes)
        expected = z.descriptor(placed, entry.crc32)
        if self.file.pread(len(expected), placed.data_end) != expected:
            raise self._corrupt(
                f"length or CRC behind member {entry.name!r}, at byte {placed.data_end}, are not those of the "
                f"directory ({entry.nbytes} bytes, {entry.crc32:08x})"
            )

    def _data_offset(self, entry: z.Entry, directory_offset: int) -> int:
        """Where the member's bytes begin: behind its local header, which must agree with the directory."""
        at, head = entry.header_offset, z.LOCAL.size + len(entry.name)
        raw = self.file.read(at, head) if at + head <= directory_offset else b""
        if not raw.startswith(z.LOCAL_SIGNATURE):
            raise self._corrupt(f"member {entry.name!r} should have its header at byte {at}, but there is none")
        _, _, flags, method, _, _, _, _, nbytes, name_nbytes, extra_nbytes = z.LOCAL.unpack_from(raw)
        lengths_follow = bool(flags & z.HAS_DESCRIPTOR)  # then checked there
        same = (
            (flags, method, name_nbytes) == (entry.flags, entry.method, len(entry.name))
            and raw[z.LOCAL.size :] == entry.name
            and (lengths_follow or nbytes in (entry.nbytes, z.LIMIT32))
        )
        if not same:
            raise self._corrupt(f"the header at byte {at} is not that of {entry.name!r}, as the directory says")
        return at + head + int(extra_nbytes)

    def _check_torch(self, members: Mapping[str, Member], stems: set[str]) -> None:
        if "constants.pkl" in members or any(name.startswith("code/") for name in members):
            raise Unsupported(f"{self.path}: a TorchScript archive, which holds a program, not a checkpoint.")
        if "data.pkl" not in members or len(stems) != 1:
            raise Unsupported(f"{self.path}: a zip file, but not one that torch.save wrote (no data.pkl in it).")

    def _check_overlaps(self, entries: list[z.Entry], members: Mapping[str, Member]) -> None:
        end = 0
        pairs = zip(entries, members.values(), strict=True)
        for entry, member in sorted(pairs, key=lambda pair: pair[0].header_offset):
            if entry.header_offset < end:
                raise self._corrupt(f"member {member.name!r} overlaps the one before it")
            end = member.byte_offset + member.nbytes

    def _check_byteorder(self, directory: Directory) -> None:
        if "byteorder" in directory.members and directory.read("byteorder") != b"little":
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
        if head.startswith(z.LOCAL_SIGNATURE):
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
