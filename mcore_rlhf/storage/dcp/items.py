"""One item of a ``.distcp``: a whole zip of ``torch.save`` in the middle of a file, and where the data lie in it.

Source: torch 2.13.0, ``distributed/checkpoint/filesystem.py`` (``_write_item``): tensors go through ``torch.save`` to the
file, objects through ``torch.save`` to memory; either way the zip's own offsets count from the item's first byte.
:mod:`..torchzip` reads a file that is one zip, header by header; here a folder can have a hundred thousand small ones, so
an item's two ends are read, in one go each, and everything is checked in them.

Such a folder has a few kinds of items, and the bytes of a kind are taken apart once (:class:`ItemKinds`). Zips of one kind differ in
their tensor's data, in the CRC of those, and in the serialization id that torch hashes from it. Every other byte of both ends is
compared with that of the first zip of the kind, which was taken apart and checked as a whole; the two copies of the data's CRC are
compared with each other, and the id with its own CRC. So nothing goes unchecked, at a tenth of the cost.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from mcore_rlhf.errors import CheckpointError, Corrupt, Incomplete, Unsupported

from .. import torchzip as z
from ..checksum import crc32
from ..pt import SERIALIZATION_ID, PtFile
from ..reading import ByteSource
from ..resolve import read_tree
from ..stored import StoredTensor
from ..torchzip import Directory, Member
from .metadata import RESTORE

_END_NBYTES = 1024
"""Both ends of an item of one tensor fit: torch 2.13 writes 700 bytes before the data and 900 behind them."""


def item_directory(file: ByteSource, key: str, offset: int, length: int) -> Directory:
    """The members of one item; their offsets count from the start of the file.

    Args:
        file: The file.
        key: The item's name, for messages.
        offset, length: Where it lies, as ``.metadata`` says.

    Raises:
        Incomplete: The file is too short.
        Corrupt: There is no zip of ``torch.save`` between these bytes, or it contradicts itself.
        Unsupported: It is compressed or encrypted.
    """
    return open_item(file, key, offset, length).directory()


def open_item(file: ByteSource, key: str, offset: int, length: int) -> DcpItem:
    """Read the two ends of an item; see :func:`item_directory`.

    Raises:
        Incomplete: The file is too short.
    """
    if offset + length > file.nbytes:
        raise Incomplete(
            f"{file.path}: {key} should lie at bytes {offset} to {offset + length}, but the file has {file.nbytes}; "
            f"it was cut off.\n{RESTORE}"
        )
    return DcpItem(file, key, offset, length, *_ends(file, offset, length))


def _ends(file: ByteSource, offset: int, length: int) -> tuple[bytes, bytes]:
    if length <= 2 * _END_NBYTES:
        whole = file.read(offset, length)
        return whole, whole
    return file.read(offset, _END_NBYTES), file.read(offset + length - _END_NBYTES, _END_NBYTES)


@dataclass(frozen=True, slots=True)
class DcpItem:
    """An item, of which the two ends are in memory.

    Args:
        file: The file.
        key: Its name, for messages.
        offset, length: Where it lies.
        head, tail: The two ends; each the whole item where that is short.
    """

    file: ByteSource
    key: str
    offset: int
    length: int
    head: bytes
    tail: bytes

    def directory(self) -> Directory:
        """The members of its zip, checked; their offsets count from the start of the file.

        Raises:
            CheckpointError: As :func:`item_directory`.
        """
        try:
            found = {member.name: member for member in self._members()}
        except (struct.error, ValueError, UnicodeDecodeError) as error:
            raise self._corrupt(f"the directory of its zip cannot be read ({error})") from error
        if "data.pkl" not in found:
            raise self._corrupt("its zip has no data.pkl: torch.save did not write it")
        return Directory(self.file.path, "archive", self.file.nbytes, found, any(m.crc32 for m in found.values()))

    @property
    def directory_start(self) -> int:
        """Where the zip's directory begins, in bytes from the item's start."""
        return self._locate()[2]

    def entries(self) -> list[z.Entry]:
        """The zip's directory as it is."""
        count, nbytes, start = self._locate()
        return list(z.parse_entries(self.read(start, nbytes), count))

    def read(self, at: int, nbytes: int) -> bytes:
        """Bytes of the item, from what is in memory where possible.

        Raises:
            Corrupt: They lie outside the item.
        """
        behind = at - (self.length - len(self.tail))
        if at + nbytes <= len(self.head):
            return self.head[at : at + nbytes]
        if behind >= 0 and behind + nbytes <= len(self.tail):
            return self.tail[behind : behind + nbytes]
        if at < 0 or at + nbytes > self.length:
            raise self._corrupt(f"its zip points to byte {at + nbytes} of {self.length}")
        return self.file.read(self.offset + at, nbytes)

    def _members(self) -> Iterator[Member]:
        start = self.directory_start
        for entry in self.entries():
            if entry.method or entry.flags & z.IS_ENCRYPTED:
                raise Unsupported(f"{self.file.path}: {self.key}: {entry.name!r} in it is compressed or encrypted.")
            name = entry.name.decode().partition("/")[2]
            at = self._data_offset(entry)
            if at + entry.nbytes > start:
                raise self._corrupt(f"the record {name!r} in it is longer than the item")
            complaint = z.contradiction(entry, at, self.read)
            if complaint:
                raise self._corrupt(complaint)
            yield Member(name, self.offset + at, entry.nbytes, entry.crc32)

    def _locate(self) -> tuple[int, int, int]:
        """The zip's directory: (entries, bytes, offset from the item's start). torch writes no comment behind it."""
        size = z.END64.size + z.LOCATOR64.size + z.END.size
        ends = self.tail[-size:]
        if len(ends) < size or not ends.startswith(z.END64_SIGNATURE) or z.END_SIGNATURE not in ends[-z.END.size :]:
            raise self._corrupt(
                f"bytes {self.offset} to {self.offset + self.length} do not end as a zip of torch.save does"
            )
        *_, count, nbytes, start = z.END64.unpack_from(ends)
        if start + nbytes + size != self.length:
            raise self._corrupt(f"its zip has {start + nbytes + size} bytes, .metadata says {self.length}")
        return count, nbytes, start

    def _data_offset(self, entry: z.Entry) -> int:
        found = z.data_offset(entry, self.read(entry.header_offset, z.LOCAL.size + len(entry.name)))
        if found is None:
            raise self._corrupt(f"there is no header of {entry.name!r} at byte {self.offset + entry.header_offset}")
        return found

    def _corrupt(self, what: str) -> CheckpointError:
        return Corrupt(f"{self.file.path}: {self.key}, at byte {self.offset}: {what}.\n{RESTORE}")


