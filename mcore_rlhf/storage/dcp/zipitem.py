"""A small zip of ``torch.save`` that is laid out in memory, except for its tensors' data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from .. import zipheaders as z
from ..checksum import crc32
from ..pickling import PickledTree
from ..ptwriter import ID_DIGITS, SERIALIZATION_ID, layout, small_members

_STEM = "archive"
"""torch's name for what is saved to a stream and not to a file."""


@dataclass(frozen=True, slots=True)
class ZipItem:
    """The layout of a zip.

    Args:
        members: Where each member lies, from the zip's first byte.
        small: Content of those that are known: everything but records and the id.
    """

    members: Mapping[str, z.Placed]
    small: Mapping[str, bytes]

    @property
    def nbytes(self) -> int:
        """Length of the zip."""
        return self._cursor + len(self._ends({}))

    @property
    def _cursor(self) -> int:
        return self.members[SERIALIZATION_ID].end

    def offset(self, name: str) -> int:
        """Where the bytes of a member begin, from the zip's first byte."""
        return self.members[name].data_offset

    def head(self) -> bytes:
        """Everything in front of the first record's bytes."""
        parts = []
        for name, member in self.members.items():
            parts.append(z.local_header(member))
            if name not in self.small:
                break
            parts += [self.small[name], z.descriptor(member, crc32(self.small[name]))]
        return b"".join(parts)

    def tail(self, crc: int) -> bytes:
        """Everything behind the bytes of the one record.

        Args:
            crc: The record's CRC-32.
        """
        names = list(self.members)
        first = next(name for name in names if name not in self.small)
        content = dict(self.small)
        crcs = {name: crc32(data) for name, data in self.small.items()} | {first: crc}
        content[SERIALIZATION_ID] = _identity(crcs)
        crcs[SERIALIZATION_ID] = crc32(content[SERIALIZATION_ID])
        parts = [z.descriptor(self.members[first], crc)]
        for name in names[names.index(first) + 1 :]:
            parts += [z.local_header(self.members[name]), content[name], z.descriptor(self.members[name], crcs[name])]
        return b"".join([*parts, self._ends(crcs)])

    def whole(self, contents: Mapping[str, bytes]) -> bytes:
        """The whole zip.

        Args:
            contents: The bytes of every record.
        """
        content = {**self.small, **contents}
        crcs = {name: crc32(data) for name, data in content.items()}
        content[SERIALIZATION_ID] = _identity(crcs)
        crcs[SERIALIZATION_ID] = crc32(content[SERIALIZATION_ID])
        parts: list[bytes] = []
        for name, member in self.members.items():
            parts += [z.local_header(member), content[name], z.descriptor(member, crcs[name])]
        return b"".join([*parts, self._ends(crcs)])

    def _ends(self, crcs: Mapping[str, int]) -> bytes:
        entries = b"".join(z.central_entry(member, crcs.get(name, 0)) for name, member in self.members.items())
        return entries + z.end_records(len(self.members), len(entries), self._cursor)


def zip_item(pickled: PickledTree) -> ZipItem:
    """Lay a zip out.

    Args:
        pickled: Its pickle, and the lengths of its records.
    """
    small = small_members(pickled)
    return ZipItem(layout(_STEM, small, pickled), small)


def _identity(crcs: Mapping[str, int]) -> bytes:
    """Torch stores a hash of names and CRCs there (``PyTorchStreamWriter::writeSerializationId``); ours is one too."""
    text = ";".join(f"{name}:{crc:08x}" for name, crc in sorted(crcs.items()))
    return f"{int.from_bytes(hashlib.sha256(text.encode()).digest(), 'big') % 10**ID_DIGITS:0{ID_DIGITS}d}".encode()
