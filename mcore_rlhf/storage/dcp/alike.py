"""Items that look alike: a folder of a hundred thousand has a few kinds of them, and the bytes of a kind are taken apart once.

Zips of one kind differ in their tensor's data, in the CRC of those, and in the serialization id that torch hashes from it. Every
other byte of both ends is compared with that of the first zip of the kind, which was taken apart and checked as a whole; the two
copies of the data's CRC are compared with each other, and the id with its own CRC. So nothing goes unchecked, at a tenth of the cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .. import zipheaders as z
from ..checksum import crc32
from ..pt import SERIALIZATION_ID
from ..reading import ByteSource
from ..stored import StoredTensor
from ..torchzip import Directory, Member
from .items import Item, open_item, stored_tensor

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
class Kinds:
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

    def _taken_apart(self, item: Item, directory: Directory, *, is_tensor: bool) -> Ends:
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

    def _tensor(self, item: Item, directory: Directory, nbytes: int) -> StoredTensor:
        """How an item stores its tensor. Chunks of one shape have equal pickles: each is taken apart once."""
        member = directory.members[_PICKLE]
        pickled = item.read(member.byte_offset - item.offset, member.nbytes)
        if (pickled, nbytes) not in self._stored:
            self._stored[pickled, nbytes] = stored_tensor(item.file, item.key, directory)
        return self._stored[pickled, nbytes]


def _kind(item: Item, directory: Directory, ends: Ends) -> _Kind | None:
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


def _places(item: Item, directory: Directory, entries: dict[str, z.Entry], name: str) -> tuple[Range, ...]:
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