def load_tree(file: ByteSource, directory: Directory, stubs: Collection[str]) -> PtFile:
    """What an item holds: its structure, with stored tensors; nothing of it is run.

    Args:
        file: The file.
        directory: The item's members.
        stubs: Names of classes that the user allows as inert stubs.

    Raises:
        CheckpointError: As :func:`..pt.read_pt`.
    """
    tree: Any = read_tree(directory.read("data.pkl"), file.path.name, directory, stubs)
    return PtFile(file.path.parent, file.path.name, tree, directory)


def stored_tensor(file: ByteSource, key: str, directory: Directory) -> StoredTensor:
    """How an item stores its one tensor.

    Args:
        file: The file.
        key: The item's name, for messages.
        directory: The item's members.

    Raises:
        Corrupt: It is something else than a tensor.
    """
    tree = load_tree(file, directory, ()).tree
    if not isinstance(tree, StoredTensor):
        raise Corrupt(f"{file.path}: {key} should be a tensor, but holds a {type(tree).__name__}.\n{RESTORE}")
    return tree


DATA = "data/0"
"""The one record of a tensor's zip."""

_PICKLE = "data.pkl"
_MOST = 16
"""Kinds of one length that are remembered: a tensor's dtype and shape are among what tells them apart."""
_CENTRAL_CRC, _DESCRIPTOR_CRC, _CRC_NBYTES = 16, 4, 4
"""Where a CRC stands in a member's entry and behind its data: PKWARE ``APPNOTE.TXT`` 6.3.10, 4.3.9 and 4.3.12."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Ends:
    """What the two ends of an item say.

    Args:
        records: ``(name, bytes from the item's start, bytes, crc32)`` of what has a checksum that was not checked: a tensor's data;
            of an object, its pickle and all its data.
        stored: How a tensor is stored; None for an object.
        data: Where a tensor's data begin, from the item's start, in bytes.
    """

    records: tuple[tuple[str, int, int, int], ...]
    stored: StoredTensor | None = None
    data: int = 0


@dataclass(frozen=True, slots=True)
class _Kind:
    """Items with equal bytes but for a CRC, an id and the data.

    Args:
        ends: What the first of them says.
        head, tail: ``(start, stop, bytes)`` that all of them have, counted from the start of that end.
        data_crcs: Where the CRC of the data stands in the tail, twice; empty where that may not differ.
        identity: Where the id stands in the tail, and its CRC, twice.
    """

    ends: Ends
    head: tuple[tuple[int, int, bytes], ...]
    tail: tuple[tuple[int, int, bytes], ...]
    data_crcs: tuple[Range, ...]
    identity: tuple[Range, Range, Range]

    def match(self, head: bytes, tail: bytes) -> Ends | None:
        """What an item says, if it is of this kind and sound."""
        if any(head[start:stop] != there for start, stop, there in self.head):
            return None
        if any(tail[start:stop] != there for start, stop, there in self.tail):
            return None
        content, *crcs = (tail[start:stop] for start, stop in self.identity)
        if crcs[0] != crcs[1] or int.from_bytes(crcs[0], "little") != crc32(content):
            return None
        if not self.data_crcs:
            return self.ends
        first, second = (tail[start:stop] for start, stop in self.data_crcs)
        if first != second:
            return None
        name, at, nbytes, _ = self.ends.records[0]
        return Ends(((name, at, nbytes, int.from_bytes(first, "little")),), self.ends.stored, self.ends.data)


@dataclass(slots=True)
class ItemKinds:
    """The kinds of items that were seen in a folder. For several threads: what one forgets, another finds again."""

    _kinds: dict[tuple[int, bool], tuple[_Kind, ...]] = field(default_factory=dict)
    _stored: dict[tuple[bytes, int], StoredTensor] = field(default_factory=dict)

    def ends(self, file: ByteSource, key: str, offset: int, length: int, *, is_tensor: bool) -> Ends:
        """Read and check the two ends of an item.

        Args:
            file: The file.
            key: The item's name, for messages.
            offset, length: Where it lies, as ``.metadata`` says.
            is_tensor: Whether it is a tensor or an object.

        Raises:
            CheckpointError: It is damaged, or something else than ``.metadata`` says.
        """
        item, at = open_item(file, key, offset, length), (length, is_tensor)
        known = self._kinds.get(at, ())
        for kind in known:
            found = kind.match(item.head, item.tail)
            if found is not None:
                return found
        directory = item.directory()
        ends = self._taken_apart(item, directory, is_tensor=is_tensor)
        new = _kind(item, directory, ends) if directory.checksummed else None
        if new is not None:
            self._kinds[at] = (new, *known[: _MOST - 1])
        return ends

    def _taken_apart(self, item: DcpItem, directory: Directory, *, is_tensor: bool) -> Ends:
        """What an item says; its small records are checked."""
        records: list[tuple[str, int, int, int]] = []
        for member in directory.members.values():
            at = member.byte_offset - item.offset
            if member.name == DATA if is_tensor else member.name.startswith("data"):
                if directory.checksummed and member.nbytes:
                    records.append((member.name, at, member.nbytes, member.crc32))
            else:
                directory.check(member, crc32(item.read(at, member.nbytes)))
        if not is_tensor:
            return Ends(tuple(records))
        data = directory.members.get(DATA, Member(DATA, item.offset, 0, 0))
        return Ends(tuple(records), self._tensor(item, directory, data.nbytes), data.byte_offset - item.offset)

    def _tensor(self, item: DcpItem, directory: Directory, nbytes: int) -> StoredTensor:
        """How an item stores its tensor. Chunks of one shape have equal pickles: each is taken apart once."""
        member = directory.members[_PICKLE]
        pickled = item.read(member.byte_offset - item.offset, member.nbytes)
        if (pickled, nbytes) not in self._stored:
            self._stored[pickled, nbytes] = stored_tensor(item.file, item.key, directory)
        return self._stored[pickled, nbytes]


def _kind(item: DcpItem, directory: Directory, ends: Ends) -> _Kind | None:
    """What items like this one have in common; None where that is not all in the two ends."""
    entries = {entry.name.partition(b"/")[2].decode(): entry for entry in item.entries()}
    identity = _places(item, directory, entries, SERIALIZATION_ID)
    data = _places(item, directory, entries, DATA) if ends.stored is not None and ends.records else ()
    if not identity:
        return None
    head, tail, behind = [], [], item.length - len(item.tail)
    for start, stop in _between(sorted((*identity, *data)), item.length):
        if stop <= len(item.head):
            head.append((start, stop, item.head[start:stop]))
        elif start >= behind:
            tail.append((start - behind, stop - behind, item.tail[start - behind : stop - behind]))
        else:
            return None
    if min(start for start, _ in (*identity, *data[1:])) < behind:
        return None
    content, first, second = ((start - behind, stop - behind) for start, stop in identity)
    crcs = tuple((start - behind, stop - behind) for start, stop in data[1:])
    return _Kind(ends, tuple(head), tuple(tail), crcs, (content, first, second))


def _places(item: DcpItem, directory: Directory, entries: dict[str, z.Entry], name: str) -> tuple[Range, ...]:
    """Where a member's content and the two copies of its CRC lie in an item; nothing where that is not so."""
    entry, member = entries.get(name), directory.members.get(name)
    if entry is None or member is None or not member.nbytes or not entry.flags & z.HAS_DESCRIPTOR:
        return ()
    start = member.byte_offset - item.offset
    crcs = (start + member.nbytes + _DESCRIPTOR_CRC, item.directory_start + entry.at + _CENTRAL_CRC)
    return (start, start + member.nbytes), *((at, at + _CRC_NBYTES) for at in crcs)


def _between(ranges: list[Range], length: int) -> Iterator[Range]:
    """What of ``length`` bytes lies in none of the ranges."""
    at = 0
    for start, stop in [*ranges, (length, length)]:
        if start > at:
            yield at, start
        at = stop
